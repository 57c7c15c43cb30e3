"""The MLP's gate and up as one op: to the bit what two are, linear() and then silu(gate) * up.

The second is asked of the op itself, one number of gate and its number of up at a time: a product
with a unit matrix, which changes neither. Of so narrow a weight nothing is computed in pieces.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.cpu_kernels import LEVELS, bits, ops_of, poisoned
from beds.stored_rows import random_rows
from octavo.kernels.api import Array, Kernels, Linear

PLAIN = ["bfloat16", "float32", "int8"]
STORED = {
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q4_1": ("Q4_1", "Q4_1"),
    "mixed": ("Q6_K", "Q8_0"),
    "mixed too": ("Q4_K", "Q6_K"),
}
"""Formats of gate and of up."""
CASES = [("numpy", "float32"), *((level, form) for level in LEVELS for form in [*PLAIN, *STORED])]
cases = pytest.mark.parametrize("case", CASES, ids="-".join)


@lru_cache(8)
def weight_of(case: tuple[str, str], inner: int, k: int, seed: int = 0) -> Linear:
    ops = ops_of(case, 2)
    if case[1] in PLAIN:
        rng = np.random.default_rng(seed)
        return ops.pack_linear(rng.standard_normal((2 * inner, k), dtype=np.float32))
    parts = [random_rows(kind, inner, k, seed + i) for i, kind in enumerate(STORED[case[1]])]
    packed = ops.pack_stored(parts, k)
    assert packed is not None
    return packed


def inputs(rows: int, k: int, ops: Kernels, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, k), np.float32).astype(ops.dtype)


def two_ops(case: tuple[str, str], x: Array, weight: Linear) -> Array:
    """The definition."""
    ops, inner = ops_of(case, 1), weight.out_features // 2
    gate_up = np.empty((len(x), 2 * inner), ops.dtype)
    ops.linear(x, weight, gate_up)
    pairs = np.stack(np.split(gate_up, 2, axis=1), axis=-1).reshape(-1, 2)
    plain = ops_of((case[0], "float32" if ops.dtype == np.float32 else "bfloat16"), 1)
    out = np.empty((len(pairs), 1), ops.dtype)
    plain.linear_silu_and_mul(pairs, plain.pack_linear(np.eye(2, dtype=np.float32)), out)
    return out.reshape(len(x), inner)


def one_op(case: tuple[str, str], threads: int, x: Array, weight: Linear) -> Array:
    """Into memory of which it may touch no more than its columns."""
    ops, inner = ops_of(case, threads), weight.out_features // 2
    memory = poisoned((len(x) + 1, inner + 3), ops.dtype)
    out = memory[: len(x), :inner]
    ops.linear_silu_and_mul(x, weight, out)
    assert np.isnan(memory[:, inner:].astype(np.float32)).all()
    assert np.isnan(memory[len(x)].astype(np.float32)).all()
    return out


@cases
@settings(max_examples=10)
@given(
    rows=st.integers(1, 70),
    inner=st.one_of(st.integers(1, 200), st.integers(1, 10).map(lambda panels: 32 * panels)),
    k=st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_one_op_has_the_bits_of_two(
    case: tuple[str, str], rows: int, inner: int, k: int, seed: int
) -> None:
    """R58, R59: any shape, also where gate and up meet inside a panel; and a row is what it is
    alone."""
    if case[1] in STORED:
        k = 256
    if case[1].startswith("mixed"):
        inner = 32 * -(-inner // 32)
    x, weight = inputs(rows, k, ops_of(case, 1), seed), weight_of(case, inner, k, seed)
    want = two_ops(case, x, weight)
    for threads in (1, 2):
        assert bits(one_op(case, threads, x, weight)) == bits(want)
    for row in {0, rows // 2, rows - 1}:
        assert bits(one_op(case, 2, x[row : row + 1], weight)) == bits(want[row : row + 1])


@cases
@pytest.mark.parametrize("rows", [1, 20, 40, 130, 600])
def test_pieces_of_gate_and_up_meet(case: tuple[str, str], rows: int) -> None:
    """R58: so many panels that there are several pieces, the last of them a short one, for one
    thread and for two; several blocks of rows."""
    x, weight = inputs(rows, 256, ops_of(case, 1), rows), weight_of(case, 51 * 32, 256)
    want = bits(two_ops(case, x, weight))
    assert [bits(one_op(case, threads, x, weight)) == want for threads in (1, 2)] == [True, True]


@cases
def test_a_row_that_is_no_number_stays_alone(case: tuple[str, str]) -> None:
    """Law: a fault in one request reaches no row of another."""
    x, weight = inputs(40, 256, ops_of(case, 1), 1), weight_of(case, 320, 256)
    clean = one_op(case, 2, x, weight)
    x[7] = np.nan
    spoilt = one_op(case, 2, x, weight)
    assert np.isnan(spoilt[7].astype(np.float32)).all()
    assert bits(np.delete(spoilt, 7, axis=0)) == bits(np.delete(clean, 7, axis=0))
