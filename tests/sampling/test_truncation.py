"""min_p, top-k and top-p keep exactly the tokens of their definitions, ties included."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.sampler_rows import make_row, sample, sample_one
from octavo.messages import RowFault, SampledToken
from octavo.sampling import truncation
from octavo.sampling.truncation import best_tokens, fixed_point_weights, num_top_p, truncate
from octavo.sampling_params import SamplingParams


def scaled_from(probabilities: list[float]) -> np.ndarray:
    """Logits minus their maximum, as the truncation gets them."""
    logits = np.log(np.array(probabilities))
    return (logits - logits.max()).astype(np.float32)


def kept(probabilities: list[float], **settings: Any) -> list[int]:
    ids = truncate(scaled_from(probabilities), SamplingParams(**settings))
    return list(range(len(probabilities))) if ids is None else ids.tolist()


@pytest.mark.parametrize(
    ("p_max", "threshold"),
    [(0.4, 0.04), (0.9, 0.09), (0.08, 0.008)],
)
def test_min_p_adapts_to_the_best_token(p_max: float, threshold: float) -> None:
    """R76, R77: min_p 0.1 keeps p >= 0.04, 0.09 and 0.008, for p_max 0.4, 0.9 and 0.08."""
    probabilities = [p_max, threshold * 1.001, threshold * 0.999, 1e-6]
    assert kept(probabilities, min_p=0.1) == [0, 1]


@pytest.mark.parametrize("min_p", [1e-6, 0.5, 1.0])
def test_min_p_never_removes_the_best_token(min_p: float) -> None:
    """R78."""
    assert 1 in kept([0.2, 0.5, 0.3], min_p=min_p)
    assert kept([0.25, 0.25, 0.25, 0.25], min_p=min_p) == [0, 1, 2, 3]


def test_min_p_border_is_rounded_to_the_side_of_its_definition() -> None:
    """The floor is the least float32 whose value is at least log(min_p)."""
    for min_p in (0.1, 0.05, 1 / 3, 0.999999, 1e-300):
        floor = truncation.min_p_floor(min_p)
        assert float(floor) >= math.log(min_p)
        assert float(np.nextafter(floor, np.float32(-np.inf))) < math.log(min_p)


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [2]), (2, [2, 4]), (3, [1, 2, 4]), (0, None), (-1, None), (5, None), (9999999, None)],
)
def test_top_k_keeps_the_k_best(top_k: int, expected: list[int] | None) -> None:
    """R80, C34: ties by id; 0, -1 and anything past the vocabulary are no limit."""
    probabilities = [0.1, 0.15, 0.4, 0.15, 0.2]
    assert kept(probabilities, top_k=top_k) == (expected or [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [1]),
        (0.49, [1]),
        (0.5, [1]),  # the sum before the second token is 0.5: not below 0.5
        (0.51, [0, 1]),
        (0.75, [0, 1]),
        (0.76, [0, 1, 2]),
        (0.9, [0, 1, 2, 3]),
        (0.999, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_while_the_sum_before_is_below_p(top_p: float, expected: list[int]) -> None:
    """R81: powers of two, so that every border is exact."""
    assert kept([0.25, 0.5, 0.125, 0.0625, 0.0625], top_p=top_p) == expected


def test_top_p_cuts_equal_tokens_by_id() -> None:
    """R81: four equal tokens; 0.5 is reached by the first two, exactly."""
    assert kept([0.25] * 4, top_p=0.5) == [0, 1]
    assert kept([0.25] * 4, top_p=np.nextafter(0.5, 1).item()) == [0, 1, 2]


def test_min_p_then_top_k_then_top_p() -> None:
    """R79: each works on what the one before left; any other order keeps other tokens."""
    probabilities = [0.4, 0.2, 0.15, 0.1, 0.05, 0.05, 0.03, 0.02]
    # min_p leaves 0.4 to 0.1; top-k 3 of those sum to 0.75; 0.4 + 0.2 are 0.8 of that.
    assert kept(probabilities, min_p=0.25, top_k=3, top_p=0.79) == [0, 1]
    assert kept(probabilities, top_p=0.79) == [0, 1, 2, 3]
    assert kept(probabilities, top_k=3, top_p=0.81) == [0, 1, 2]
    # top-p over what min_p left: 0.4 of 0.85 is 0.47; of the whole it would be 0.4.
    assert kept(probabilities, min_p=0.25, top_p=0.45) == [0]
    assert kept(probabilities, top_p=0.45) == [0, 1]


def test_fixed_point_sums_do_not_depend_on_order() -> None:
    """The reason for integers: float sums do depend on it."""
    rng = np.random.default_rng(5)
    scaled = -np.abs(rng.standard_normal(50_000) * 4).astype(np.float32)
    scaled[7] = 0
    weights = fixed_point_weights(scaled)
    assert weights.dtype == np.int64
    assert weights.max() == 2**40
    assert (fixed_point_weights(scaled[::-1].copy())[::-1] == weights).all()
    exact = np.exp(scaled.astype(np.float64)) * 2.0**40
    assert np.abs(weights - exact).max() <= 0.5


grid_values = st.lists(
    st.one_of(st.integers(-40, 0), st.just(-1000)), min_size=9, max_size=120
).map(lambda xs: (np.array([*xs, 0]) / 8).astype(np.float32))


@given(grid_values, st.integers(1, 130))
def test_best_tokens_equal_a_full_sort(values: np.ndarray, num: int) -> None:
    """Looking at few columns only narrows the search: the kept ids are those of a full sort."""
    order = sorted(range(values.size), key=lambda i: (-values[i], i))
    expected = sorted(order[:num])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_SMALL", 8)
        patch.setattr(truncation, "_COLUMN", 3)
        assert best_tokens(values, num).tolist() == expected
    assert best_tokens(values, num).tolist() == expected


@given(grid_values, st.floats(0.01, 0.9999))
def test_top_p_over_a_head_equals_top_p_over_everything(values: np.ndarray, top_p: float) -> None:
    """The head is used only when it holds the border."""
    whole = num_top_p(values, top_p)
    weights = [int(w) for w in sorted(fixed_point_weights(values), reverse=True)]
    numerator, denominator = top_p.as_integer_ratio()
    expected, before = 0, 0
    while before * denominator < numerator * sum(weights):
        before += weights[expected]
        expected += 1
    assert whole == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_SMALL", 8)
        patch.setattr(truncation, "_COLUMN", 3)
        patch.setattr(truncation, "_TOP_P_HEAD", 4)
        assert num_top_p(values, top_p) == whole


@pytest.mark.parametrize("size", [40_000, 49_152])
def test_real_vocabularies_are_narrowed_exactly(size: int) -> None:
    """The same at a size where the narrowing is on by itself, with many ties."""
    rng = np.random.default_rng(6)
    for spread in (0.0, 2.0, 12.0):
        values = np.round(rng.standard_normal(size) * spread * 4).astype(np.float32) / 4
        values -= values.max()
        order = np.argsort(-values, kind="stable")
        for num in (1, 50, 300, 5000):
            np.testing.assert_array_equal(best_tokens(values, num), np.sort(order[:num]))
        weights = fixed_point_weights(values[order])
        before = np.cumsum(weights) - weights
        for top_p in (0.1, 0.9, 0.999):
            limit = math.ceil(Fraction(top_p) * int(weights.sum()))
            assert num_top_p(values, top_p) == np.count_nonzero(before < limit)


def test_barred_tokens_never_come_back() -> None:
    """Fewer possible tokens than top_k, and top_p near 1: -inf stays impossible."""
    logits = np.full(40, -np.inf, np.float32)
    logits[[5, 30]] = 1.0, 0.5
    for settings in ({"top_k": 10}, {"top_p": 0.99999}, {"min_p": 1e-9}, {}):
        rows = [make_row(SamplingParams(**settings), row=i, seed=i) for i in range(60)]
        results = sample(np.tile(logits, (60, 1)), rows)
        assert {r.token_id for r in results if isinstance(r, SampledToken)} == {5, 30}


def test_rows_without_top_p_skip_the_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """C112: only the row with top_p runs into a sort that raises."""

    def fail(*_: Any) -> int:
        raise RuntimeError("sorted")

    monkeypatch.setattr(truncation, "num_top_p", fail)
    logits = np.zeros(16)
    for settings in ({}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 0, "top_p": 0.5}):
        assert isinstance(sample_one(logits, make_row(SamplingParams(**settings))), SampledToken)
    assert isinstance(sample_one(logits, make_row(SamplingParams(top_p=0.9))), RowFault)
