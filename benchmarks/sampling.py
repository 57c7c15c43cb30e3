"""Time of one sampler call for a batch of rows, per kind of request: numpy, then the cpu backend's.

    PYTHONPATH=src python benchmarks/sampling.py [--vocab 49152] [--rows 64]

The two take turns, so that a busy machine slows both. Logits are normal with the given spread, so
`wide` is a worse case than a real model's text.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

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
    ("everything", 3, EVERYTHING),
]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    for name, spread, settings in CASES:
        numpy, native = median_seconds(args.rows, args.vocab, spread, settings)
        per_row = native / args.rows * 1e6
        print(
            f"{name:22s} {numpy * 1e3:8.2f} ms -> {native * 1e3:8.2f} ms  "
            f"{numpy / native:6.1f} times  {per_row:7.1f} us a row"
        )


if __name__ == "__main__":
    main()
