"""A bed for tests of the cpu kernels: every level of this machine, and float64 references."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from octavo.kernels.api import Array, Kernels, load_backend
from octavo.kernels.cpu import CpuKernels, available_levels, make_kernels
from octavo.kernels.reference import ReferenceKernels

LEVELS = available_levels()
DTYPES = ["bfloat16", "float32"]
CASES = [(level, dtype) for level in LEVELS for dtype in DTYPES]
IDS = [f"{level}-{dtype}" for level, dtype in CASES]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def kernels(case: tuple[str, str], threads: int = 2) -> CpuKernels:
    return make_kernels(threads=threads, isa=case[0], dtype=case[1])


@cache
def ops_of(case: tuple[str, str], threads: int) -> Kernels:
    """By level, or "numpy", and by form: a dtype, int8, or any other name for weights as stored."""
    level, form = case
    if level == "numpy":
        return ReferenceKernels()
    dtype = form if form in DTYPES else "auto"
    quantization = None if form == dtype else "int8" if form == "int8" else "stored"
    return load_backend("cpu", threads=threads, isa=level, dtype=dtype, quantization=quantization)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Array:
    """NaN everywhere, so that what a kernel forgets to write shows."""
    return np.full(shape, np.nan, dtype=dtype)


def exact(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


def bits(x: Array) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def rounded(x: Array, dtype: Any) -> Array:
    """x as the kernels store it, back in float64."""
    return exact(np.asarray(x, dtype=np.float32).astype(dtype))


def tolerance(dtype: Any) -> float:
    """Relative to the size of the result: 2 ulp of bf16, or float32 sums of some hundred terms."""
    return 2.0**-7 if np.dtype(dtype) == BFLOAT16 else 2e-5


def assert_close(got: Array, want: Array, limit: float) -> None:
    """|got - want| <= limit * (|want| + the typical size of want)."""
    assert np.isfinite(exact(got)).all()
    size = np.abs(want) + np.sqrt(np.mean(np.square(want)))
    error = np.max(np.abs(exact(got) - want) / size)
    assert error <= limit, f"relative error {error:.2e}, allowed {limit:.2e}"


@dataclass
class Paged:
    """Requests with their K/V in a pool, and all that attention is given."""

    key: list[Array]
    value: list[Array]
    query: list[Array]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def random(
        seed: int, seq_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int
    ) -> Paged:
        rng = np.random.default_rng(seed)

        def draw(heads: int) -> list[Array]:
            shapes = [(n, heads, head_dim) for n in seq_lens]
            return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]

        return Paged(
            draw(num_kv_heads), draw(num_kv_heads), draw(num_heads),
            num_heads, num_kv_heads, head_dim,
        )  # fmt: skip

    def attend(
        self,
        ops: CpuKernels,
        *,
        block_size: int = 16,
        query_lens: list[int] | None = None,
        ends: list[int] | None = None,
        requests: list[int] | None = None,
        shuffle: int = 0,
        spare: int = 3,
        stale: float = np.nan,
        kv_dtype: str = "auto",
    ) -> list[Array]:
        """Attend the last `query_lens` rows before `ends` of each request: outputs per request.

        Only keys before `ends` are written; every other slot of the pool holds `stale`.
        """
        requests = list(range(len(self.key))) if requests is None else requests
        ends = [len(self.key[r]) for r in requests] if ends is None else ends
        query_lens = ends if query_lens is None else query_lens
        counts = [-(-end // block_size) for end in ends]
        num_blocks = sum(counts) + spare
        cache = ops.allocate_kv_cache(
            num_layers=2, num_blocks=num_blocks, block_size=block_size,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=kv_dtype,
        )  # fmt: skip
        for block in range(num_blocks):
            cache.fill_block(block, stale)
        ids = np.random.default_rng(shuffle).permutation(num_blocks).astype(np.int32)
        table = np.full((len(requests), max(counts)), -1, np.int32)
        start = 0
        for row, (r, end) in enumerate(zip(requests, ends, strict=True)):
            table[row, : counts[row]] = ids[start : start + counts[row]]
            start += counts[row]
            position = np.arange(end)
            slots = table[row, position // block_size] * block_size + position % block_size
            key, value = self.key[r][:end], self.value[r][:end]
            ops.reshape_and_cache(key, value, cache, 1, slots.astype(np.int32))
        parts = zip(requests, ends, query_lens, strict=True)
        query = np.concatenate([self.query[r][end - n : end] for r, end, n in parts])
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        out = poisoned((len(query), self.num_heads * self.head_dim), ops.dtype)
        ops.paged_attention(
            query, cache, 1, table, starts, np.array(ends, np.int32), self.head_dim**-0.5, out
        )
        return np.split(out, starts[1:-1])

    def reference(self, r: int, end: int, rows: int, dtype: Any) -> Array:
        """The same in float64, from K and V as the pool stores them."""
        group = self.num_heads // self.num_kv_heads
        k = rounded(self.key[r][:end], dtype).repeat(group, axis=1)
        v = rounded(self.value[r][:end], dtype).repeat(group, axis=1)
        q = exact(self.query[r][end - rows : end])
        scores = np.einsum("thd,shd->hts", q, k) * self.head_dim**-0.5
        hidden = np.arange(end)[None, :] > (end - rows + np.arange(rows))[:, None]
        scores[:, hidden] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return np.einsum("hts,shd->thd", p, v).reshape(rows, -1)


def check_chunk(
    ops: CpuKernels, paged: Paged, r: int, rows: Array, data: st.DataObject, **settings: Any
) -> None:
    """A drawn piece of request r, alone in any pool, has the bits that it has in `rows`, whole."""
    end = data.draw(st.integers(1, len(rows)), label="end")
    count = data.draw(st.integers(1, end), label="rows")
    chunk = paged.attend(
        ops,
        requests=[r],
        ends=[end],
        query_lens=[count],
        block_size=data.draw(st.sampled_from([1, 2, 8, 16, 32, 128]), label="block size"),
        shuffle=data.draw(st.integers(0, 9), label="shuffle"),
        stale=data.draw(st.sampled_from([np.nan, 0.0, 7.0, np.inf]), label="stale"),
        **settings,
    )[0]
    assert bits(chunk) == bits(rows[end - count : end])
