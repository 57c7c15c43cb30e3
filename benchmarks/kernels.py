"""Time the cpu kernels against the floor of this machine, measured in the same run.

    python benchmarks/kernels.py [--levels amx,avx512] [--threads 2] [--dtype bfloat16]

For SmolLM2-135M's five linear layers and M rows: time of one step's GEMMs (30 layers and the head),
and the floor max(FLOPs / peak rate, bytes / bandwidth). The peak rate is the best rate of a product
that lies in the first caches, the bandwidth that of a read of more memory than those hold.
Then attention: 64 decodes of 256 keys, and a prefill of 512.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from machine import SMOLLM2_135M, attention_step, best_of, measure, random

from octavo.kernels.api import Linear
from octavo.kernels.cpu import CpuKernels, available_cpus, available_levels, make_kernels

NUM_LAYERS = 30
LAYERS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
HEAD = (49152, 576)
ROWS = (1, 4, 16, 32, 64, 512)


def rows_of(weight: Linear, m: int) -> int:
    """Rows of a layer in a step of m tokens: the head sees sampled rows only, 64 at most here."""
    return min(m, 64) if weight.out_features == HEAD[0] else m


def step_of_gemms(ops: CpuKernels, weights: list[Linear], m: int) -> float:
    """Seconds of all linear layers of one step, each layer with weights of its own.

    The sum of each layer's best: a whole step is too long to be left alone by busy neighbours,
    while the peak rate that it is held against is taken from short calls.
    """
    x = {k: random((m, k), ops.dtype) for k in (576, 1536)}
    out = {n: np.empty((m, n), np.float32) for n in (960, 576, 3072)}
    out[HEAD[0]] = np.empty((min(m, 64), HEAD[0]), np.float32)
    best = [float("inf")] * len(weights)
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end or best[0] == float("inf"):
        for i, weight in enumerate(weights):
            to = out[weight.out_features]
            start = time.perf_counter()
            ops.linear(x[weight.in_features][: len(to)], weight, to)
            best[i] = min(best[i], time.perf_counter() - start)
    return sum(best)


def attention(ops: CpuKernels, num_reqs: int, rows: int, keys: int) -> float:
    """Seconds of one step's attention over all layers (9 heads, 3 KV heads of 64)."""
    step = attention_step(ops, SMOLLM2_135M, num_reqs=num_reqs, rows=rows, keys=keys)
    return best_of(step, 1.0)


def report(level: str, threads: int, dtype: str) -> None:
    ops = make_kernels(threads=threads, isa=level, dtype=dtype)
    speed = measure(ops)
    print(f"\n{level}, {dtype}, {threads} threads: peak {speed.flops / 1e9:.0f} GFLOP/s, "
          f"bandwidth {speed.bytes / 1e9:.1f} GB/s")  # fmt: skip
    arrays, head = [random(shape) for shape in LAYERS.values()], random(HEAD)
    start = time.perf_counter()
    weights = [ops.pack_linear(w) for _ in range(NUM_LAYERS) for w in arrays]
    weights.append(ops.pack_linear(head))
    print(f"  packing: {time.perf_counter() - start:.2f} s")
    size = sum(w.nbytes for w in weights)
    print(f"  {'M':>5} {'ms':>9} {'GFLOP/s':>9} {'GB/s':>7} {'floor ms':>9} {'of floor':>9}")
    for m in ROWS:
        seconds = step_of_gemms(ops, weights, m)
        work = sum(2 * w.out_features * w.in_features * rows_of(w, m) for w in weights)
        floor = speed.floor(work, size)
        print(
            f"  {m:>5} {seconds * 1e3:>9.2f} {work / seconds / 1e9:>9.0f} "
            f"{size / seconds / 1e9:>7.1f} {floor * 1e3:>9.2f} {floor / seconds:>9.0%}"
        )
    print(f"  attention, 64 decodes of 256 keys: {attention(ops, 64, 1, 256) * 1e3:.2f} ms a step")
    print(f"  attention, prefill of 512: {attention(ops, 1, 512, 512) * 1e3:.2f} ms a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--levels", default=",".join(available_levels()))
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    for level in args.levels.split(","):
        report(level, args.threads, args.dtype)


if __name__ == "__main__":
    main()
