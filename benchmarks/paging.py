"""What paging costs attention, by block size, against K and V in one contiguous block (R30).

    python benchmarks/paging.py [--isa amx] [--threads 2] [--repeats 31]

Each block size has a pool of its own, filled once, its blocks dealt out in random order. Sizes
take turns, so that a busy neighbour slows all alike; the time is the median of the turns, the
loss the median of each turn's ratio to the contiguous one. Sizes below 16 are gathered key by
key before they are read; from 16 up the kernel reads blocks where they lie.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from machine import SMOLLM2_135M, attention_step, in_turns

from octavo.kernels.cpu import CpuKernels, available_cpus, make_kernels

CONTIGUOUS = 512
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, CONTIGUOUS)
CASES = {"decode, 16 requests of 512 keys": (16, 1), "prefill of 512": (1, 512)}
"""Requests, and query rows of each; all with as many keys as one contiguous block holds."""
NUM_LAYERS = 6
"""Enough that a step's K and V lie in no core's own cache, and all pools fit in memory at once."""


def report(ops: CpuKernels, title: str, repeats: int) -> None:
    num_reqs, rows = CASES[title]
    config = replace(SMOLLM2_135M, num_hidden_layers=NUM_LAYERS)
    steps = {
        size: attention_step(
            ops,
            config,
            num_reqs=num_reqs,
            rows=rows,
            keys=CONTIGUOUS,
            block_size=size,
            shuffled=True,
        )
        for size in BLOCK_SIZES
    }
    times = in_turns(steps, repeats)
    print(f"\n{title}\n  {'block size':>10} {'us a layer':>11} {'loss':>9}")
    for size in BLOCK_SIZES:
        ratios = [a / b for a, b in zip(times[size], times[CONTIGUOUS], strict=True)]
        name = "contiguous" if size == CONTIGUOUS else str(size)
        print(f"  {name:>10} {statistics.median(times[size]) / NUM_LAYERS * 1e6:>11.1f} "
              f"{statistics.median(ratios) - 1:>9.1%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--isa", help="instruction-set level; else the best")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=31)
    args = parser.parse_args()
    ops = make_kernels(threads=args.threads, isa=args.isa, dtype=args.dtype)
    print(f"{ops.isa}, {args.dtype}, {args.threads} threads")
    for title in CASES:
        report(ops, title, args.repeats)


if __name__ == "__main__":
    main()
