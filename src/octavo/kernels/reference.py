"""The reference backend: every op straight from its definition, in numpy and float32.

This is the oracle that faster backends are tested against, and the file to read first. It keeps
the law of the op table bit for bit in the plainest way: whatever crosses more than one number is
done for one row at a time, in an order that the row alone decides. It is slow on purpose.

  linear           each output element is one dot product over K
  paged_attention  each query row walks its own keys: tiles from position 0 on, online softmax,
                   splits of a fixed size merged by log-sum-exp (FlashAttention, Flash-Decoding)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, StoredRows
from ..errors import ConfigError
from .api import Array, Forward, KVCache, Linear, StepBatch
from .arena import NumpyArena

TILE_SIZE = 64
"""Keys per tile of the online softmax, counted from position 0 of the sequence."""

SPLIT_SIZE = 512
"""Keys per Flash-Decoding split, a multiple of TILE_SIZE."""

DOT_LENGTH = 8192
"""Longest dot product given to BLAS, which may spread longer ones over threads."""

OUTPUT_BLOCK = 128
"""Rows of a weight that are multiplied with all T rows before the next: they stay in the cache."""


class ReferenceLinear:
    """A weight [N, K] float32, as it is."""

    def __init__(self, weight: Array) -> None:
        self.weight = np.ascontiguousarray(weight, dtype=np.float32)
        self.out_features, self.in_features = self.weight.shape
        self.nbytes = self.weight.nbytes


class ReferenceKVCache:
    """The pool in its logical layout, [num_layers, 2, num_blocks, block_size, KH, D] float32 (R22).

    np.zeros maps zero pages, so that memory becomes resident block by block on first use.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.pool = np.zeros(shape, np.float32)
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.nbytes = self.pool.nbytes
        self.block_nbytes = self.nbytes // num_blocks

    def save_block(self, block_id: int, out: Array) -> None:
        """Bytes of one block, in the order of the logical layout."""
        out.view(np.float32)[...] = self.pool[:, :, block_id].ravel()

    def restore_block(self, block_id: int, data: Array) -> None:
        """Put saved bytes into a block."""
        block = self.pool[:, :, block_id]
        block[...] = data.view(np.float32).reshape(block.shape)

    def read_block(self, layer: int, block_id: int) -> tuple[Array, Array]:
        """K and V of one block, [block_size, KH, D] float32, copied."""
        key, value = self.pool[layer, :, block_id].copy()
        return key, value

    def fill_block(self, block_id: int, value: float) -> None:
        """Overwrite K and V of one block in all layers."""
        self.pool[:, :, block_id] = value


class ReferenceKernels:
    """The op table of kernels/api.py, whose docstrings hold here word for word."""

    name = "reference"
    dtype = np.dtype(np.float32)
    sampling = None
    stored_kinds: frozenset[str] = frozenset()
    kv_cache_dtypes = ("float32",)

    def describe(self) -> dict[str, str]:
        """For the start-up report."""
        return {"backend": "reference", "isa": "numpy", "threads": "1", "dtype": "float32"}

    def make_arena(self) -> NumpyArena:
        return NumpyArena()

    def capture(self, forward: Forward, kv_cache: KVCache, batches: Sequence[StepBatch]) -> None:
        return None  # nothing here is to be quicker than it is plain

    def pack_linear(self, weight: Array) -> ReferenceLinear:
        return ReferenceLinear(np.array(weight, dtype=np.float32))  # a copy: see the op table

    def pack_stored(self, parts: Sequence[StoredRows], in_features: int) -> None:
        return None

    def open_packed(self, checkpoint: Checkpoint) -> AbstractContextManager[None]:
        return nullcontext()

    def pack_once(self, key: str, pack: Callable[[], Linear]) -> Linear:
        return pack()

    def pack_vector(self, weight: Array) -> Array:
        return np.ascontiguousarray(weight, dtype=np.float32)

    def allocate_kv_cache(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "auto",
    ) -> ReferenceKVCache:
        assert dtype in ("auto", *self.kv_cache_dtypes)
        return ReferenceKVCache(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def kv_bytes_per_token(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "auto"
    ) -> int:
        return num_layers * 2 * num_kv_heads * head_dim * self.dtype.itemsize

    def embedding(self, input_ids: Array, weight: Linear, out: Array) -> None:
        np.take(_matrix(weight), input_ids, axis=0, out=out)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        with _quiet():
            mean_square = np.mean(np.square(x), axis=-1, keepdims=True)  # [T, 1]
            np.multiply(x / np.sqrt(mean_square + np.float32(eps)), weight, out=out)

    def fused_add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        np.add(residual, x, out=residual)
        self.rms_norm(residual, weight, eps, out)

    def linear(self, x: Array, weight: Linear, out: Array) -> None:
        matrix = _matrix(weight)
        with _quiet():
            for at in range(0, len(matrix), OUTPUT_BLOCK):
                part = slice(at, at + OUTPUT_BLOCK)
                out[:, part] = _dot_products(x, matrix[part])

    def linear_silu_and_mul(self, x: Array, gate_up_proj: Linear, out: Array) -> None:
        gate_up = np.empty((len(x), gate_up_proj.out_features), np.float32)
        self.linear(x, gate_up_proj, gate_up)
        gate, up = np.split(gate_up, 2, axis=-1)  # [T, I] each
        with _quiet():  # exp(-gate) = inf gives silu = -0, as it should
            np.multiply(gate / (1 + np.exp(-gate)), up, out=out)

    def lm_head(
        self, x: Array, weight: Linear, argmax_only: Array, logits: Array, best: Array
    ) -> None:
        found, only = np.empty(logits.shape, np.float32), argmax_only != 0
        self.linear(x, weight, found)
        logits[~only] = found[~only]
        found[np.isnan(found)] = -np.inf
        best[:] = np.where(only & (found.max(axis=1) > -np.inf), found.argmax(axis=1), -1)
        logits[only & (best < 0)] = -np.inf

    def rotary_embedding(
        self, positions: Array, query: Array, key: Array, cos_sin_cache: Array
    ) -> None:
        half = cos_sin_cache.shape[1] // 2
        cos_sin = cos_sin_cache[positions][:, None, :]  # [T, 1, rotary_dim], for every head
        cos, sin = cos_sin[..., :half], cos_sin[..., half:]
        for heads in (query, key):
            first, second = heads[..., :half], heads[..., half : 2 * half]
            rotated = first * cos - second * sin
            second[...] = second * cos + first * sin
            first[...] = rotated

    def reshape_and_cache(
        self, key: Array, value: Array, kv_cache: KVCache, layer: int, slot_mapping: Array
    ) -> None:
        pool = _pool(kv_cache)
        block_ids, offsets = np.divmod(slot_mapping, kv_cache.block_size)  # [T] each (R26)
        pool[layer, 0, block_ids, offsets] = key
        pool[layer, 1, block_ids, offsets] = value

    def paged_attention(
        self,
        query: Array,
        kv_cache: KVCache,
        layer: int,
        block_table: Array,
        query_start_loc: Array,
        seq_lens: Array,
        scale: float,
        out: Array,
    ) -> None:
        pool = _pool(kv_cache)
        num_kv_heads, head_dim = pool.shape[-2:]
        group_size = query.shape[1] // num_kv_heads  # query heads for each K/V head (R42)
        grouped = query.reshape(-1, num_kv_heads, group_size, head_dim)  # [T, KH, G, D]
        out = out.reshape(grouped.shape)
        for request, seq_len in enumerate(seq_lens.tolist()):
            num_blocks = -(-seq_len // kv_cache.block_size)
            blocks = pool[layer][:, block_table[request, :num_blocks]]
            # [2, num_blocks, block_size, KH, D] -> [num_blocks * block_size, KH, D] each
            keys, values = blocks.reshape(2, -1, num_kv_heads, head_dim)
            start, end = query_start_loc[request : request + 2].tolist()
            for row in range(start, end):
                # The last row sees all keys, earlier ones fewer. Slots past them hold anything,
                # and 0 x a stale NaN is NaN: they are cut off, not given the weight 0.
                num_keys = seq_len - (end - 1 - row)
                out[row] = attend(grouped[row], keys[:num_keys], values[:num_keys], scale)

    def gather_rows(self, x: Array, indices: Array, out: Array) -> None:
        np.take(x, indices, axis=0, out=out)


def attend(
    query: Array,
    keys: Array,
    values: Array,
    scale: float,
    *,
    tile_size: int = TILE_SIZE,
    split_size: int = SPLIT_SIZE,
) -> Array:
    """Softmax attention of one query row over its keys, without ever holding all scores (R47).

    query [KH, G, D] with G query heads for each K/V head; keys, values [num_keys, KH, D]
    returns [KH, G, D]

    Keys are taken in splits of `split_size`, each independent of the others, and the splits are
    merged in order: each counts with the sum of its exponentials (Flash-Decoding).
    """
    parts = [
        _attend_split(
            query, keys[at : at + split_size], values[at : at + split_size], scale, tile_size
        )
        for at in range(0, len(keys), split_size)
    ]
    acc, lse = parts[0]  # [KH, G, D], [KH, G]
    with _quiet():
        for part, part_lse in parts[1:]:
            merged = np.logaddexp(lse, part_lse)
            share, part_share = np.exp(lse - merged), np.exp(part_lse - merged)
            acc = acc * share[..., None] + part * part_share[..., None]
            lse = merged
    return acc


def _attend_split(
    query: Array, keys: Array, values: Array, scale: float, tile_size: int
) -> tuple[Array, Array]:
    """Online softmax over the tiles of one split (FlashAttention; R46).

    Returns the attention over these keys alone [KH, G, D] and the log of the sum of their
    exponentials [KH, G], both float32.
    """
    running_max = np.full(query.shape[:2], -np.inf, np.float32)  # [KH, G]
    running_sum = np.zeros(query.shape[:2], np.float32)
    acc = np.zeros(query.shape, np.float32)  # [KH, G, D]
    with _quiet():
        for at in range(0, len(keys), tile_size):
            # Contiguous operands of one form: [KH, D, tile] and [KH, tile, D]
            key_tile = np.ascontiguousarray(keys[at : at + tile_size].transpose(1, 2, 0))
            value_tile = np.ascontiguousarray(values[at : at + tile_size].transpose(1, 0, 2))
            scores = np.matmul(query, key_tile) * np.float32(scale)  # [KH, G, tile]
            new_max = np.maximum(running_max, scores.max(axis=-1))
            rescale = np.exp(running_max - new_max)
            weights = np.exp(scores - new_max[..., None])
            running_sum = running_sum * rescale + weights.sum(axis=-1)
            acc = acc * rescale[..., None] + np.matmul(weights, value_tile)
            running_max = new_max
        return acc / running_sum[..., None], running_max + np.log(running_sum)


def _dot_products(x: Array, matrix: Array) -> Array:
    """[T, N] = the dot product of each row of x [T, K] with each row of matrix [N, K].

    As T x N products of [1, K] with [K, 1]: numpy gives each to BLAS's dot, which one core
    computes alone, in an order that K alone decides. A matrix product would be free to choose
    another for another T or N. What is longer than DOT_LENGTH is added up in parts, in order.
    """

    def products(at: int) -> Array:
        part = slice(at, at + DOT_LENGTH)
        # [1, N, 1, K] times [T, 1, K, 1] -> [T, N, 1, 1]
        found: Array = np.matmul(matrix[None, :, None, part], x[:, None, part, None])
        return found[:, :, 0, 0]

    total = products(0)
    for at in range(DOT_LENGTH, x.shape[1], DOT_LENGTH):
        total += products(at)
    return total


def _quiet() -> Any:
    """No warning for numbers that overflow or are none: one row's trouble, which the sampler
    finds in its logits and reports for that row alone (C37)."""
    return np.errstate(over="ignore", invalid="ignore")


def _matrix(weight: Linear) -> Array:
    assert isinstance(weight, ReferenceLinear), "packed by another backend"
    return weight.weight


def _pool(kv_cache: KVCache) -> Array:
    assert isinstance(kv_cache, ReferenceKVCache), "allocated by another backend"
    return kv_cache.pool


def make_kernels(
    threads: int | None = None,
    isa: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    packed_cache: str = "off",
    huge_pages: bool = True,
) -> ReferenceKernels:
    """The reference op table. Raises ConfigError for what it can't honour.

    packed_cache, huge_pages: nothing is packed here, and numpy asks for its own pages.
    """
    if threads not in (None, 1):
        raise ConfigError(
            "threads", threads, "1 or unset with the reference backend: it computes in one thread"
        )
    if isa is not None:
        raise ConfigError(
            "isa", isa, "unset with the reference backend: numpy chooses its instructions itself"
        )
    if dtype not in ("auto", "float32"):
        raise ConfigError("dtype", dtype, "auto or float32 with the reference backend")
    if quantization is not None:
        raise ConfigError("quantization", quantization, "unset with the reference backend")
    return ReferenceKernels()
