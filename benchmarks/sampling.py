"""Time of one sampler call for a batch of rows, per kind of request: numpy, then the cpu backend's.

    PYTHONPATH=src python benchmarks/sampling.py [--vocab 49152] [--rows 64]
    PYTHONPATH=src python benchmarks/sampling.py --model smollm2-135m

The two take turns, so that a busy machine slows both. Logits are normal with the given spread, so
`wide` is a worse case than a real model's text. With --model: the share that the sampler has of the
processor time of a decode step of that model on one thread, while it goes on with pieces of
benchmarks/perplexity.txt and every row asks for the same; numpy and native in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octavo import LLM
from octavo.kernels.cpu import make_kernels
from octavo.messages import NewRequest
from octavo.sampling.native import make_sampler
from octavo.sampling.state import RowState
from octavo.sampling_params import SamplingParams

REPEATS = 7
EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "min_p": 0.01, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 20, "logit_bias": {5: 1.0},
    "min_tokens": 50,
}  # fmt: skip
CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("greedy", 3, {"temperature": 0}),
    ("greedy, penalties", 3, {"temperature": 0, "repetition_penalty": 1.1}),
    ("greedy, 20 logprobs", 3, {"temperature": 0, "logprobs": 20}),
    ("temperature 1", 3, {}),
    ("temperature 1, flat", 0.01, {}),
    ("top_p 0.9", 3, {"temperature": 0.7, "top_p": 0.9}),
    ("top_p 0.9, wide", 1, {"top_p": 0.9}),
    ("top_k 50", 3, {"temperature": 0.7, "top_k": 50}),
    ("min_p 0.05", 3, {"temperature": 0.7, "min_p": 0.05}),
    ("processed logprobs", 3, {"top_p": 0.9, "logprobs": 5, "logprobs_mode": "processed"}),
    ("a plug-in", 3, {"logits_processors": {"xtc": {}}}),
    ("everything", 3, EVERYTHING),
]
SHARES: list[tuple[str, dict[str, Any]]] = [
    ("greedy", {"temperature": 0}),
    ("temperature 1", {}),
    ("top_p 0.9", {"top_p": 0.9}),
    ("top_k 50, top_p 0.9", {"top_k": 50, "top_p": 0.9}),
    ("top_p 0.9, 5 logprobs", {"top_p": 0.9, "logprobs": 5}),
]
STEPS = 24


def median_seconds(
    num_rows: int, vocab_size: int, spread: float, settings: dict[str, Any]
) -> list[float]:
    """Of the numpy sampler and of the native one."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)
    params = SamplingParams(**settings)
    tokens = tuple(range(100))
    rows = [
        RowState.from_new_request(NewRequest(i, i, tokens, 90, params, i, (2,)))
        for i in range(num_rows)
    ]
    samplers = [make_sampler(vocab_size, None), make_sampler(vocab_size, make_kernels().sampling)]
    times: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for sampler, taken in zip(samplers, times, strict=True):
            copy = logits.copy()
            start = time.perf_counter()
            sampler.sample(copy, rows)
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[REPEATS // 2] for taken in times]


class Timed:
    """A sampler that notes how long each call took."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.seconds = 0.0

    def sample(self, *args: Any) -> Any:
        start = time.thread_time()
        result = self.sampler.sample(*args)
        self.seconds = time.thread_time() - start
        return result


def decode_shares(llm: LLM, settings: dict[str, Any], num_rows: int) -> list[tuple[float, float]]:
    """(share of the sampler, milliseconds of a step), medians of decode steps: numpy, native."""
    runner = llm._engine.core.executor._runner  # type: ignore[attr-defined]
    native, run = runner.sampler, runner.run
    timed = [Timed(make_sampler(native.vocab_size, None)), Timed(native)]
    found: list[list[tuple[float, float]]] = [[], []]

    def step(plan: Any) -> Any:
        number = plan.step % 2
        runner.sampler = timed[number]
        start = time.thread_time()
        result = run(plan)
        taken = time.thread_time() - start
        if plan.num_scheduled_tokens == num_rows:  # only decodes
            found[number].append((timed[number].seconds / taken, taken * 1e3))
        return result

    runner.run = step
    text = llm.tokenizer.encode((Path(__file__).parent / "perplexity.txt").read_text())
    prompts = [text[48 * i : 48 * i + 32] for i in range(num_rows)]
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, seed=1, **settings)
    llm.generate(prompts, params, use_tqdm=False)
    runner.run, runner.sampler = run, native
    median: Callable[[Any], Any] = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
    return [(median([s for s, _ in each]), median([ms for _, ms in each])) for each in found]


def print_shares(model: str, num_rows: int) -> None:
    llm = LLM(model, max_num_seqs=num_rows, max_model_len=512, backend="cpu", threads=1)
    for name, settings in SHARES:
        (numpy, numpy_ms), (native, native_ms) = decode_shares(llm, settings, num_rows)
        print(
            f"{name:22s} {numpy:6.1%} of {numpy_ms:.0f} ms -> {native:6.1%} of {native_ms:.0f} ms"
        )
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--model", help="the share of this model's decode steps instead")
    args = parser.parse_args()
    if args.model:
        print_shares(args.model, args.rows)
        return
    for name, spread, settings in CASES:
        numpy, native = median_seconds(args.rows, args.vocab, spread, settings)
        per_row = native / args.rows * 1e6
        print(
            f"{name:22s} {numpy * 1e3:8.2f} ms -> {native * 1e3:8.2f} ms  "
            f"{numpy / native:6.1f} times  {per_row:7.1f} us a row"
        )


if __name__ == "__main__":
    main()
