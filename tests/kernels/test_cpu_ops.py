"""Every op of the cpu backend against float64, on every level that this machine has."""

from __future__ import annotations

import numpy as np
import pytest

from beds.cpu_kernels import (
    BFLOAT16,
    CASES,
    IDS,
    Paged,
    assert_close,
    exact,
    kernels,
    poisoned,
    rounded,
    tolerance,
)  # fmt: skip

cases = pytest.mark.parametrize("case", CASES, ids=IDS)
SHAPES = [(1, 32, 32), (1, 5, 3), (3, 33, 31), (17, 96, 576), (33, 70, 130), (70, 192, 64)]


@cases
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_linear_is_the_product(case: tuple[str, str], rows: int, n: int, k: int) -> None:
    """out = x @ weight^T for odd and even shapes, x and out of either type."""
    ops = kernels(case)
    rng = np.random.default_rng(rows * n + k)
    weight = rng.standard_normal((n, k), dtype=np.float32)
    x = rng.standard_normal((rows, k), dtype=np.float32)
    packed = ops.pack_linear(weight)
    assert (packed.out_features, packed.in_features) == (n, k)
    want = rounded(x, ops.dtype) @ rounded(weight, ops.dtype).T
    for x_dtype in {np.dtype(np.float32), ops.dtype}:
        for out_dtype in {np.dtype(np.float32), ops.dtype}:
            out = poisoned((rows, n), out_dtype)
            ops.linear(x.astype(ops.dtype).astype(x_dtype), packed, out)
            assert_close(out, want, tolerance(out_dtype))


@cases
def test_embedding_reads_the_panels(case: tuple[str, str]) -> None:
    """R36: the lookup returns the stored rows exactly, last panel included."""
    ops = kernels(case)
    weight = np.random.default_rng(0).standard_normal((75, 46), dtype=np.float32)
    ids = np.array([0, 74, 33, 33, 31, 64], np.int32)
    out = poisoned((len(ids), 46), np.float32)
    ops.embedding(ids, ops.pack_linear(weight), out)
    np.testing.assert_array_equal(exact(out), rounded(weight[ids], ops.dtype))


@cases
@pytest.mark.parametrize("columns", [1, 7, 64, 100, 576])
def test_norms_scale_without_shift(case: tuple[str, str], columns: int) -> None:
    """R37, R55, R56: rms_norm, and the fused form that first adds to the residual in place."""
    ops = kernels(case)
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((5, columns), dtype=np.float32) + 3
    carried = rng.standard_normal((5, columns), dtype=np.float32)
    weight = ops.pack_vector(rng.standard_normal(columns, dtype=np.float32))
    for residual in (None, carried.copy()):
        out = poisoned((5, columns), ops.dtype)
        if residual is None:
            total = exact(x)
            ops.rms_norm(x, weight, 1e-5, out)
        else:
            total = exact(x + carried)
            ops.fused_add_rms_norm(x, residual, weight, 1e-5, out)
            np.testing.assert_array_equal(residual, x + carried)
        want = total / np.sqrt(np.mean(total**2, axis=1, keepdims=True) + 1e-5) * weight
        assert_close(out, want, tolerance(ops.dtype))


@cases
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (34, 34), (80, 32), (256, 256)])
def test_rotary_turns_halves_in_place(
    case: tuple[str, str], head_dim: int, rotary_dim: int
) -> None:
    """R39: views into one qkv array are turned where they lie; the rest of a head stays."""
    ops = kernels(case)
    rng = np.random.default_rng(head_dim)
    positions = np.array([0, 5, 99, 5], np.int32)
    angle = np.arange(100)[:, None] * 0.3 ** np.arange(rotary_dim // 2)
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    for dtype in {np.dtype(np.float32), ops.dtype}:
        qkv = rng.standard_normal((4, 6 * head_dim), dtype=np.float32).astype(dtype)
        before = exact(qkv).reshape(4, 6, head_dim)
        query = qkv[:, : 3 * head_dim].reshape(4, 3, head_dim)
        key = qkv[:, 3 * head_dim : 5 * head_dim].reshape(4, 2, head_dim)
        ops.rotary_embedding(positions, query, key, table)
        cos, sin = np.split(exact(table[positions])[:, None, :], 2, axis=2)
        half = rotary_dim // 2
        a, b = before[:, :5, :half], before[:, :5, half:rotary_dim]
        want = before.copy()
        want[:, :5, :rotary_dim] = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
        assert_close(qkv.reshape(4, 6, head_dim), want, tolerance(dtype))
        np.testing.assert_array_equal(exact(qkv).reshape(4, 6, head_dim)[:, 5], want[:, 5])


@cases
@pytest.mark.parametrize("columns", [1, 33, 64])
def test_silu_and_mul(case: tuple[str, str], columns: int) -> None:
    """R58, with gates far outside the range of exp; gate_up is a product with a unit matrix."""
    ops = kernels(case)
    gate_up = np.random.default_rng(1).standard_normal((3, 2 * columns), dtype=np.float32)
    gate_up[0, :columns] *= 60
    gate_up = gate_up.astype(ops.dtype)
    out = poisoned((3, columns), ops.dtype)
    unit = ops.pack_linear(np.eye(2 * columns, dtype=np.float32))
    ops.linear_silu_and_mul(gate_up, unit, out)
    gate, up = np.split(exact(gate_up), 2, axis=1)
    with np.errstate(over="ignore"):
        assert_close(out, gate / (1 + np.exp(-gate)) * up, tolerance(ops.dtype))


@cases
def test_gather_rows_copies(case: tuple[str, str]) -> None:
    """R61."""
    ops = kernels(case)
    x = np.random.default_rng(2).standard_normal((9, 37), dtype=np.float32).astype(ops.dtype)
    indices = np.array([8, 0, 3, 3], np.int32)
    out = poisoned((4, 37), ops.dtype)
    ops.gather_rows(x, indices, out)
    np.testing.assert_array_equal(out, x[indices])


@cases
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("head_dim", [34, 64])
def test_cache_gives_back_what_was_written(
    case: tuple[str, str], block_size: int, head_dim: int
) -> None:
    """R25, R27, R38: a slot is block * block_size + offset, in one layer only."""
    ops = kernels(case)
    rng = np.random.default_rng(3)
    shape = dict(num_layers=2, num_kv_heads=3, head_dim=head_dim)
    cache = ops.allocate_kv_cache(num_blocks=10, block_size=block_size, **shape)
    assert cache.nbytes == 10 * block_size * ops.kv_bytes_per_token(**shape)
    slots = rng.permutation(10 * block_size).astype(np.int32)
    key = rng.standard_normal((len(slots), 3, head_dim), dtype=np.float32)
    value = rng.standard_normal((len(slots), 3, head_dim), dtype=np.float32)
    ops.reshape_and_cache(key, value, cache, 1, slots)
    for block in range(10):
        k, v = cache.read_block(1, block)
        rows = [int(np.flatnonzero(slots == block * block_size + i)[0]) for i in range(block_size)]
        np.testing.assert_array_equal(exact(k), rounded(key[rows], ops.dtype))
        np.testing.assert_array_equal(exact(v), rounded(value[rows], ops.dtype))
        assert not np.any(cache.read_block(0, block))


@cases
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("head_dim", [34, 64, 80, 200])
def test_many_tokens_fill_the_cache_as_one_by_one(
    case: tuple[str, str], block_size: int, head_dim: int
) -> None:
    """Runs that begin and end anywhere, in and out of order, among them whole units of 16."""
    ops = kernels(case)
    rng = np.random.default_rng(head_dim)
    shape = dict(num_layers=1, num_blocks=-(-480 // block_size), num_kv_heads=2, head_dim=head_dim)
    pools = [ops.allocate_kv_cache(block_size=block_size, **shape) for _ in range(2)]
    runs = [range(0, 100), range(141, 256), range(256, 272), range(320, 304, -1), range(400, 409)]
    slots = np.concatenate([np.arange(r.start, r.stop, r.step) for r in runs]).astype(np.int32)
    slots[[30, 31]] = slots[[31, 30]]
    qkv = rng.standard_normal((len(slots), 6, head_dim), dtype=np.float32)
    key, value = qkv[:, 2:4], qkv[:, 4:]
    for pool in pools:
        for block in range(pool.num_blocks):
            pool.fill_block(block, float("nan"))
    ops.reshape_and_cache(key, value, pools[0], 0, slots)
    for i in range(len(slots)):
        one = slice(i, i + 1)
        ops.reshape_and_cache(key[one], value[one], pools[1], 0, slots[one])
    saved = [np.empty((pool.num_blocks, pool.block_nbytes), np.uint8) for pool in pools]
    for pool, bytes_of in zip(pools, saved, strict=True):
        for block in range(pool.num_blocks):
            pool.save_block(block, bytes_of[block])
    np.testing.assert_array_equal(*saved)


@cases
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 80), (4, 2, 256), (3, 3, 34)]
)
def test_attention_is_softmax_of_scores(
    case: tuple[str, str], heads: int, kv_heads: int, head_dim: int
) -> None:
    """R49: prefill, chunk and decode in one batch, one request longer than two splits."""
    ops = kernels(case)
    lengths, rows = [1, 33, 200, 1100], [1, 33, 7, 1]
    paged = Paged.random(4, lengths, heads, kv_heads, head_dim)
    got = paged.attend(ops, query_lens=rows)
    # bf16 K/V are exact in the reference; what is left is the rounding of q, p and the output.
    limit = 2.0**-6 if ops.dtype == BFLOAT16 else 1e-5
    for r, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        assert_close(got[r], paged.reference(r, length, count, ops.dtype), limit)
