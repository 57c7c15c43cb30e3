"""Work per byte of each stage of a step, and what follows from it in time (R2, R52, R53, R54).

    python benchmarks/intensity.py [--model smollm2-135m] [--isa amx] [--threads 2]

Counted: FLOPs, bytes and FLOP/byte of prefill and decode, by stage, and which of the two limits
the stage on this machine: compute when its FLOPs take longer at the peak rate than its bytes at
the bandwidth, both measured first. Every byte counts as one from memory. Activations of a few MB
stay in the caches in truth, so that prefill is further into compute than the table says.

Measured: linear layers by number of rows, and decode attention by context. Where the weights'
way from memory decides, 8 rows take as long as one; where arithmetic does, time grows with the
rows, towards 8 times as long for 512 as for 64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from machine import SMOLLM2_135M, Speed, attention_step, in_turns, measure, random

from octavo.checkpoint import ModelConfig
from octavo.kernels.api import Linear
from octavo.kernels.cpu import CpuKernels, available_cpus, make_kernels
from octavo.weights.sources import open_checkpoint

CONTEXT = 256
STEPS = {
    "prefill of 512": ([512], [512]),
    **{f"decode of {n} at {CONTEXT}": ([1] * n, [CONTEXT] * n) for n in (1, 8, 64)},
}
"""Query rows and keys of each request."""
ROWS = (1, 8, 64, 512)
REQUESTS = (1, 8, 64)
CONTEXTS = (128, 256, 512, 1024)
NUM_REQUESTS = 8
MAX_WEIGHTS = 512 << 20
"""Bytes of layers that are packed at most, where a model is larger."""
BETWEEN_STEPS = 256 << 20
"""Bytes read between two measurements of attention: all weights pass between two steps."""


class Work(NamedTuple):
    """What a stage does in one step, over all layers."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.bytes

    def times(self, speed: Speed) -> tuple[float, float]:
        """Seconds of the FLOPs at the peak rate, and of the bytes at the bandwidth."""
        return self.flops / speed.flops, self.bytes / speed.bytes


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of the linear layers of one decoder layer."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "qkv": (query + 2 * kv, hidden),
        "o_proj": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def linear_work(shape: tuple[int, int], rows: int, *, width: int, out_width: int) -> Work:
    """[rows, K] times [N, K]: the weights pass once, whatever the number of rows (R2, R53)."""
    n, k = shape
    return Work(2 * rows * n * k, width * (n * k + rows * k) + out_width * rows * n)


def kv_bytes(config: ModelConfig, seq_lens: Sequence[int], *, width: int = 2) -> int:
    """K and V that one step's attention reads, over all layers: the sum of contexts (R54)."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * width
    return config.num_hidden_layers * per_token * sum(seq_lens)


def attention_work(
    config: ModelConfig, query_lens: Sequence[int], seq_lens: Sequence[int], *, width: int
) -> Work:
    """Causal scores and weighted values; K and V read once, queries in float32, outputs."""
    row = config.num_attention_heads * config.head_dim
    # The last of q rows sees s keys, the one before one fewer, and so on.
    pairs = sum(q * s - q * (q - 1) // 2 for q, s in zip(query_lens, seq_lens, strict=True))
    around = config.num_hidden_layers * sum(query_lens) * row * (4 + width)
    flops = 4 * config.num_hidden_layers * pairs * row
    return Work(flops, kv_bytes(config, seq_lens, width=width) + around)


def elementwise_work(config: ModelConfig, rows: int, sampled: int, *, width: int) -> Work:
    """Embedding, norms with their adds, rotary, K and V into the pool.

    A norm with add is 5 FLOPs an element, reads what is added and the residual, writes the
    residual (all float32) and its output; the first of a step is counted like the others.
    """
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layers = config.num_hidden_layers
    norms = hidden * (2 * layers * rows + sampled)
    rotated = layers * rows * (query + kv)
    stored = layers * rows * 2 * kv
    return Work(
        5 * norms + 3 * rotated,
        (12 + width) * norms + 8 * rotated + (4 + width) * stored + (4 + width) * rows * hidden,
    )


def stages(
    config: ModelConfig, query_lens: Sequence[int], seq_lens: Sequence[int], *, width: int = 2
) -> dict[str, Work]:
    """One step by stage; each request samples one token. `width`: bytes of a weight element,
    an activation and a K or V element."""
    rows, sampled = sum(query_lens), len(query_lens)

    def layers(name: str) -> Work:
        work = linear_work(shapes[name], rows, width=width, out_width=4)
        return Work(*(config.num_hidden_layers * count for count in work))

    def gated() -> Work:
        """With silu_and_mul, 5 FLOPs an element: what leaves it is a half as wide."""
        flops, size = linear_work(shapes["gate_up"], rows, width=width, out_width=0)
        activated = rows * config.intermediate_size
        work = flops + 5 * activated, size + width * activated
        return Work(*(config.num_hidden_layers * count for count in work))

    shapes, head = linear_shapes(config), (config.vocab_size, config.hidden_size)
    return {
        "qkv": layers("qkv"),
        "attention": attention_work(config, query_lens, seq_lens, width=width),
        "o_proj": layers("o_proj"),
        "gate_up": gated(),
        "down": layers("down"),
        "lm_head": linear_work(head, sampled, width=width, out_width=4),
        "elementwise": elementwise_work(config, rows, sampled, width=width),
    }


def print_stages(config: ModelConfig, speed: Speed, width: int) -> None:
    for title, (query_lens, seq_lens) in STEPS.items():
        print(f"\n{title}\n  {'stage':<12} {'MFLOP':>9} {'MB':>7} {'FLOP/byte':>10} "
              f"{'ms at peak':>11} {'ms at bandwidth':>16}  bound by")  # fmt: skip
        work = stages(config, query_lens, seq_lens, width=width)
        work["all"] = Work(*(sum(counts) for counts in zip(*work.values(), strict=True)))
        for name, one in work.items():
            compute, memory = one.times(speed)
            print(f"  {name:<12} {one.flops / 1e6:>9.1f} {one.bytes / 1e6:>7.1f} "
                  f"{one.intensity:>10.1f} {compute * 1e3:>11.3f} {memory * 1e3:>16.3f}  "
                  f"{'compute' if compute > memory else 'memory'}")  # fmt: skip


def pack_layers(ops: CpuKernels, config: ModelConfig) -> list[tuple[str, Linear]]:
    """Weights in the order of a step, each layer with its own, then the head."""
    shapes = linear_shapes(config)
    layer_bytes = np.dtype(ops.dtype).itemsize * sum(n * k for n, k in shapes.values())
    copies = max(1, min(config.num_hidden_layers, MAX_WEIGHTS // layer_bytes))
    arrays = {name: random(shape) for name, shape in shapes.items()}
    packed = [(name, ops.pack_linear(arrays[name])) for _ in range(copies) for name in arrays]
    head = random((config.vocab_size, config.hidden_size))
    return [*packed, ("lm_head", ops.pack_linear(head))]


def time_linears(
    ops: CpuKernels, weights: list[tuple[str, Linear]], budget: float = 4.0
) -> dict[int, dict[str, float]]:
    """Least seconds of one call, by rows and layer, within steps that walk through all weights.

    The numbers of rows take turns, for about `budget` seconds, so that a busy neighbour slows
    all alike. The head is left out past 64 rows: it sees a row per request only.
    """
    x = {w.in_features: random((max(ROWS), w.in_features), ops.dtype) for _, w in weights}
    out = {w.out_features: np.empty((max(ROWS), w.out_features), np.float32) for _, w in weights}
    calls = Counter(name for name, _ in weights)
    best: dict[int, dict[str, float]] = {rows: {} for rows in ROWS}
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for rows in ROWS:
            spent: dict[str, float] = defaultdict(float)
            for name, weight in weights:
                if name == "lm_head" and rows > max(REQUESTS):
                    continue
                start = time.perf_counter()
                ops.linear(x[weight.in_features][:rows], weight, out[weight.out_features][:rows])
                spent[name] += time.perf_counter() - start
            for name, seconds in spent.items():
                best[rows][name] = min(best[rows].get(name, seconds), seconds)
    return {
        rows: {name: t / calls[name] for name, t in found.items()} for rows, found in best.items()
    }


def print_linears(ops: CpuKernels, config: ModelConfig) -> None:
    weights = pack_layers(ops, config)
    times = time_linears(ops, weights)
    ratios = ((8, 1), (64, 8), (512, 64))
    print("\nrows of several requests in one product (R2, R53), measured: microseconds a call")
    print(f"  {'layer':<12}" + "".join(f" {f't({rows})':>9}" for rows in ROWS)
          + "".join(f" {f't({a})/t({b})':>13}" for a, b in ratios))  # fmt: skip
    for name in times[1]:
        took = {rows: times[rows][name] for rows in ROWS if name in times[rows]}
        print(f"  {name:<12}" + "".join(f" {t * 1e6:>9.1f}" for t in took.values())
              + " " * 10 * (len(ROWS) - len(took))
              + "".join(f" {took[a] / took[b]:>13.2f}" for a, b in ratios if a in took)
              )  # fmt: skip


def print_kv_bytes(config: ModelConfig, width: int) -> None:
    print("\nMB of K and V that decode attention reads: each request its whole context (R54)")
    print(f"  {'context':>8}" + "".join(f" {f'{n} requests':>12}" for n in REQUESTS))
    for context in CONTEXTS:
        sizes = (kv_bytes(config, [context] * n, width=width) / 1e6 for n in REQUESTS)
        print(f"  {context:>8}" + "".join(f" {size:>12.1f}" for size in sizes))


def print_attention(ops: CpuKernels, config: ModelConfig, width: int, repeats: int = 9) -> None:
    steps = {
        context: attention_step(
            ops, config, num_reqs=NUM_REQUESTS, rows=1, keys=context, shuffled=True
        )
        for context in CONTEXTS
    }
    weights = np.ones(BETWEEN_STEPS, np.uint8)
    times = in_turns(steps, repeats, before=lambda: weights.view(np.uint64).max())
    print(f"\n{NUM_REQUESTS} requests, measured (median)\n  {'context':>8} {'ms a step':>12} "
          f"{'GB/s':>12} {'time':>7} {'bytes':>7}")  # fmt: skip
    first = statistics.median(times[CONTEXTS[0]])
    for context in CONTEXTS:
        seconds = statistics.median(times[context])
        size = kv_bytes(config, [context] * NUM_REQUESTS, width=width)
        print(f"  {context:>8} {seconds * 1e3:>12.2f} {size / seconds / 1e9:>12.1f} "
              f"{seconds / first:>6.1f}x {context / CONTEXTS[0]:>6.0f}x")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="alias, file, folder or hub id; else SmolLM2-135M's shape")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--isa", help="instruction-set level; else the best")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    config = open_checkpoint(args.model).config if args.model else SMOLLM2_135M
    ops = make_kernels(threads=args.threads, isa=args.isa, dtype=args.dtype)
    width, speed = np.dtype(ops.dtype).itemsize, measure(ops)
    print(f"{config.name or args.model}, {ops.isa}, {args.dtype}, {args.threads} threads: "
          f"peak {speed.flops / 1e9:.0f} GFLOP/s, bandwidth {speed.bytes / 1e9:.1f} GB/s; "
          f"compute-bound from {speed.flops / speed.bytes:.0f} FLOP/byte")  # fmt: skip
    print_stages(config, speed, width)
    print_linears(ops, config)
    print_kv_bytes(config, width)
    print_attention(ops, config, width)


if __name__ == "__main__":
    main()
