"""What benchmarks share: the shape of the default model, peak rate and bandwidth, attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from octavo.checkpoint import ModelConfig
from octavo.kernels.api import Array
from octavo.kernels.cpu import CpuKernels

SMOLLM2_135M = ModelConfig(
    architecture="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    name="SmolLM2-135M",
)


class Speed(NamedTuple):
    """What this machine reaches at best, through the kernels' own products."""

    flops: float
    """FLOP/s of a product that lies in the first caches."""
    bytes: float
    """Bytes/s of a read of more memory than the caches hold."""

    def floor(self, flops: float, num_bytes: float) -> float:
        """Seconds that so much work takes at least."""
        return max(flops / self.flops, num_bytes / self.bytes)


Clock = Callable[[], float]
"""Seconds: time.perf_counter, or time.thread_time where others use the machine, too."""


def best_of(
    call: Callable[[], object], budget: float = 0.4, clock: Clock = time.perf_counter
) -> float:
    """Least seconds of a call, repeated for about `budget` seconds."""
    best, end = float("inf"), time.perf_counter() + budget
    while True:
        start = clock()
        call()
        best = min(best, clock() - start)
        if time.perf_counter() > end:
            return best


def in_turns(
    steps: Mapping[int, Callable[[], object]],
    repeats: int,
    *,
    before: Callable[[], object] = lambda: None,
) -> dict[int, list[float]]:
    """Seconds of each step in each turn, `before` called ahead of each and not counted.

    The steps take turns, so that a busy neighbour slows all alike; the first turn only warms up.
    """
    times: dict[int, list[float]] = {key: [] for key in steps}
    for turn in range(repeats + 1):
        for key, step in steps.items():
            before()
            start = time.perf_counter()
            step()
            if turn:
                times[key].append(time.perf_counter() - start)
    return times


def random(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    values: Array = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return values.astype(dtype)


def peak_rate(ops: CpuKernels, clock: Clock = time.perf_counter) -> float:
    """FLOP/s of a product whose weights and activations stay in the caches."""
    m, n, k = 256, 1024, 512
    x, weight, out = random((m, k), ops.dtype), ops.pack_linear(random((n, k))), random((m, n))
    return 2 * m * n * k / best_of(lambda: ops.linear(x, weight, out), clock=clock)


def bandwidth(ops: CpuKernels, clock: Clock = time.perf_counter) -> float:
    """Bytes/s at which one row passes by 512 MiB of weights."""
    n, k = (1 << 18) // np.dtype(ops.dtype).itemsize * 2, 1024
    x, out = random((1, k), ops.dtype), random((1, n))
    weight = ops.pack_linear(np.zeros((n, k), np.float32))
    return weight.nbytes / best_of(lambda: ops.linear(x, weight, out), clock=clock)


def measure(ops: CpuKernels, clock: Clock = time.perf_counter) -> Speed:
    """Peak and bandwidth; the peak twice, since a neighbour may have had the first moment."""
    first, stream = peak_rate(ops, clock), bandwidth(ops, clock)
    return Speed(max(first, peak_rate(ops, clock)), stream)


def attention_step(
    ops: CpuKernels,
    config: ModelConfig,
    *,
    num_reqs: int,
    rows: int,
    keys: int,
    block_size: int = 16,
    shuffled: bool = False,
) -> Callable[[], None]:
    """A call that does one step's attention, all layers: `rows` queries over `keys` per request.

    shuffled: whether a sequence's blocks lie all over the pool, as after many requests.
    """
    dim, num_heads = config.head_dim, config.num_attention_heads
    num_blocks = num_reqs * -(-keys // block_size)
    cache = ops.allocate_kv_cache(
        num_layers=config.num_hidden_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=dim,
    )
    for block in range(num_blocks):
        cache.fill_block(block, 0.5)
    query = random((num_reqs * rows, num_heads, dim))
    blocks = np.arange(num_blocks, dtype=np.int32)
    if shuffled:
        np.random.default_rng(1).shuffle(blocks)
    table = blocks.reshape(num_reqs, -1)
    starts = np.arange(num_reqs + 1, dtype=np.int32) * rows
    lens = np.full(num_reqs, keys, np.int32)
    out = np.empty((num_reqs * rows, num_heads * dim), ops.dtype)

    def step() -> None:
        for layer in range(config.num_hidden_layers):
            ops.paged_attention(query, cache, layer, table, starts, lens, dim**-0.5, out)

    return step
