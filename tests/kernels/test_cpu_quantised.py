"""Weights that stay quantised in memory: every format, on every level, against its definition.

Activations are quantised per 32 values of a row and the weights' own int8 or nibbles multiplied as
integers; Q6_K, with two scales over 32 values, becomes bfloat16 panels just before their use. On
AMX all formats do. int8 has one scale a row of weights; on AMX a row of activations becomes two
int8 parts with one scale.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.cpu_kernels import LEVELS, assert_close, bits, exact, poisoned, rounded, tolerance
from beds.stored_rows import KINDS, random_rows
from octavo.checkpoint import StoredRows
from octavo.errors import ConfigError
from octavo.kernels.api import Array, Linear
from octavo.kernels.cpu import CpuKernels, make_kernels
from octavo.weights.dequantise import dequantise

levels = pytest.mark.parametrize("level", LEVELS)
few = settings(max_examples=8)
shapes = given(
    rows=st.integers(1, 70),
    n=st.integers(1, 140),
    blocks=st.integers(1, 5),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 99),
)


def dequantised(stored: StoredRows, k: int) -> Array:
    out = np.empty(len(stored.rows) * k, np.float32)
    dequantise(stored.rows.reshape(-1), stored.kind, out)
    return out.reshape(-1, k)


def quantised_to_int8(weight: Array) -> Array:
    """What --quantization int8 makes of a weight, in float32: by its definition."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    quants = np.clip(np.rint(weight * inverse), -127, 127) + np.float32(0)  # no -0
    return np.asarray(quants * scale, np.float32)


def product(ops: CpuKernels, x: Array, weight: Linear | None, out_dtype: object) -> Array:
    assert weight is not None
    out = poisoned((len(x), weight.out_features), out_dtype)
    ops.linear(x, weight, out)
    return out


def activations(rows: int, k: int, ops: CpuKernels, seed: int) -> Array:
    return np.random.default_rng(seed + 1).standard_normal((rows, k), np.float32).astype(ops.dtype)


def assert_rows_alone(ops: CpuKernels, x: Array, weight: Linear | None, quantization: str) -> None:
    """Each row of a product, any number of them together, and any threads: the same bits."""
    rows, whole = len(x), product(ops, x, weight, np.float32)
    for row in {0, rows // 2, rows - 1}:
        assert bits(product(ops, x[row : row + 1], weight, np.float32)) == bits(whole[row])
    cut = rows // 3
    assert bits(product(ops, x[cut:], weight, np.float32)) == bits(whole[cut:])
    for threads in (1, 3):
        other = make_kernels(threads=threads, isa=ops.isa, quantization=quantization)
        assert bits(product(other, x, weight, np.float32)) == bits(whole)


def as_int8_sees(x: Array) -> Array:
    """Activations after quantisation, in float64: by its definition."""
    rows, k = x.shape
    groups = np.zeros((rows, -(-k // 32) * 32), np.float32)
    groups[:, :k] = x
    groups = groups.reshape(rows, -1, 32)
    top = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
    quants = np.clip(np.rint(groups * inverse), -127, 127)
    return (exact(quants) * exact(top / np.float32(127))).reshape(rows, -1)[:, :k]


def as_parts_see(x: Array) -> Array:
    """Activations as 128 * high + low with one scale a row, in float64: by its definition."""
    x = x.astype(np.float32)
    top = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(16319) / top, np.float32(0))
    return exact(np.rint(x * inverse)) * exact(top / np.float32(16319))


def want(x: Array, weight: Array, kind: str, ops: CpuKernels) -> Array:
    """The product in float64, of what the kernels multiply."""
    if kind == "Q6_K" or ops.isa == "amx":
        return exact(x) @ rounded(weight, ops.dtype).T
    return as_int8_sees(x) @ exact(weight).T


@levels
@few
@shapes
def test_products_and_embedding_of_a_stored_weight(
    level: str, rows: int, n: int, blocks: int, kind: str, seed: int
) -> None:
    """Law: float32 sums of exact integer dot products; the embedding reads the same cells.

    On AMX both read them as bfloat16.
    """
    ops = make_kernels(threads=2, isa=level, quantization="stored")
    k = blocks * KINDS[kind].block_size
    stored = random_rows(kind, n, k, seed)
    weight = dequantised(stored, k)
    kept = ops.pack_stored([stored], k)
    assert kept is not None
    x = activations(rows, k, ops, seed)
    wanted = want(x, weight, kind, ops)
    for out_dtype in (np.float32, ops.dtype):
        assert_close(product(ops, x, kept, out_dtype), wanted, tolerance(out_dtype))
    looked_up = poisoned((n, k), np.float32)
    ops.embedding(np.arange(n, dtype=np.int32)[::-1].copy(), kept, looked_up)
    read = weight.astype(ops.dtype).astype(np.float32) if level == "amx" else weight
    assert bits(looked_up) == bits(read[::-1])


@levels
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_format_on_every_level(level: str, kind: str) -> None:
    """The same law, for each format and level there is, with more rows than one tile."""
    ops = make_kernels(threads=2, isa=level, quantization="stored")
    stored = random_rows(kind, 100, 768, 7)
    kept = ops.pack_stored([stored], 768)
    x = activations(45, 768, ops, 7)
    wanted = want(x, dequantised(stored, 768), kind, ops)
    assert_close(product(ops, x, kept, np.float32), wanted, 2e-5)


@levels
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_format_that_is_decoded_has_the_bits_of_bfloat16(level: str, kind: str) -> None:
    """Law: on AMX, and for Q6_K everywhere, keeping a format saves memory and changes no answer."""
    ops = make_kernels(threads=2, isa=level, quantization="stored")
    widened = make_kernels(threads=2, isa=level)
    for rows, n, k in (
        (1, 33, 256),
        (16, 70, 512),
        (45, 140, 768),
        (70, 100, 256),
        (200, 64, 512),
        (2100, 40, 256),
    ):
        stored = random_rows(kind, n, k, rows)
        x = activations(rows, k, ops, rows)
        kept = product(ops, x, ops.pack_stored([stored], k), np.float32)
        plain = product(widened, x, widened.pack_linear(dequantised(stored, k)), np.float32)
        assert (bits(kept) == bits(plain)) == (kind == "Q6_K" or level == "amx")


@levels
def test_the_largest_quants_do_not_overflow(level: str) -> None:
    """Pairs of products at the ends of int8, -128 included, in every vector width's sums."""
    ops = make_kernels(threads=2, isa=level, quantization="stored")
    stored = random_rows("Q8_0", 40, 320, 3)
    blocks = stored.rows.reshape(-1, 34)
    blocks[:, 2:] = np.random.default_rng(3).choice([128, 127], blocks[:, 2:].shape)
    x = np.sign(activations(20, 320, ops, 3).astype(np.float32)).astype(ops.dtype)
    x[:10] = 1
    wanted = want(x, dequantised(stored, 320), "Q8_0", ops)
    assert_close(product(ops, x, ops.pack_stored([stored], 320), np.float32), wanted, 2e-5)


@levels
def test_what_is_no_number_stays_in_its_row(level: str) -> None:
    """A NaN or infinite activation spoils its own row, so that the fault shows, and no other."""
    ops = make_kernels(threads=2, isa=level, quantization="stored")
    weight = ops.pack_stored([random_rows("Q4_1", 40, 64, 0)], 64)
    x = activations(20, 64, ops, 0)
    whole = product(ops, x, weight, np.float32)
    x[3, 40], x[7, 0] = np.nan, np.inf
    faulty = product(ops, x, weight, np.float32)
    assert not np.isfinite(faulty[[3, 7]]).any()
    others = [row for row in range(20) if row not in (3, 7)]
    assert bits(faulty[others]) == bits(whole[others])


@levels
@few
@given(
    rows=st.integers(1, 70), n=st.integers(1, 140), k=st.integers(1, 200), seed=st.integers(0, 99)
)
def test_int8_is_what_its_definition_says(level: str, rows: int, n: int, k: int, seed: int) -> None:
    """Law: int8 weights with one scale a row; the embedding reads the same; a zero row is zero."""
    ops = make_kernels(threads=2, isa=level, quantization="int8")
    weight = np.random.default_rng(seed).standard_normal((n, k), np.float32)
    if n > 1:
        weight[n // 2] = 0
    defined = quantised_to_int8(weight)
    assert np.abs(defined - weight).max() <= np.abs(weight).max() / 250
    x = activations(rows, k, ops, seed)
    x[rows // 3] *= 1000
    packed = ops.pack_linear(weight)
    seen = as_parts_see(x) if level == "amx" else as_int8_sees(x)
    for out_dtype in (np.float32, ops.dtype):
        got = product(ops, x, packed, out_dtype)
        assert_close(got, seen @ exact(defined).T, tolerance(out_dtype))
    looked_up = poisoned((n, k), np.float32)
    ops.embedding(np.arange(n, dtype=np.int32), packed, looked_up)
    assert bits(looked_up) == bits(defined)


@levels
@few
@given(
    rows=st.integers(1, 70), n=st.integers(1, 140), k=st.integers(1, 200), seed=st.integers(0, 99)
)
def test_a_row_of_an_int8_product_is_the_same_alone(
    level: str, rows: int, n: int, k: int, seed: int
) -> None:
    """Law: whatever M is, and however many threads share it."""
    ops = make_kernels(threads=2, isa=level, quantization="int8")
    weight = ops.pack_linear(np.random.default_rng(seed).standard_normal((n, k), np.float32))
    x = activations(rows, k, ops, seed)
    assert_rows_alone(ops, x, weight, "int8")


@levels
def test_many_rows_and_logits_of_int8_are_those_of_one(level: str) -> None:
    """Law: blocks of rows, and outputs so large that they may be written past the caches."""
    ops = make_kernels(threads=2, isa=level, quantization="int8")
    rng = np.random.default_rng(0)
    for rows, n, k in ((300, 100, 2100), (64, 8213, 64)):
        weight = ops.pack_linear(rng.standard_normal((n, k), np.float32))
        x = activations(rows, k, ops, 0)
        stride = -(-n // 32) * 32
        memory = poisoned((rows + 1, stride), np.float32)
        first = -(memory.ctypes.data // 4) % 16  # rows start at a cache line, as an arena's do
        whole = memory.reshape(-1)[first : first + rows * stride].reshape(rows, stride)
        ops.linear(x, weight, whole[:, :n])
        assert np.isnan(whole[:, n:]).all()
        narrow = product(ops, x, weight, ops.dtype)
        for row in (0, 17, 38, rows - 1):
            assert bits(product(ops, x[row : row + 1], weight, np.float32)) == bits(whole[row, :n])
        assert bits(whole[:, :n].astype(ops.dtype)) == bits(narrow)


@levels
def test_the_longest_sums_of_int8_do_not_overflow(level: str) -> None:
    """2^17 products of the largest quants are the most that int32 is let hold; more is refused."""
    ops = make_kernels(threads=1, isa=level, quantization="int8")
    for sign in (1, -1):
        weight = np.full((1, 1 << 17), sign, np.float32)
        x = np.ones((3, 1 << 17), np.float32).astype(ops.dtype)
        x[1] *= -1
        x[2, ::2] = 0.0039
        seen = as_parts_see(x) if level == "amx" else as_int8_sees(x)
        got = product(ops, x, ops.pack_linear(weight), np.float32)
        assert_close(got, seen @ exact(quantised_to_int8(weight)).T, 2e-5)
    with pytest.raises(ValueError, match="in_features"):
        ops.pack_linear(np.ones((1, (1 << 17) + 1), np.float32))


@levels
def test_what_is_no_number_in_int8_stays_in_its_row(level: str) -> None:
    """What is no number in x or the weight spoils its own row of the product, no other."""
    ops = make_kernels(threads=2, isa=level, quantization="int8")
    weight = np.random.default_rng(0).standard_normal((40, 64), np.float32)
    x = activations(20, 64, ops, 0)
    whole = product(ops, x, ops.pack_linear(weight), np.float32)
    weight[5, 7], weight[33, 0] = np.nan, np.inf
    x[3, 40], x[7, 0] = np.nan, np.inf
    faulty = product(ops, x, ops.pack_linear(weight), np.float32)
    assert np.isnan(faulty[[3, 7]]).all()
    assert np.isnan(faulty[:, [5, 33]]).all()
    rows = np.delete(np.arange(20), [3, 7])[:, None]
    columns = np.delete(np.arange(40), [5, 33])
    assert bits(faulty[rows, columns]) == bits(whole[rows, columns])


@levels
@few
@shapes
def test_a_row_of_a_quantised_product_is_the_same_alone(
    level: str, rows: int, n: int, blocks: int, kind: str, seed: int
) -> None:
    """Law: whatever M is, and however many threads share it."""
    ops = make_kernels(threads=2, isa=level, quantization="stored")
    k = blocks * KINDS[kind].block_size
    weight = ops.pack_stored([random_rows(kind, n, k, seed)], k)
    x = activations(rows, k, ops, seed)
    assert_rows_alone(ops, x, weight, "stored")


@levels
def test_parts_of_different_formats_make_one_product(level: str) -> None:
    """q, k and v of one file are often stored in two formats (the mixes of K-quants)."""
    ops = make_kernels(threads=2, isa=level, quantization="stored")
    sizes = {"Q4_K": 64, "Q6_K": 32, "Q8_0": 10}
    parts = [random_rows(kind, n, 256, n) for kind, n in sizes.items()]
    x = activations(5, 256, ops, 0)
    together = product(ops, x, ops.pack_stored(parts, 256), np.float32)
    single = [product(ops, x, ops.pack_stored([part], 256), np.float32) for part in parts]
    assert bits(together) == bits(np.concatenate(single, axis=1))
    alike = [random_rows("Q4_1", n, 256, n) for n in (10, 45)]
    together = product(ops, x, ops.pack_stored(alike, 256), np.float32)
    single = [product(ops, x, ops.pack_stored([part], 256), np.float32) for part in alike]
    assert bits(together) == bits(np.concatenate(single, axis=1))
    assert ops.pack_stored(parts[::-1], 256) is None  # formats that would share a panel


def test_packed_sizes() -> None:
    """A kept weight takes what its format takes, and no copy in bfloat16 besides."""
    ops = make_kernels(quantization="stored")
    int8 = make_kernels(quantization="int8")
    assert int8.pack_linear(np.ones((64, 256), np.float32)).nbytes == 64 * (256 + 4)
    bits_a_weight = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q4_K": 6, "Q6_K": 10}
    for kind, size in bits_a_weight.items():
        packed = ops.pack_stored([random_rows(kind, 64, 256, 0)], 256)
        assert packed is not None
        assert packed.nbytes * 8 == size * 64 * 256


def test_quantised_doors() -> None:
    """Rows of another size, and settings that don't go together, are refused."""
    ops = make_kernels(quantization="stored")
    stored = random_rows("Q4_1", 4, 64, 0)
    with pytest.raises(ValueError, match="in_features"):
        ops.pack_stored([stored], 96)
    with pytest.raises(ValueError, match="no kernels"):
        ops.pack_stored([StoredRows("Q2_K", stored.rows)], 64)
    for refused in ({"quantization": "int4"}, {"quantization": "int8", "dtype": "float32"}):
        with pytest.raises(ConfigError, match="int8"):
            make_kernels(**refused)
    decoded = {*KINDS, "F32", "F16", "BF16"}
    assert make_kernels().stored_kinds == decoded
    assert make_kernels(quantization="int8").stored_kinds == decoded
    assert make_kernels(quantization="stored").stored_kinds == frozenset(KINDS)


@levels
def test_formats_are_kept_by_default_where_that_changes_no_answer(level: str) -> None:
    """On AMX; with a dtype that is asked for, weights are widened to it everywhere."""
    part = random_rows("Q4_1", 64, 256, 0)
    sizes = []
    for asked in ({}, {"dtype": "bfloat16"}, {"quantization": "stored"}):
        packed = make_kernels(isa=level, **asked).pack_stored([part], 256)
        assert packed is not None
        sizes.append(packed.nbytes)
    assert sizes[1:] == [64 * 256 * 2, 64 * 256 * 5 // 8]
    assert sizes[0] == sizes[2 if level == "amx" else 1]
