"""Arrays beside pages that nobody may touch: what reads or writes past one ends the process.

    python -m beds.edges LEVEL      runs every op of a level on such arrays

The sanitizers do not see masked vectors and tiles; pages do.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from beds.cpu_kernels import DTYPES, Paged, bits, kernels, poisoned
from beds.sampler_rows import make_row
from octavo.checkpoint import StoredRows
from octavo.kernels.api import Array
from octavo.kernels.cpu import CpuKernels, make_kernels
from octavo.sampling.native import make_sampler
from octavo.sampling_params import SamplingParams
from octavo.weights.ggml_types import READABLE

PAGE = mmap.PAGESIZE
PROT_NONE = 0
SHAPES = [(1, 5, 3), (2, 33, 31), (3, 64, 64), (17, 75, 100), (40, 96, 130)]
SIDES = ["start", "end"]

_libc = ctypes.CDLL(None, use_errno=True)


def at_edge(x: Array, side: str) -> Array:
    """A copy whose first byte follows, or whose last byte precedes, a page that can't be used."""
    size = -(-x.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (begin, begin + PAGE + size):
        failed = _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), PROT_NONE)
        assert not failed, ctypes.get_errno()
    offset = PAGE + (size - x.nbytes if side == "end" else 0)
    placed = np.frombuffer(memory, np.uint8, x.nbytes, offset).view(x.dtype).reshape(x.shape)
    placed[...] = x
    return placed


class EdgeOps:
    """An op table whose ops get all arrays at an edge."""

    def __init__(self, ops: CpuKernels, side: str) -> None:
        self._ops = ops
        self._side = side

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        return self._at_edge(value) if callable(value) else value

    def _at_edge(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            placed = [at_edge(x, self._side) if isinstance(x, np.ndarray) else x for x in args]
            result = op(*placed, **settings)
            for x, copy in zip(args, placed, strict=True):
                if isinstance(x, np.ndarray):
                    x[...] = copy
            return result

        return run


def products(ops: Any, make: Callable[[Array], Array]) -> Iterator[bytes]:
    """linear and what is made of it, embedding and packing: every form of weights of a level."""
    rng = np.random.default_rng(0)
    for rows, n, k in SHAPES:
        weight = ops.pack_linear(rng.standard_normal((n, k), dtype=np.float32))
        yield from uses(ops, weight, rows, rng)
    known = make_kernels(isa=ops.isa, quantization="stored").stored_kinds
    for info in READABLE.values():
        for quantization in ("stored", "int8", None) if str(ops.dtype) == "bfloat16" else (None,):
            if info.name not in known | {"F32", "F16", "BF16"} or (
                quantization == "stored" and info.name not in known
            ):
                continue
            own = make_kernels(isa=ops.isa, dtype=str(ops.dtype), quantization=quantization)
            for n in (37, 64):
                size = n, 256 // info.block_size * info.block_bytes
                blocks = rng.integers(0, 128, size, np.uint8)
                weight = own.pack_stored([StoredRows(info.name, make(blocks & 0x3F))], 256)
                yield from uses(ops, weight, 3, rng)


def uses(ops: Any, weight: Any, rows: int, rng: np.random.Generator) -> Iterator[bytes]:
    n, k = weight.out_features, weight.in_features
    for x_dtype, out_dtype in [(ops.dtype, ops.dtype), (np.float32, np.float32)]:
        out = poisoned((rows, n), out_dtype)
        ops.linear(rng.standard_normal((rows, k), dtype=np.float32).astype(x_dtype), weight, out)
        yield bits(out)
        if n % 2 == 0:
            x, out = rng.standard_normal((rows, k), np.float32), poisoned((rows, n // 2), out_dtype)
            ops.linear_silu_and_mul(x.astype(x_dtype), weight, out)
            yield bits(out)
        for flags in ([1] * rows, [i % 2 for i in range(rows)]):
            logits, best = poisoned((rows, n), np.float32), np.full(rows, -7, np.int32)
            x = rng.standard_normal((rows, k), dtype=np.float32).astype(x_dtype)
            ops.lm_head(x, weight, np.array(flags, np.int32), logits, best)
            yield bits(logits) + bits(best)
    out = poisoned((2, k), np.float32)
    ops.embedding(np.array([n - 1, 0], np.int32), weight, out)
    yield bits(out)


def small_ops(ops: Any) -> Iterator[bytes]:
    rng = np.random.default_rng(1)
    for columns in (1, 7, 64, 100):
        x, residual = rng.standard_normal((2, 3, columns), dtype=np.float32)
        outs = [poisoned((3, columns), ops.dtype) for _ in range(3)]
        ops.rms_norm(x, x[0].copy(), 1e-5, outs[0])
        ops.fused_add_rms_norm(x, residual, x[0].copy(), 1e-5, outs[1])
        ops.gather_rows(x.astype(ops.dtype), np.array([2, 0, 2], np.int32), outs[2])
        yield from map(bits, [residual, *outs])
    for head_dim in (34, 64, 80):
        table = rng.standard_normal((9, head_dim), dtype=np.float32)
        turned = [rng.standard_normal((4, h, head_dim), dtype=np.float32) for h in (3, 1)]
        ops.rotary_embedding(np.array([0, 8, 3, 8], np.int32), *turned, table)
        yield from map(bits, turned)


def attention(ops: Any) -> Iterator[bytes]:
    for head_dim, kv_heads in [(34, 1), (64, 3), (80, 2)]:
        paged = Paged.random(head_dim, [1, 37, 150], 3 * kv_heads, kv_heads, head_dim)
        for kv_dtype in ("auto", "int8"):
            for query_lens in ([1, 1, 1], [1, 20, 150]):
                outs = paged.attend(ops, query_lens=query_lens, spare=0, kv_dtype=kv_dtype)
                yield from map(bits, outs)


def samples(ops: Any, make: Callable[[Array], Array]) -> Iterator[bytes]:
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5, "logprobs": 3}, {"min_p": 0.1}
    ]  # fmt: skip
    for vocab_size in (7, 71, 4099):
        sampler = make_sampler(vocab_size, ops.sampling)
        states = [
            make_row(SamplingParams(**each), row=i, seed=i, prompt=[1], output=[2], eos=[])
            for i, each in enumerate(settings)
        ]
        logits = np.random.default_rng(2).standard_normal((len(states), vocab_size))
        yield repr(sampler.sample(make(logits.astype(np.float32)), states)).encode()


def everything(ops: Any, make: Callable[[Array], Array]) -> list[bytes]:
    return [*products(ops, make), *small_ops(ops), *attention(ops), *samples(ops, make)]


def main(level: str) -> None:
    for dtype in DTYPES:
        ops = kernels((level, dtype))
        want = everything(ops, lambda x: x)
        for side in SIDES:
            assert everything(EdgeOps(ops, side), lambda x, side=side: at_edge(x, side)) == want
        print(f"{level} {dtype}: {len(want)} results at both edges", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
