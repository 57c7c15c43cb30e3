"""K and V as int8 with one scale per token and head: half the memory, and the same laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.cpu_kernels import (
    CASES,
    IDS,
    Paged,
    assert_close,
    bits,
    check_chunk,
    exact,
    kernels,
    tolerance,
)
from octavo.kernels.api import Array
from octavo.kernels.cpu import CpuKernels

cases = pytest.mark.parametrize("case", CASES, ids=IDS)


def stored(ops: CpuKernels, key: Array, value: Array, block_size: int) -> tuple[Array, Array]:
    """key, value [T, KH, D] as they come back from an int8 pool."""
    num_tokens, num_heads, head_dim = key.shape
    num_blocks = -(-num_tokens // block_size)
    cache = ops.allocate_kv_cache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype="int8",
    )
    assert cache.nbytes == num_blocks * block_size * ops.kv_bytes_per_token(
        num_layers=1, num_kv_heads=num_heads, head_dim=head_dim, dtype="int8"
    )
    for block in range(num_blocks):
        cache.fill_block(block, np.nan)
    ops.reshape_and_cache(key, value, cache, 0, np.arange(num_tokens, dtype=np.int32))
    blocks = [cache.read_block(0, block) for block in range(num_blocks)]
    keys, values = (np.concatenate(each)[:num_tokens] for each in zip(*blocks, strict=True))
    return keys, values


@cases
@settings(max_examples=8)
@given(
    block_size=st.sampled_from([1, 4, 16, 64]),
    head_dim=st.sampled_from([32, 34, 64, 96]),
    seed=st.integers(0, 99),
)
def test_a_number_is_off_by_half_a_step_at_most(
    case: tuple[str, str], block_size: int, head_dim: int, seed: int
) -> None:
    """A step is the largest magnitude of this token and head over 127; no other token has a say."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-8, 8, (2, 37, 3, 1)))
    key, value = (rng.standard_normal((2, 37, 3, head_dim)) * sizes).astype(np.float32)
    for given_, found in zip(
        (key, value), stored(kernels(case), key, value, block_size), strict=True
    ):
        step = np.abs(given_).max(axis=-1, keepdims=True) / 127
        assert np.all(np.abs(found - given_) <= 0.501 * step)


@cases
def test_zero_and_not_finite_tokens(case: tuple[str, str]) -> None:
    """A token of zeros stays zero; one with a NaN or an infinity is NaN there, nowhere else."""
    key = np.random.default_rng(0).standard_normal((20, 2, 32), dtype=np.float32)
    clean, _ = stored(kernels(case), key, key, 16)
    key[3] = 0
    key[5, 1, 7] = np.nan
    key[6, 0, 31] = -np.inf
    key[9, 1] = 1e-44
    spoilt, _ = stored(kernels(case), key, key, 16)
    assert not spoilt[3].any()
    assert np.isnan(spoilt[5, 1]).all()
    assert np.isnan(spoilt[6, 0]).all()
    assert np.abs(spoilt[9, 1]).max() <= 1e-44
    for array in (clean, spoilt):
        array[[3, 9]] = 0
        array[5, 1] = array[6, 0] = 0
    assert bits(clean) == bits(spoilt)


@cases
def test_attention_over_int8_is_that_over_what_is_stored(case: tuple[str, str]) -> None:
    """Against float64 attention over the pool's own numbers."""
    ops = kernels(case)
    paged = Paged.random(3, [70, 601, 17], 6, 2, 64)
    results = paged.attend(ops, kv_dtype="int8")
    as_stored = replace(paged)
    pairs = [stored(ops, k, v, 16) for k, v in zip(paged.key, paged.value, strict=True)]
    as_stored.key, as_stored.value = [k for k, _ in pairs], [v for _, v in pairs]
    for r, rows in enumerate(results):
        want = as_stored.reference(r, len(rows), len(rows), ops.dtype)
        assert_close(rows, want, 4 * tolerance(ops.dtype))
        assert np.isfinite(exact(rows)).all()


@cases
@settings(max_examples=8)
@given(data=st.data())
def test_int8_attention_is_the_same_in_chunks_alone_and_in_any_block(
    case: tuple[str, str], data: st.DataObject
) -> None:
    """Law: scales per token and head, so chunks, block size, neighbours and stale slots move no
    bit."""
    ops = kernels(case)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3), label="lengths")
    lengths[0] += data.draw(st.sampled_from([0, 500]), label="more")
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    head_dim = data.draw(st.sampled_from([32, 34, 64, 128]))
    paged = Paged.random(len(lengths), lengths, kv_heads * group, kv_heads, head_dim)
    whole = paged.attend(ops, kv_dtype="int8")
    for r, rows in enumerate(whole):
        assert np.isfinite(exact(rows)).all()
        check_chunk(ops, paged, r, rows, data, kv_dtype="int8")


@cases
def test_threads_never_change_int8_attention(case: tuple[str, str]) -> None:
    """Law: threads split outputs, never a sum."""
    paged = Paged.random(6, [1100, 300, 40], 6, 2, 64)
    results = {
        b"".join(
            bits(r) for r in paged.attend(kernels(case, n), query_lens=[1, 5, 40], kv_dtype="int8")
        )
        for n in (1, 2, 4)
    }
    assert len(results) == 1
