"""Drawn tokens follow the exact probabilities, and equal a float64 oracle's choices (R82)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.chi_square import chi_square, critical_value
from beds.reference_sampler import exact_distribution, exact_mixture, reference_sample
from beds.sampler_rows import make_row, sample_one
from octavo.kernels.cpu import make_kernels
from octavo.messages import RowFault, SampledToken
from octavo.sampling.native import make_sampler
from octavo.sampling_params import SamplingParams

NUM_DRAWS = 8000
# Each outcome is expected at least 5 times in NUM_DRAWS, as the chi-square test wants.
LOGITS = [2.0, 1.5, 1.5, 0.7, 0.0, -0.3, -1.0, 1.0, 0.2, -1.2, 0.9, 1.9]
COMBINATIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.2, "top_p": 0.95},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 6, "top_p": 0.85},
]


# One of the truncations each, by name: the settings, and the same one step off.
TRUNCATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_k": ({"top_k": 7}, {"top_k": 8}),
    "top_p": ({"top_p": 0.85}, {"top_p": 0.95}),
    "min_p": ({"min_p": 0.12}, {"min_p": 0.3}),
    "typical": ({"typical": {"p": 0.9}}, {"typical": {"p": 0.98}}),
    "xtc": (
        {"xtc": {"probability": 0.4, "threshold": 0.15}},
        {"xtc": {"probability": 0.7, "threshold": 0.15}},
    ),
    "penalties": (
        {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2,
         "dry": {"allowed_length": 1}, "logit_bias": {4: 0.8}},
        {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2,
         "dry": {"allowed_length": 1}, "logit_bias": {4: 2.0}},
    ),
}  # fmt: skip
PLUG_INS = ("dry", "typical", "xtc")
HISTORY: dict[str, Any] = {"prompt": [0, 7, 3], "output": [7, 10, 7]}
SUBSETS = [
    names for size in range(7) for names in itertools.combinations(TRUNCATIONS, size)
]  # all 64


def params_of(names: Sequence[str], off: str = "") -> SamplingParams:
    """Those truncations together; `off` is the one that is a step off."""
    merged: dict[str, Any] = {"temperature": 0.8 + 0.4 * (len(names) % 2)}
    for name in names:
        merged |= TRUNCATIONS[name][name == off]
    plug_ins = {name: merged.pop(name) for name in PLUG_INS if name in merged}
    return SamplingParams(**merged, logits_processors=plug_ins)


def draw_counts(params: SamplingParams, num: int) -> np.ndarray:
    """counts [V] over `num` seeds, by the kernels that serve."""
    logits = np.tile(np.array(LOGITS, np.float32), (num, 1))
    rows = [make_row(params, row=i, seed=5000 + i, **HISTORY) for i in range(num)]
    results = make_sampler(len(LOGITS), make_kernels(threads=1).sampling).sample(logits, rows)
    return np.bincount(
        [x.token_id for x in results if isinstance(x, SampledToken)], minlength=len(LOGITS)
    )


def expected_statistic(truth: np.ndarray, others: np.ndarray, num: int) -> float:
    """Chi-square against `others` that `num` draws from `truth` come to, sampling noise apart."""
    possible = others > 0
    if (truth[~possible] > 0).any():
        return np.inf
    return float(num * ((truth - others)[possible] ** 2 / others[possible]).sum())


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_draws_follow_the_exact_probabilities(names: tuple[str, ...]) -> None:
    """R71, R74, R76, R80-R82: every combination of truncations, plug-ins and penalties included:
    chi-square of 2,000 draws over consecutive seeds, at p = 1e-4, and the very tokens that stay.

    Power: at the same p, the draws are told from those of which one in eight went to the least
    likely token instead, and from those with any one of the settings a step off, wherever that
    is expected to raise the statistic by 85 (3 standard deviations above the critical value).
    """
    params, num = params_of(names), 2000
    counts = draw_counts(params, num)
    truth = np.array(exact_mixture(LOGITS, params, **HISTORY))
    assert counts.sum() == num

    def told_from(others: np.ndarray) -> bool:
        if ((counts > 0) & (others == 0)).any():
            return True
        critical = critical_value(max(1, np.count_nonzero(others) - 1), 1e-4)
        return chi_square(counts, others) > critical

    assert [n > 0 for n in counts] == [p > 0 for p in truth]
    assert not told_from(truth)
    shifted = 0.875 * truth
    shifted[np.where(truth > 0, truth, 1).argmin()] += 0.125
    assert expected_statistic(truth, shifted, num) > 85
    assert told_from(shifted)
    for name in names:
        others = np.array(exact_mixture(LOGITS, params_of(names, off=name), **HISTORY))
        if expected_statistic(truth, others, num) > 85:
            assert told_from(others), name


def test_each_setting_is_told_from_its_neighbour_somewhere() -> None:
    """The power above is not empty: alone, each one a step off is expected to show."""
    for name in TRUNCATIONS:
        off = exact_mixture(LOGITS, params_of([name], off=name), **HISTORY)
        truth = exact_mixture(LOGITS, params_of([name]), **HISTORY)
        assert expected_statistic(np.array(truth), np.array(off), 2000) > 85, name


def test_draws_along_one_answer_follow_the_probabilities_too() -> None:
    """R82, R84: one seed, 8,000 positions of one growing request."""
    params = SamplingParams()
    state = make_row(params, seed=42)
    counts = np.zeros(len(LOGITS))
    for _ in range(NUM_DRAWS):
        result = sample_one(LOGITS, state)
        assert isinstance(result, SampledToken)
        counts[result.token_id] += 1
        state.append(result.token_id)
    critical = critical_value(len(LOGITS) - 1, 1e-4)
    assert chi_square(counts, exact_distribution(LOGITS, params)) < critical


def maybe(values: st.SearchStrategy[Any], default: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(default), values)


token_ids = st.integers(0, 47)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.1, 3.0)),
    top_p=maybe(st.floats(0.05, 0.999), 1.0),
    top_k=maybe(st.integers(1, 60), 0),
    min_p=maybe(st.floats(0.001, 1.0), 0.0),
    repetition_penalty=maybe(st.floats(0.5, 2.0), 1.0),
    presence_penalty=maybe(st.floats(-2, 2), 0.0),
    frequency_penalty=maybe(st.floats(-2, 2), 0.0),
    logit_bias=maybe(st.dictionaries(token_ids, st.floats(-10, 10), max_size=4), ()),
    allowed_token_ids=maybe(st.lists(token_ids, min_size=1, max_size=12), None),
    stop_token_ids=st.lists(token_ids, max_size=2),
    min_tokens=st.integers(0, 3),
    logprobs=maybe(st.integers(0, 20), None),
)


@given(
    sampling_params,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.lists(token_ids, min_size=1, max_size=6),
    st.lists(token_ids, max_size=6),
)
def test_choices_equal_the_float64_reference(
    params: SamplingParams, logits_seed: int, seed: int, prompt: list[int], output: list[int]
) -> None:
    """Steps 0 to 9 with everything on at once: the oracle's token, wherever no decision hangs by
    less than the oracle's MARGIN."""
    logits = (np.random.default_rng(logits_seed).standard_normal(48) * 4).astype(np.float32)
    history: dict[str, Any] = {"seed": seed, "prompt": prompt, "output": output, "eos": [2, 7]}
    expected = reference_sample(logits.tolist(), params, **history)
    result = sample_one(logits, make_row(params, **history))
    if expected.token_id is None:
        assert isinstance(result, RowFault)
    elif expected.certain:
        assert isinstance(result, SampledToken)
        assert result.token_id == expected.token_id


def test_the_margin_excuses_almost_nothing() -> None:
    """Of 1,500 draws over a peaked distribution at most 3 % are within the margin; the others
    all agree."""
    rng = np.random.default_rng(11)
    certain = 0
    for seed in range(1500):
        params = SamplingParams(**COMBINATIONS[seed % len(COMBINATIONS)])
        logits = (rng.standard_normal(48) * 3).astype(np.float32)
        expected = reference_sample(logits.tolist(), params, seed=seed, prompt=[1])
        result = sample_one(logits, make_row(params, seed=seed))
        assert isinstance(result, SampledToken)
        certain += expected.certain
        assert result.token_id == expected.token_id or not expected.certain
    assert certain >= 0.97 * 1500
