"""Drawn tokens follow the exact probabilities, and equal a float64 oracle's choices (R82)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.chi_square import chi_square, critical_value
from beds.reference_sampler import exact_distribution, reference_sample
from beds.sampler_rows import make_row, sample_many, sample_one
from octavo.messages import RowFault, SampledToken
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


@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
def test_draws_follow_the_exact_probabilities(settings: dict[str, Any]) -> None:
    """R74, R76, R80-R82: chi-square of 8,000 draws over consecutive seeds, at p = 1e-4.

    Power: at the same p, the draws are told from those at a temperature 25 % off.
    """
    params = SamplingParams(**settings)
    counts = sample_many(LOGITS, params, NUM_DRAWS, first_seed=1000)
    probabilities = exact_distribution(LOGITS, params)
    assert [n > 0 for n in counts] == [p > 0 for p in probabilities]
    critical = critical_value(np.count_nonzero(probabilities) - 1, 1e-4)
    assert chi_square(counts, probabilities) < critical
    flatter = np.array(probabilities) ** (1 / 1.25)
    assert chi_square(counts, flatter / flatter.sum()) > critical


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
