"""Blocks as raw bytes: what is saved and put back, into whatever block, is the same K and V."""

from __future__ import annotations

import numpy as np
import pytest

from beds.backends import TEST_BACKENDS, kernels_of
from octavo.kernels.api import KVCache

backends = pytest.mark.parametrize("backend", TEST_BACKENDS)


def pool_of(backend: str, block_size: int, dtype: str = "auto") -> KVCache:
    """A small pool with other numbers in every slot."""
    kernels = kernels_of(backend)
    pool = kernels.allocate_kv_cache(
        num_layers=3, num_blocks=5, block_size=block_size, num_kv_heads=2, head_dim=18, dtype=dtype
    )
    slots = np.arange(5 * block_size, dtype=np.int32)
    rng = np.random.default_rng(block_size)
    for layer in range(3):
        key, value = rng.standard_normal((2, len(slots), 2, 18), dtype=np.float32)
        key, value = key.astype(kernels.dtype), value.astype(kernels.dtype)
        kernels.reshape_and_cache(key, value, pool, layer, slots)
    return pool


def block(pool: KVCache, block_id: int) -> bytes:
    parts = [part for layer in range(3) for part in pool.read_block(layer, block_id)]
    return b"".join(part.tobytes() for part in parts)


@backends
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_a_saved_block_comes_back_bit_for_bit(backend: str, block_size: int) -> None:
    """R34, R98: in all layers, into another block, and no other block is touched."""
    for dtype in ("auto", *kernels_of(backend).kv_cache_dtypes):
        check(pool_of(backend, block_size, dtype))


def check(pool: KVCache) -> None:
    before = [block(pool, i) for i in range(5)]
    assert len(set(before)) == 5
    saved = np.empty(pool.block_nbytes, np.uint8)
    pool.save_block(3, saved)
    pool.fill_block(3, float("nan"))
    pool.restore_block(1, saved)
    assert [block(pool, i) for i in (0, 1, 2, 4)] == [before[i] for i in (0, 3, 2, 4)]
    assert pool.block_nbytes * pool.num_blocks == pool.nbytes


@backends
def test_bytes_of_another_size_are_refused(backend: str) -> None:
    """An error, never memory beside the block."""
    pool = pool_of(backend, 4)
    for size in (0, 1, pool.block_nbytes - 1, pool.block_nbytes + 1):
        with pytest.raises(ValueError):  # noqa: PT011 (each backend has its own words)
            pool.save_block(0, np.empty(size, np.uint8))
        with pytest.raises(ValueError):  # noqa: PT011
            pool.restore_block(0, np.empty(size, np.uint8))
    with pytest.raises(IndexError):
        pool.save_block(5, np.empty(pool.block_nbytes, np.uint8))
