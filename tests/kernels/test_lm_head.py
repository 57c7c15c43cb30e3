"""The LM head: rows of which only the argmax is wanted get it, and no logits are written for them.

Everything is held against the same backend's linear(): the logits of a row that wants them have its
bits, and the argmax of any other is that of its bits.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.cpu_kernels import LEVELS, bits, ops_of
from beds.stored_rows import KINDS, random_rows
from octavo.checkpoint import StoredRows
from octavo.kernels.api import Array, Kernels, Linear
from octavo.kernels.arena import NumpyArena

PLAIN = ["bfloat16", "float32", "int8"]
MIXED = {"Q4_K": 64, "Q6_K": 32, "Q8_0": 10**9}
"""Formats of one weight, and how many rows each takes."""
FORMS = [*PLAIN, "Q8_0", "Q4_1", "Q6_K", "mixed"]
CASES = [("numpy", "float32"), *((level, form) for level in LEVELS for form in FORMS)]
cases = pytest.mark.parametrize("case", CASES, ids="-".join)
plain_cases = pytest.mark.parametrize("case", [c for c in CASES if c[1] in PLAIN], ids="-".join)
POISON = 0x7FC0BEEF
"""A NaN that no kernel makes."""


def stored(kind: str, columns: Array, k: int) -> StoredRows:
    """Column i of the head is row columns[i] of a random weight: equal ones are ties."""
    return StoredRows(kind, random_rows(kind, 32, k, 0).rows[columns % 32])


def weight_of(case: tuple[str, str], ops: Kernels, columns: Array, k: int) -> Linear:
    """A head whose column i is one of a few, by columns[i]; k a multiple of 256 where stored."""
    form = case[1]
    if form in PLAIN:
        rows = np.random.default_rng(0).standard_normal((32, k), dtype=np.float32)
        return ops.pack_linear(rows[columns % 32])
    parts, begin = [], 0
    for kind, count in (MIXED if form == "mixed" else {form: 10**9}).items():
        if begin < len(columns):
            parts.append(stored(kind, columns[begin : begin + count], k))
        begin += count
    packed = ops.pack_stored(parts, k)
    assert packed is not None
    return packed


def run_head(
    ops: Kernels, weight: Linear, x: Array, argmax_only: Array
) -> tuple[Array, Array, Array]:
    """(logits of linear, logits of lm_head over POISON, best), each in memory as a step has it."""
    arena, shape = NumpyArena(), (len(x), weight.out_features)
    whole, logits = arena.empty(shape, np.float32), arena.empty(shape, np.float32)
    best = arena.empty((len(x),), np.int32)
    logits.view(np.uint32)[...] = POISON
    best[...] = 7777
    ops.linear(x, weight, whole)
    ops.lm_head(x, weight, argmax_only, logits, best)
    return whole, logits, best


def argmax_of(row: Array) -> int:
    """By hand: the first of the largest, whatever is no number left out; -1: there is none."""
    best, highest = -1, float("-inf")
    for token_id, value in enumerate(row.tolist()):
        if value > highest:
            best, highest = token_id, value
    return best


def check_head(ops: Kernels, weight: Linear, x: Array, argmax_only: Array) -> tuple[Array, Array]:
    """The law; returns (logits of linear, best)."""
    whole, logits, best = run_head(ops, weight, x, argmax_only)
    for row, only in enumerate(argmax_only.tolist()):
        wanted = argmax_of(whole[row]) if only else -1
        assert best[row] == wanted
        if not only:
            assert bits(logits[row]) == bits(whole[row])
        elif wanted >= 0:
            assert (logits[row].view(np.uint32) == POISON).all(), "logits that nobody reads"
        else:
            assert (logits[row] == -np.inf).all()
    return whole, best


def inputs(rows: int, k: int, ops: Kernels, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, k), np.float32).astype(ops.dtype)


@cases
@settings(max_examples=8)
@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 700),
    k=st.integers(1, 100),
    variety=st.integers(1, 32),
    seed=st.integers(0, 99),
)
def test_best_tokens_are_those_of_the_logits(
    case: tuple[str, str], rows: int, n: int, k: int, variety: int, seed: int
) -> None:
    """R72: any shape, any rows that want no logits beside any that do, ties by the dozen, whoever
    computes which piece."""
    rng = np.random.default_rng(seed)
    columns, only = rng.integers(0, variety, n), rng.integers(0, 2, rows).astype(np.int32)
    for threads in (1, 2):
        ops = ops_of(case, threads)
        k = k if case[1] in PLAIN else 256
        check_head(ops, weight_of(case, ops, columns, k), inputs(rows, k, ops, seed), only)


@cases
@pytest.mark.parametrize("rows", [1, 17, 33, 130, 512])
def test_equal_logits_in_several_pieces_give_the_first(case: tuple[str, str], rows: int) -> None:
    """R72: columns that win stand at both ends of the head and in between, so in several pieces of
    the product, which come in any order; logits that are so many that they may be streamed."""
    n, k = (8213, 8) if case[1] in PLAIN else (2069, 256)
    for threads in (1, 2):
        ops = ops_of(case, threads)
        columns = np.arange(n) % 8
        weight, x = weight_of(case, ops, columns, k), inputs(rows, k, ops, 1)
        first_of_each = []
        for flags in (np.ones(rows, np.int32), (np.arange(rows) % 3 > 0).astype(np.int32)):
            whole, best = check_head(ops, weight, x, flags)
            first_of_each += [best[row] for row in np.flatnonzero(flags)]
        if case[1] != "mixed":  # where one column has other bits in each format
            assert max(first_of_each) < 8
            assert (whole[:, -8:].max(axis=1) == whole.max(axis=1)).all(), "no ties at the ends"


@plain_cases
@pytest.mark.parametrize("at", [0, 9, 4000])
def test_numbers_that_are_none_are_passed_over(case: tuple[str, str], at: int) -> None:
    """C37: NaN logits never win; +inf does, the first of them; a row without any logit above -inf
    has no best token, and its logits say so."""
    rng = np.random.default_rng(at)
    columns = rng.standard_normal((8213, 4), dtype=np.float32) * np.float32(1e-3)
    columns[[at, at + 40, 8211]] = np.nan
    columns[[at + 3, at + 5, 8100]] = [3, 3, 3, 3]
    for threads in (1, 2):
        ops = ops_of(case, threads)
        x = np.ones((5, 4), np.float32)
        x[1] = np.nan
        x[2] = 3e38
        x[3] = 0
        weight, only = ops.pack_linear(columns), np.ones(5, np.int32)
        whole, best = check_head(ops, weight, x.astype(ops.dtype), only)
        assert np.isnan(whole[:, at]).all()
        assert best[[0, 1, 3, 4]].tolist() == [at + 3, -1, 1 if at == 0 else 0, at + 3]
        assert np.isposinf(whole[2, [best[2], at + 3]]).all()
        low = -np.abs(columns) - 2
        low[at] = np.nan
        whole, best = check_head(ops, ops.pack_linear(low), x.astype(ops.dtype), only)
        assert np.isneginf(np.delete(whole[2], [at, at + 40, 8211])).all()
        assert [int(best[row]) for row in (1, 2)] == [-1, -1]
        mixed = np.array([1, 0, 1, 0, 1], np.int32)
        check_head(ops, weight, x.astype(ops.dtype), mixed)
        check_head(ops, ops.pack_linear(low), x.astype(ops.dtype), mixed)


@pytest.mark.parametrize("level", LEVELS)
def test_zeros_of_either_sign_are_equal(level: str) -> None:
    """R72: -0 before +0 wins as any other tie does, in its piece and over pieces: products that
    round to nothing."""
    for first in (70, 5000):
        columns = np.full((8213, 4), -1e-25, np.float32)
        columns[first:] = 1e-25
        for threads in (1, 2):
            ops = ops_of((level, "int8"), threads)
            x = np.full((3, 4), 1e-25, np.float32).astype(ops.dtype)
            whole, best = check_head(ops, ops.pack_linear(columns), x, np.ones(3, np.int32))
            assert (whole == 0).all()
            assert np.signbit(whole[:, :first]).all()
            assert not np.signbit(whole[:, first:]).any()
            assert best.tolist() == [0, 0, 0]


@cases
def test_a_row_does_not_depend_on_what_others_want(case: tuple[str, str]) -> None:
    """The law of the op table: alone or among any others, in any place, the same."""
    ops = ops_of(case, 2)
    k = 40 if case[1] in PLAIN else 256
    weight = weight_of(case, ops, np.random.default_rng(3).integers(0, 32, 1111), k)
    x = inputs(48, k, ops, 3)
    together = run_head(ops, weight, x, np.ones(48, np.int32))[2]
    for flags in (np.arange(48) % 2, np.arange(48) == 7, np.arange(48) != 7):
        best = run_head(ops, weight, x, flags.astype(np.int32))[2]
        assert best[flags == 1].tolist() == together[flags == 1].tolist()
        assert (best[flags == 0] == -1).all()
    for row in (0, 7, 47):
        one = np.ones(1, np.int32)
        assert run_head(ops, weight, x[row : row + 1], one)[2][0] == together[row]


def test_every_stored_format_has_a_head() -> None:
    """Whatever a file keeps its output matrix in."""
    for kind in KINDS:
        case = (LEVELS[0], kind)
        ops = ops_of(case, 2)
        weight = weight_of(case, ops, np.arange(97), 256)
        check_head(ops, weight, inputs(5, 256, ops, 0), np.array([1, 0, 1, 1, 0], np.int32))
