"""Raw log probabilities: of what the model said, not of what the sampler made of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from beds.reference_sampler import log_softmax
from beds.sampler_rows import make_row, sample, sample_one
from octavo.messages import SampledToken, TokenLogprobs
from octavo.sampling import sampler as sampler_module
from octavo.sampling.sampler import Sampler
from octavo.sampling_params import SamplingParams


def logprobs_of(logits: Any, params: SamplingParams, **row: Any) -> TokenLogprobs:
    result = sample_one(logits, make_row(params, **row))
    assert isinstance(result, SampledToken)
    assert result.logprobs is not None
    return result.logprobs


def test_worked_example_of_probabilities() -> None:
    """R68: -0.01523 is 98.5 %, -4.32185 is 1.3 %."""
    wanted = [-0.01523, -4.32185]
    rest = math.log(1 - sum(math.exp(x) for x in wanted))
    logits = [x + 11.0 for x in (rest, *wanted)]
    logprobs = logprobs_of(logits, SamplingParams(temperature=0, logprobs=3))
    assert logprobs.logprob == pytest.approx(-0.01523, abs=1e-6)
    assert [i for i, _ in logprobs.top] == [1, 2, 0]
    assert [f"{100 * math.exp(x):.1f}" for _, x in logprobs.top] == ["98.5", "1.3", "0.2"]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.3},
        {"top_k": 1},
        {"min_p": 0.9, "top_p": 0.1},
        {"allowed_token_ids": [3]},
        {"logit_bias": {3: 90.0}},
        {"repetition_penalty": 50.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"min_tokens": 9, "stop_token_ids": [0, 1, 2]},
    ],
)
def test_nothing_that_the_sampler_does_moves_raw_logprobs(settings: dict[str, Any]) -> None:
    """R67, C28 (raw): against log_softmax in float64."""
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal(200) * 4).astype(np.float32)
    expected = log_softmax(logits.tolist())
    result = sample_one(
        logits, make_row(SamplingParams(**settings, logprobs=20), prompt=[5, 6], output=[7, 8, 8])
    )
    assert isinstance(result, SampledToken)
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(expected[result.token_id], abs=1e-9)
    best = sorted(range(200), key=lambda i: (-logits[i], i))
    assert [i for i, _ in result.logprobs.top] == best[:20]
    assert [x for _, x in result.logprobs.top] == pytest.approx([expected[i] for i in best[:20]])
    assert result.logprobs.rank == 1 + best.index(result.token_id)


@pytest.mark.parametrize("size", [31, 50_001])
def test_the_chosen_token_has_the_bits_of_its_entry_in_top(size: int) -> None:
    """A client compares them with ==, to find out whether the choice was the greedy one."""
    rng = np.random.default_rng(3)
    in_top = 0
    for seed in range(40):
        logits = (rng.standard_normal(size) * 6).astype(np.float32)
        result = sample_one(logits, make_row(SamplingParams(logprobs=20, top_k=25), seed=seed))
        assert isinstance(result, SampledToken)
        assert result.logprobs is not None
        top = dict(result.logprobs.top)
        assert len(top) == 20
        if result.token_id in top:
            in_top += 1
            assert top[result.token_id].hex() == result.logprobs.logprob.hex()
        assert (result.logprobs.rank <= 20) == (result.token_id in top)
    assert in_top > 20


def test_equal_values_rank_by_id() -> None:
    logits = [0.0, 2.0, 1.0, 2.0, 1.0]
    params = SamplingParams(temperature=0, logprobs=4, logit_bias={4: 50.0})
    logprobs = logprobs_of(logits, params)
    assert [i for i, _ in logprobs.top] == [1, 3, 2, 4]
    assert logprobs.rank == 4
    many = np.random.default_rng(13).integers(0, 4, 400).astype(np.float32)
    best = sorted(range(400), key=lambda i: (-many[i], i))
    for size in (17, 30, 400):  # short and long lists sort by different means
        order = [i for i in best if i < size]
        logprobs = logprobs_of(many[:size], SamplingParams(logprobs=20, seed=1))
        assert [i for i, _ in logprobs.top] == order[:20]


def test_barred_and_infinite_logits_have_floats_not_nan() -> None:
    """R67, C37: -inf stays -inf; +inf is certainty."""
    params = SamplingParams(temperature=0, logprobs=3)
    impossible = logprobs_of([1.0, -math.inf, math.nan], params)
    assert impossible.top == ((0, 0.0), (1, -math.inf), (2, -math.inf))
    certain = logprobs_of([1.0, 2.0, math.inf], params)
    assert (certain.logprob, certain.rank) == (0.0, 1)
    assert certain.top == ((2, 0.0), (0, -math.inf), (1, -math.inf))


def test_one_setting_does_not_touch_the_neighbours() -> None:
    """C29: 3 alternatives, none, 0, 20, in every order, equal their solo runs."""
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((4, 64)) * 3).astype(np.float32)
    rows = [
        make_row(SamplingParams(logprobs=n, temperature=t), row=i, seed=i)
        for i, (n, t) in enumerate([(3, 1.0), (None, 1.0), (0, 0.0), (20, 0.5)])
    ]
    alone = [sample_one(logits[i], rows[i]) for i in range(4)]
    for order in itertools.permutations(range(4)):
        together = sample(logits[list(order)], [rows[i] for i in order])
        assert together == [alone[i] for i in order]
    for result, num_top in zip(alone, (3, None, 0, 20), strict=True):
        assert isinstance(result, SampledToken)
        if num_top is None:
            assert result.logprobs is None
        else:
            assert result.logprobs is not None
            assert len(result.logprobs.top) == num_top
            assert all(math.isfinite(x) for _, x in result.logprobs.top)


def test_rows_without_logprobs_skip_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """C112: only the row that asks runs into a snapshot that raises."""
    monkeypatch.setattr(sampler_module, "RowLogprobs", None)
    rows = [make_row(SamplingParams()), make_row(SamplingParams(logprobs=0), row=1)]
    plain, asking = sample(np.zeros((2, 8)), rows)
    assert isinstance(plain, SampledToken)
    assert not isinstance(asking, SampledToken)


def test_more_alternatives_than_tokens_gives_all_of_them() -> None:
    logprobs = logprobs_of([0.0, 1.0, 2.0], SamplingParams(temperature=0, logprobs=20))
    assert [i for i, _ in logprobs.top] == [2, 1, 0]


def test_processed_logprobs_are_of_what_is_sampled_from() -> None:
    """C28: the temperature divides logits before the softmax, never log probabilities after it."""
    params = SamplingParams(temperature=0.5, logprobs=4, logprobs_mode="processed")
    found = logprobs_of([3.0, 2.0, 1.0, 0.0], params)
    values = [x for _, x in found.top]
    assert values == pytest.approx([-0.1451, -2.1451, -4.1451, -6.1451], abs=1e-4)
    assert sum(map(math.exp, values)) == pytest.approx(1)


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}])
def test_processed_logprobs_of_truncated_tokens_are_minus_infinity(truncation: Any) -> None:
    """C28: the one token kept has probability 1."""
    params = SamplingParams(logprobs=3, logprobs_mode="processed", **truncation)
    found = logprobs_of([3.0, 2.0, 1.0], params)
    assert found.top == ((0, 0.0), (1, -math.inf), (2, -math.inf))
    assert found.logprob == 0.0


def test_processed_logprobs_of_a_greedy_row_see_constraints_and_penalties() -> None:
    """C28, R73: a greedy row has no temperature; what is barred is impossible."""
    params = SamplingParams(
        temperature=0, logprobs=3, logprobs_mode="processed", logit_bias=((2, 4.0),),
        bad_words_token_ids=((0,),),
    )  # fmt: skip
    found = logprobs_of([3.0, 2.0, 1.0], params)
    assert [i for i, _ in found.top] == [2, 1, 0]
    assert [x for _, x in found.top] == pytest.approx(
        [-math.log1p(math.exp(-3)), -3.0486, -math.inf], abs=1e-4
    )
    raw = logprobs_of([3.0, 2.0, 1.0], replace(params, logprobs_mode="raw"))
    assert [i for i, _ in raw.top] == [0, 1, 2]


def test_named_ids_have_the_bits_of_their_place_among_the_best() -> None:
    """C29: asked for by id or by rank, a token's log probability is the same bits."""
    logits = np.random.default_rng(5).standard_normal(300) * 3
    params = SamplingParams(temperature=0, logprobs=20, logprob_token_ids=[7, 4, 299, 7])
    found = logprobs_of(logits, params)
    assert [i for i, _ in found.named] == [7, 4, 299, 7]
    alone = logprobs_of(
        logits, SamplingParams(temperature=0, logprob_token_ids=[i for i, _ in found.top])
    )
    assert alone.named == found.top
    assert alone.top == ()
    assert (alone.logprob, alone.rank) == (found.logprob, found.rank)


def test_a_prompt_token_is_scored_as_a_sampled_one_is() -> None:
    """R67, C44: the same logits give the same bits, wherever the token came from."""
    logits = (np.random.default_rng(6).standard_normal(4100) * 3).astype(np.float32)
    sampled = logprobs_of(logits, SamplingParams(temperature=0, logprobs=5))
    best = sampled.top[0][0]
    assert Sampler(4100).score(logits[None].copy(), [best], [5]) == [sampled]
    assert Sampler(4).score(np.full((1, 4), math.nan, np.float32), [0], [1]) == [None]
