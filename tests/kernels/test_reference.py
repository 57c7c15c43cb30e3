"""The reference backend, op by op: right by the definition in float64, and a row is a row."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kernels.api import Kernels, load_backend
from octavo.kernels.reference import DOT_LENGTH, attend, make_kernels

KERNELS: Kernels = make_kernels()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def full_softmax_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float
) -> np.ndarray:
    """query [KH, G, D], keys and values [L, KH, D] -> [KH, G, D], in float64, scores and all."""
    q, k, v = (x.astype(np.float64) for x in (query, keys, values))
    scores = np.einsum("hgd,lhd->hgl", q, k) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hgl,lhd->hgd", weights, v)


@settings(max_examples=60)
@given(
    num_keys=st.integers(1, 300),
    tile_size=st.integers(1, 320),
    split_size=st.integers(1, 320),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_online_softmax_equals_full_softmax_for_any_tile_and_split(
    num_keys: int, tile_size: int, split_size: int, spread: float
) -> None:
    """R46: running max, running sum, rescale; splits merged by log-sum-exp."""
    query = normal(2, 3, 8) * np.float32(spread)
    keys, values = normal(num_keys, 2, 8, seed=1), normal(num_keys, 2, 8, seed=2)
    out = attend(query, keys, values, 8**-0.5, tile_size=tile_size, split_size=split_size)
    wanted = full_softmax_attention(query, keys, values, 8**-0.5)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=3e-5)


def test_attention_weights_sum_to_one_and_scores_are_scaled() -> None:
    """R43: values of one give one; the scale divides the scores, as sqrt(head_dim) should."""
    query, keys = normal(2, 2, 16), normal(90, 2, 16, seed=1)
    ones = np.ones((90, 2, 16), np.float32)
    np.testing.assert_allclose(attend(query, keys, ones, 0.25), 1, rtol=1e-6)
    values = normal(90, 2, 16, seed=2)
    np.testing.assert_array_equal(
        attend(query, keys, values, 1 / math.sqrt(16)), attend(query / 4, keys, values, 1.0)
    )


def test_no_array_is_as_large_as_all_scores() -> None:
    """R47: a chunk of 1,024 rows over 1,024 keys never holds its 4 heads' scores (16 MiB)."""
    cache = KERNELS.allocate_kv_cache(
        num_layers=1, num_blocks=64, block_size=16, num_kv_heads=2, head_dim=8
    )
    key, value = normal(1024, 2, 8), normal(1024, 2, 8, seed=1)
    KERNELS.reshape_and_cache(key, value, cache, 0, np.arange(1024, dtype=np.int32))
    query, out = normal(1024, 4, 8, seed=2), np.empty((1024, 32), np.float32)
    table = np.arange(64, dtype=np.int32)[None]
    ends = np.array([0, 1024], np.int32)
    tracemalloc.start()
    try:
        KERNELS.paged_attention(query, cache, 0, table, ends, ends[1:], 0.3, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 1024
    last = full_softmax_attention(query[-1].reshape(2, 2, 8), key, value, 0.3)
    np.testing.assert_allclose(out[-1], last.ravel(), atol=1e-5)


def test_attention_reads_through_the_block_table_and_nothing_past_the_end() -> None:
    """R42, R45: slots past seq_len hold NaN, and table entries past the end are -1."""
    cache = KERNELS.allocate_kv_cache(
        num_layers=3, num_blocks=16, block_size=16, num_kv_heads=2, head_dim=8
    )
    for block_id in range(16):
        cache.fill_block(block_id, math.nan)
    key, value = normal(26, 2, 8), normal(26, 2, 8, seed=1)
    table = [5, 8, 12]
    slots = np.array([table[p // 16] * 16 + p % 16 for p in range(26)], np.int32)
    assert slots[25] == 137
    KERNELS.reshape_and_cache(key, value, cache, 2, slots)
    query, out = normal(1, 6, 8, seed=2), np.empty((1, 48), np.float32)
    KERNELS.paged_attention(
        query,
        cache,
        2,
        np.array([[5, 8, -1, -1]], np.int32),
        np.array([0, 1], np.int32),
        np.array([26], np.int32),
        8**-0.5,
        out,
    )
    wanted = full_softmax_attention(query.reshape(2, 3, 8), key, value, 8**-0.5)
    np.testing.assert_allclose(out, wanted.reshape(1, 48), atol=1e-5)
    assert np.isnan(cache.read_block(1, 5)[0]).all()  # other layers are untouched (R24)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 5), (96, 64), (50, 577), (3, DOT_LENGTH + 9)])
def test_linear_is_a_dot_product_for_each_output(n: int, k: int) -> None:
    x, weight = normal(4, k), normal(n, k, seed=1)
    out = np.empty((4, n), np.float32)
    KERNELS.linear(x, KERNELS.pack_linear(weight), out)
    wanted = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(out, wanted, atol=1e-6 * k)


@settings(max_examples=40)
@given(
    num_rows=st.integers(1, 9),
    n=st.integers(1, 70),
    k=st.sampled_from([1, 3, 16, 61, 576, DOT_LENGTH + 5]),
    offset=st.integers(0, 20),
)
def test_a_row_of_linear_and_norms_is_the_same_in_any_place(
    num_rows: int, n: int, k: int, offset: int
) -> None:
    """The op table's law: not T, not the row's place, not N, not memory alignment."""
    rows = normal(num_rows, k)
    weight, vector = normal(n, k, seed=1), normal(k, seed=2)
    padded = np.empty((num_rows + offset, k + offset), np.float32)[offset:, offset:]
    padded[...] = rows
    linear, wide = KERNELS.pack_linear(weight), KERNELS.pack_linear(np.concatenate([weight] * 2))
    batched, norms = np.empty((num_rows, 2 * n), np.float32), np.empty((num_rows, k), np.float32)
    KERNELS.linear(padded, wide, batched)
    KERNELS.rms_norm(padded, vector, 1e-5, norms)
    for i in range(num_rows):
        alone, norm = np.empty((1, n), np.float32), np.empty((1, k), np.float32)
        KERNELS.linear(rows[i : i + 1], linear, alone)
        KERNELS.rms_norm(rows[i : i + 1], vector, 1e-5, norm)
        np.testing.assert_array_equal(batched[i], np.tile(alone[0], 2))
        np.testing.assert_array_equal(norms[i], norm[0])


def test_rms_norm_scales_only() -> None:
    """R37: no mean is subtracted: the norm of a constant row is that constant's sign."""
    x = np.concatenate([np.full((1, 64), 3, np.float32), normal(4, 64)])
    weight, out = normal(64, seed=1), np.empty((5, 64), np.float32)
    KERNELS.rms_norm(x, weight, 1e-6, out)
    np.testing.assert_allclose(out[0], weight, rtol=1e-6)
    x64 = x.astype(np.float64)
    wanted = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(out, wanted, rtol=2e-6)


def test_fused_add_norm_equals_add_then_norm() -> None:
    """R55, R56: the residual is updated in place, and the norm is of the sum."""
    x, residual, weight = normal(5, 33), normal(5, 33, seed=1), normal(33, seed=2)
    wanted_residual, wanted = residual + x, np.empty_like(x)
    KERNELS.rms_norm(wanted_residual, weight, 1e-5, wanted)
    out = np.empty_like(x)
    KERNELS.fused_add_rms_norm(x, residual, weight, 1e-5, out)
    np.testing.assert_array_equal(residual, wanted_residual)
    np.testing.assert_array_equal(out, wanted)


def test_silu_and_mul_equals_two_passes() -> None:
    """R58: silu(gate) * up, large negative gates included (no overflow, no warning)."""
    gate_up = normal(6, 2 * 21) * np.float32(20)
    gate_up[0, 0] = -1000
    out = np.empty((6, 21), np.float32)
    KERNELS.linear_silu_and_mul(gate_up, KERNELS.pack_linear(np.eye(42)), out)
    gate, up = gate_up[:, :21].astype(np.float64), gate_up[:, 21:].astype(np.float64)
    np.testing.assert_allclose(
        out, gate / (1 + np.exp(np.minimum(-gate, 700))) * up, rtol=3e-6, atol=1e-30
    )


def test_a_head_leaves_logits_or_the_best_token() -> None:
    """R61, R72: by hand; of equals the first, NaNs passed over, and no logits where none are."""
    columns = np.array([[1, 0], [3, 0], [np.nan, 0], [3, 0], [-9, 1]], np.float32)
    x = np.array([[1, 0], [1, 0], [np.nan, 0], [0, 5]], np.float32)
    logits, best = np.full((4, 5), 77, np.float32), np.full(4, 77, np.int32)
    only = np.array([0, 1, 1, 1], np.int32)
    KERNELS.lm_head(x, KERNELS.pack_linear(columns), only, logits, best)
    assert best.tolist() == [-1, 1, -1, 4]
    np.testing.assert_array_equal(logits[0], [1, 3, np.nan, 3, -9])
    np.testing.assert_array_equal(logits[1:], [[77] * 5, [-np.inf] * 5, [77] * 5])


def test_embedding_and_gather_take_rows() -> None:
    """R36, R61: [T] ids -> [T, H]; [S] indices of [T, H] -> [S, H]."""
    table = normal(11, 6)
    ids = np.array([10, 0, 3, 3], np.int32)
    out = np.empty((4, 6), np.float32)
    KERNELS.embedding(ids, KERNELS.pack_linear(table), out)
    np.testing.assert_array_equal(out, table[[10, 0, 3, 3]])
    rows = np.empty((2, 6), np.float32)
    KERNELS.gather_rows(out, np.array([3, 0], np.int32), rows)
    np.testing.assert_array_equal(rows, table[[3, 10]])


def test_rotary_leaves_what_is_past_rotary_dim() -> None:
    query, key = normal(2, 1, 8), normal(2, 1, 8, seed=1)
    before = query.copy()
    cache = np.concatenate([np.zeros((4, 2)), np.ones((4, 2))], axis=1, dtype=np.float32)
    KERNELS.rotary_embedding(np.array([1, 3], np.int32), query, key, cache)  # by 90 degrees
    np.testing.assert_array_equal(query[..., :2], -before[..., 2:4])
    np.testing.assert_array_equal(query[..., 2:4], before[..., :2])
    np.testing.assert_array_equal(query[..., 4:], before[..., 4:])


def resident() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_the_pool_has_its_logical_shape_and_is_not_resident_before_use() -> None:
    """R22, R28: one array; 4 GiB are reserved, none of them touched."""
    before = resident()
    cache = KERNELS.allocate_kv_cache(
        num_layers=16, num_blocks=8192, block_size=16, num_kv_heads=4, head_dim=64
    )
    assert cache.nbytes == 16 * 2 * 8192 * 16 * 4 * 64 * 4
    per_token = KERNELS.kv_bytes_per_token(num_layers=16, num_kv_heads=4, head_dim=64)
    assert cache.nbytes == 8192 * 16 * per_token
    cache.fill_block(3, 1.5)
    key, value = cache.read_block(15, 3)
    assert key.shape == value.shape == (16, 4, 64)
    assert (key == 1.5).all()
    assert (value == 1.5).all()
    assert resident() - before < cache.nbytes / 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"threads": 2}, "threads is 2.*computes in one thread"),
        ({"isa": "avx2"}, "isa is 'avx2'.*unset with the reference"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'.*auto or float32"),
    ],
)
def test_what_the_reference_can_not_honour_is_refused(
    settings: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load_backend("reference", **settings)  # type: ignore[arg-type]


def test_describe_says_what_runs() -> None:
    assert load_backend("reference", threads=1, dtype="float32").describe() == {
        "backend": "reference",
        "isa": "numpy",
        "threads": "1",
        "dtype": "float32",
    }
