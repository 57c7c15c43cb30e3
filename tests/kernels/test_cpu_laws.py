"""The law of the op table: a row's bits depend on that row's own inputs only.

Not on the rest of the batch, chunk borders, block ids, block size, threads, or what stale slots
hold. Compared bit for bit, never within a tolerance, on every level of this machine.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.cpu_kernels import CASES, IDS, Paged, bits, check_chunk, kernels, poisoned
from octavo.kernels.api import Array
from octavo.kernels.cpu import CpuKernels

cases = pytest.mark.parametrize("case", CASES, ids=IDS)
few = settings(max_examples=12)


def run_linear(ops: CpuKernels, x: Array, weight: Array, out_dtype: object) -> Array:
    out = poisoned((len(x), len(weight)), out_dtype)
    ops.linear(x, ops.pack_linear(weight), out)
    return out


@cases
@few
@given(
    rows=st.integers(1, 70), n=st.integers(1, 140), k=st.integers(1, 200), seed=st.integers(0, 99)
)
def test_a_row_of_linear_is_the_same_alone(
    case: tuple[str, str], rows: int, n: int, k: int, seed: int
) -> None:
    """Law: whatever M is, one chain over K per output."""
    ops = kernels(case)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k), dtype=np.float32).astype(ops.dtype)
    weight = rng.standard_normal((n, k), dtype=np.float32)
    for out_dtype in {np.dtype(np.float32), ops.dtype}:
        whole = run_linear(ops, x, weight, out_dtype)
        assert not np.isnan(whole.astype(np.float32)).any()
        for row in {0, rows // 2, rows - 1}:
            alone = run_linear(ops, x[row : row + 1], weight, out_dtype)
            assert bits(alone) == bits(whole[row : row + 1])
        cut = rows // 3
        assert bits(run_linear(ops, x[cut:], weight, out_dtype)) == bits(whole[cut:])


@cases
@pytest.mark.parametrize("out_features", [32, 96, 131, 300])
def test_a_row_of_linear_is_the_same_alone_whatever_its_numbers(
    case: tuple[str, str], out_features: int
) -> None:
    """Subnormal numbers and products, zeros of both signs, sums that cancel or overflow."""
    ops = kernels(case)
    rng = np.random.default_rng(out_features)

    def draw(rows: int, lowest: int, highest: int) -> Array:
        exponents = rng.integers(lowest, highest, (rows, 133))
        signs = rng.choice(np.array([-1, 0, 1], np.float32), (rows, 133), p=[0.45, 0.1, 0.45])
        return np.ldexp(signs * rng.uniform(1, 2, (rows, 133)), exponents).astype(np.float32)

    for lowest, highest in ((-140, -120), (-75, -60), (-4, 4), (55, 70)):
        weight = ops.pack_linear(draw(out_features, lowest, highest))
        x = draw(20, lowest, highest).astype(ops.dtype)
        together = poisoned((20, out_features), np.float32)
        ops.linear(x, weight, together)
        for row in range(20):
            alone = poisoned((1, out_features), np.float32)
            ops.linear(x[row : row + 1], weight, alone)
            same_number = alone.view(np.uint32) == together[row : row + 1].view(np.uint32)
            assert np.all(same_number | np.isnan(alone) & np.isnan(together[row : row + 1]))


@cases
def test_threads_never_change_linear(case: tuple[str, str]) -> None:
    """Law: threads split outputs, never a sum; nor do blocks of rows. Large enough for both."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 2100), dtype=np.float32)
    weight = rng.standard_normal((100, 2100), dtype=np.float32)
    results = {bits(run_linear(kernels(case, n), x, weight, np.float32)) for n in (1, 2, 3)}
    results.add(bits(run_linear(kernels(case), np.tile(x, (2, 1)), weight, np.float32)[300:]))
    assert len(results) == 1


@cases
def test_logits_of_many_rows_equal_those_of_one(case: tuple[str, str]) -> None:
    """Law: an output so large that it may be written past the caches; 33 to 128 rows at once, the
    last tile of rows short, tall or whole; the last panel cut off."""
    rng = np.random.default_rng(2)
    ops, width = kernels(case), 8213
    weight = ops.pack_linear(rng.standard_normal((width, 64), dtype=np.float32))
    x = rng.standard_normal((128, 64), dtype=np.float32).astype(ops.dtype)
    alone = poisoned((1, width), np.float32)
    for rows in (40, 64, 75, 128):
        memory = poisoned((rows + 1, 8224), np.float32)
        first = -(memory.ctypes.data // 4) % 16  # rows start at a cache line, as an arena's do
        whole = memory.reshape(-1)[first : first + rows * 8224].reshape(rows, 8224)
        ops.linear(x[:rows], weight, whole[:, :width])
        assert not np.isnan(whole[:, :width]).any()
        assert np.isnan(whole[:, width:]).all()
        for row in (0, 17, rows - 1):
            ops.linear(x[row : row + 1], weight, alone)
            assert bits(alone) == bits(whole[row : row + 1, :width])


@cases
@few
@given(rows=st.integers(2, 40), columns=st.integers(1, 300), seed=st.integers(0, 99))
def test_a_row_of_a_norm_is_the_same_alone(
    case: tuple[str, str], rows: int, columns: int, seed: int
) -> None:
    """Law: tails are shorter vectors of the same arithmetic, and rows never meet."""
    ops = kernels(case)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns), dtype=np.float32).astype(ops.dtype)
    weight = rng.standard_normal(columns, dtype=np.float32)
    carried = rng.standard_normal((rows, columns), dtype=np.float32)

    def run(part: slice) -> list[Array]:
        count = len(x[part])
        norm = poisoned((count, columns), ops.dtype)
        residual = carried[part].copy()
        ops.fused_add_rms_norm(x[part], residual, weight, 1e-5, norm)
        return [norm, residual]

    whole = run(slice(None))
    for row in (0, rows - 1):
        alone = run(slice(row, row + 1))
        for a, b in zip(alone, whole, strict=True):
            assert bits(a) == bits(b[row : row + 1])


@st.composite
def paged_requests(draw: st.DrawFn) -> Paged:
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    if draw(st.booleans()):
        lengths[0] += draw(st.sampled_from([500, 512, 600, 1030]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    head_dim = draw(st.sampled_from([32, 34, 64, 80, 96, 128, 256]))
    seed = draw(st.integers(0, 99))
    return Paged.random(seed, lengths, kv_heads * group, kv_heads, head_dim)


@cases
@few
@given(paged=paged_requests(), data=st.data())
def test_attention_is_the_same_in_chunks_alone_and_in_any_block(
    case: tuple[str, str], paged: Paged, data: st.DataObject
) -> None:
    """Law: chunks, block size, block ids, neighbours and stale slots move no bit."""
    ops = kernels(case)
    whole = paged.attend(ops)
    for r, rows in enumerate(whole):
        assert not np.isnan(rows.astype(np.float32)).any()
        check_chunk(ops, paged, r, rows, data)


@cases
def test_every_decode_step_equals_its_row_of_the_prefill(case: tuple[str, str]) -> None:
    """Law: a row alone walks the tiles and splits that it walks inside a chunk of hundreds."""
    ops = kernels(case)
    paged = Paged.random(5, [601], 6, 2, 64)
    whole = paged.attend(ops)[0]
    for end in (1, 15, 16, 17, 63, 64, 65, 128, 511, 512, 513, 576, 600, 601):
        alone = paged.attend(ops, ends=[end], query_lens=[1])[0]
        assert bits(alone) == bits(whole[end - 1 : end])


@cases
def test_threads_never_change_attention(case: tuple[str, str]) -> None:
    """Law: splits that run as tasks of their own merge in the same order (long decode, prefill)."""
    paged = Paged.random(6, [1400, 1100, 40], 6, 2, 64)
    for query_lens in ([1, 1, 1], [300, 5, 40]):
        results = set()
        for threads in (1, 2, 4):
            rows = paged.attend(kernels(case, threads), query_lens=query_lens)
            results.add(b"".join(bits(r) for r in rows))
        assert len(results) == 1


@cases
def test_a_long_decode_alone_equals_one_in_a_batch(case: tuple[str, str]) -> None:
    """Law: parallel splits (alone) and splits one after the other (in a batch) agree."""
    ops = kernels(case)
    paged = Paged.random(7, [1300] + [30] * 6, 6, 2, 64)
    batch = paged.attend(ops, query_lens=[1] * 7)[0]
    assert bits(paged.attend(ops, requests=[0], ends=[1300], query_lens=[1])[0]) == bits(batch)


@cases
def test_a_nan_of_one_request_stays_there(case: tuple[str, str]) -> None:
    """Law: a fault in one request reaches no row of another."""
    ops = kernels(case)
    paged = Paged.random(8, [40, 70, 50], 6, 2, 64)
    clean = paged.attend(ops)
    paged.value[1][20] = np.nan
    paged.key[1][30] = np.nan
    paged.query[1][10] = np.nan
    spoilt = paged.attend(ops)
    assert bits(spoilt[0]) == bits(clean[0])
    assert bits(spoilt[2]) == bits(clean[2])
    assert np.isnan(spoilt[1].astype(np.float32)).any()
    x = np.ones((20, 64), np.float32)
    x[7] = np.nan
    weight = np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32)
    rows = run_linear(ops, x, weight, np.float32)
    assert np.isnan(rows[7]).all()
    assert not np.isnan(np.delete(rows, 7, axis=0)).any()
