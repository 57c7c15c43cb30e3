"""Decode steps of greedy rows: with logits written and sampled, and with the head's argmax alone.

    python benchmarks/argmax.py [--model smollm2-135m] [--dtype bfloat16] [--quantization int8]

The two take turns, step by step, so that a busy machine slows both. Printed: milliseconds of a
step's model and sampler, the median of each and of their difference. With --mixed every other row
asks for a logprob, so that it needs its logits either way.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.worker import model_runner

STEPS = 160


def step_times(llm: LLM, num_rows: int, *, mixed: bool) -> tuple[list[float], list[float]]:
    """Seconds of decode steps with logits of all rows, and of those between them."""
    runner = llm._engine.core.executor._runner  # type: ignore[attr-defined]
    run, argmax_only = runner.run, model_runner._argmax_only
    times: tuple[list[float], list[float]] = ([], [])
    number = 0

    def step(plan: Any) -> Any:
        nonlocal number
        number += 1
        start = time.perf_counter()
        result = run(plan)
        if plan.num_scheduled_tokens == num_rows:  # only decodes
            times[number % 2].append(time.perf_counter() - start)
        return result

    runner.run = step
    model_runner._argmax_only = lambda states: argmax_only(states) * np.int32(number % 2)
    text = llm.tokenizer.encode((Path(__file__).parent / "perplexity.txt").read_text())
    prompts = [text[48 * i : 48 * i + 32] for i in range(num_rows)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=STEPS,
            ignore_eos=True,
            logprobs=0 if mixed and i % 2 else None,
        )
        for i in range(num_rows)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    runner.run, model_runner._argmax_only = run, argmax_only
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--mixed", action="store_true")
    args = parser.parse_args()
    llm = LLM(args.model, max_num_seqs=256, max_model_len=512, enable_prefix_caching=False,
              dtype=args.dtype, quantization=args.quantization, threads=args.threads)  # fmt: skip
    for num_rows in map(int, args.rows.split(",")):
        old, new = (np.array(each) * 1e3 for each in step_times(llm, num_rows, mixed=args.mixed))
        pairs = min(len(old), len(new))
        gain = np.median(old[:pairs] - new[:pairs])
        print(f"{num_rows:>3} rows: {np.median(old):.2f} -> {np.median(new):.2f} ms a step, "
              f"{gain:.2f} ms less ({gain / np.median(old):.1%})")  # fmt: skip
    llm.close()


if __name__ == "__main__":
    main()
