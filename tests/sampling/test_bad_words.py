"""bad_words: what the output may not complete, one token or several."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.reference_sampler import processed_logits
from beds.sampler_rows import make_row, sample_token
from octavo.errors import RequestError
from octavo.sampling.bad_words import BadWords
from octavo.sampling.constraints import apply_constraints
from octavo.sampling_params import SamplingParams

ids = st.integers(0, 3)
sequences = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=6)


@given(sequences=sequences, start=st.lists(ids, max_size=5), more=st.lists(ids, max_size=5))
def test_what_is_barred_is_what_would_complete_a_sequence(
    sequences: list[tuple[int, ...]], start: list[int], more: list[int]
) -> None:
    """C40: after every token, also for a request that resumes with some output."""
    words, output = BadWords(sequences, start), list(start)
    for token_id in [*more, -1]:
        wanted = {
            ids[-1]
            for ids in sequences
            if len(ids) - 1 <= len(output) and (*output, ids[-1])[-len(ids) :] == ids
        }
        assert set(words.barred_ids().tolist()) == wanted
        if token_id >= 0:
            words.append(token_id)
            output.append(token_id)


def test_a_sequence_is_barred_at_its_last_token_only() -> None:
    """C40: "at the": "at" stays allowed, "the" after it does not; the prompt does not count."""
    logits = [0.0, 5.0, 9.0, 1.0]
    params = SamplingParams(temperature=0, bad_words_token_ids=((3, 2),))
    assert sample_token(logits, params) == 2
    assert sample_token(logits, params, output=[3]) == 1
    assert sample_token(logits, params, output=[3, 0]) == 2
    assert sample_token(logits, params, prompt=[3]) == 2


@given(sequences=sequences, output=st.lists(ids, max_size=6), bias=st.floats(1, 50))
def test_a_bias_does_not_bring_a_bad_word_back(
    sequences: list[tuple[int, ...]], output: list[int], bias: float
) -> None:
    """R69: the block-list comes before the biases, and what it bars stays barred."""
    params = SamplingParams(bad_words_token_ids=tuple(sequences), logit_bias=((1, bias),))
    logits = np.zeros(4, np.float32)
    apply_constraints(logits, make_row(params, output=output))
    wanted = processed_logits([0.0] * 4, params, output=output)
    assert logits.tolist() == np.array(wanted, np.float32).tolist()


def test_ids_past_the_vocabulary_bar_nothing() -> None:
    params = SamplingParams(temperature=0, bad_words_token_ids=((9,), (1, 9)))
    assert sample_token([0.0, 1.0], params, output=[1]) == 1


@pytest.mark.parametrize("words", [[""], [" "], [1], "the", ["a"] * 257])
def test_bad_words_is_a_short_list_of_words(words: object) -> None:
    with pytest.raises(RequestError, match="bad_words"):
        SamplingParams(bad_words=words)  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence", [(), (-1,), (1.0,), (1,) * 65])
def test_sequences_are_short_tuples_of_ids(sequence: tuple[object, ...]) -> None:
    with pytest.raises(RequestError, match="bad_words_token_ids"):
        SamplingParams(bad_words_token_ids=(sequence,))  # type: ignore[arg-type]


def test_all_barred_is_a_fault_not_token_0() -> None:
    """R69, C106: an empty candidate set is an error."""
    params = SamplingParams(temperature=0, bad_words_token_ids=((0,), (1,)))
    with pytest.raises(AssertionError, match="no token is left"):
        sample_token([math.inf, 1.0], params)
