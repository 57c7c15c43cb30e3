"""The order of the sampler's steps, and what happens to a row that goes wrong."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest

from beds.sampler_rows import make_row, sample, sample_many, sample_one, sample_token
from octavo.messages import RowFault, SampledToken
from octavo.sampling import sampler as sampler_module
from octavo.sampling.noise import random_bits
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import RowState
from octavo.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
NAN = math.nan
INF = math.inf


def test_the_order_of_steps_is_written_down() -> None:
    """The docstring numbers the steps; that they happen so is what the other tests prove."""
    doc = inspect.getdoc(Sampler) or ""
    positions = [doc.index(f"\n{i}. ") for i in range(10)]
    assert positions == sorted(positions)


def test_greedy_and_random_rows_mix() -> None:
    """R72, R83: each row is chosen by its own temperature; equal logits: greedy takes id 0."""
    rows = [make_row(GREEDY if i % 2 else SamplingParams(), row=i, seed=i) for i in range(40)]
    tokens = [r.token_id for r in sample(np.zeros((40, 50)), rows) if isinstance(r, SampledToken)]
    assert tokens[1::2] == [0] * 20
    assert len(set(tokens[0::2])) > 10


def test_greedy_rows_end_before_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """R73, R75: no division, no truncation, no noise; top_k and the like do not matter."""

    def fail(*_: Any) -> None:
        raise AssertionError("a greedy row went on")

    for name in ("_scale", "_draw", "_draw_from_all"):
        monkeypatch.setattr(Sampler, name, fail)
    logits = np.array([0.5, 3.0, 3.0, -1.0])
    for settings in ({}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.5}, {"seed": 4}):
        assert sample_token(logits, SamplingParams(temperature=1e-6, **settings)) == 1
    assert isinstance(sample_one(logits, make_row(SamplingParams())), RowFault)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9999999}], ids=["all", "truncated"])
def test_entropy_grows_with_temperature(settings: dict[str, float]) -> None:
    """R74: over 4,000 draws each; the steps are many standard errors (0.02) apart."""
    logits = np.linspace(0, 4, 16)
    entropies = []
    for temperature in (0.1, 0.5, 1.0, 2.0, 100.0):
        p = sample_many(logits, SamplingParams(temperature=temperature, **settings), 4000) / 4000
        entropies.append(-sum(x * math.log(x) for x in p if x > 0))
    assert all(b - a > 0.1 for a, b in itertools.pairwise(entropies)), entropies
    assert entropies[-1] == pytest.approx(math.log(16), abs=0.02)


def test_tiny_and_huge_values_do_not_overflow() -> None:
    """R74: the shift by the maximum comes before the division."""
    for temperature in (1e-5, 100):
        params = SamplingParams(temperature=temperature, seed=1)
        assert sample_token([-3e38, 3e38, 3.0], params) == 1
        assert sample_token([1e30, 9e30, -INF, 8e30], params) == 1


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    """C35, R82: the draw depends on seed and position only."""
    logits = np.zeros(1000)
    params = SamplingParams()

    def answer(seed: int) -> list[int]:
        state = make_row(params, seed=seed, prompt=[4, 5])
        tokens = []
        for _ in range(20):
            result = sample_one(logits, state)
            assert isinstance(result, SampledToken)
            state.append(result.token_id)  # R84
            tokens.append(result.token_id)
        return tokens

    for seed in (0, 1, 2**63, 2**64 - 1):
        assert answer(seed) == answer(seed)
        assert len(set(answer(seed))) > 15
    assert answer(0) != answer(1)


def test_a_resumed_row_goes_on_as_if_nothing_had_happened() -> None:
    """Noise has no state to lose: after 7 tokens a row is rebuilt and goes on the same."""
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((14, 300)).astype(np.float32)
    params = SamplingParams(temperature=0.9, frequency_penalty=1.0, repetition_penalty=1.2)

    def run(state: RowState, first: int) -> list[int]:
        tokens = []
        for step in logits[first:]:
            result = sample_one(step, state)
            assert isinstance(result, SampledToken)
            state.append(result.token_id)
            tokens.append(result.token_id)
        return tokens

    whole = run(make_row(params, seed=3, prompt=[1, 2]), 0)
    resumed = run(make_row(params, seed=3, prompt=[1, 2], output=whole[:7], row=5), 7)
    assert resumed == whole[7:]


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_the_first_look_in_float32_never_changes_the_draw(scale: float, temperature: float) -> None:
    """R82: _draw_from_all narrows with a bound; the exact ratio of every token agrees."""
    rng = np.random.default_rng(9)
    sampler = Sampler(3001)
    for seed in range(40):
        logits = (rng.standard_normal(3001) * scale).astype(np.float32)
        logits[rng.integers(0, 3001, 500)] = -np.inf
        best = int(logits.argmax())
        state = make_row(SamplingParams(temperature=temperature), seed=seed)
        with np.errstate(all="ignore"):
            scaled, best = sampler._scale(logits, best, state)
            ids = np.arange(3001)
            bits = random_bits(seed, state.position, ids)
            whole = sampler_module._argmax_of_ratio(scaled, ids, bits)
            assert sampler._draw_from_all(scaled, best, state) == whole


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("bad", [[NAN] * 5, [-INF] * 5, [NAN, -INF, NAN, NAN, -INF]])
def test_a_row_without_numbers_fails_alone(params: SamplingParams, bad: list[float]) -> None:
    """C37: never a uniform draw; A and C are unchanged."""
    good = [0.0, 1.0, 2.0, 3.0, 2.5]
    rows = [make_row(params, row=row, seed=row) for row in (3, 1, 2)]
    first, middle, last = sample([good, bad, good], rows)
    assert isinstance(middle, RowFault)
    assert middle.row == 1
    assert "NaN" in middle.message
    assert [first, last] == [sample_one(good, rows[0]), sample_one(good, rows[2])]
    assert isinstance(first, SampledToken)
    assert isinstance(last, SampledToken)


def test_one_nan_is_an_impossible_token() -> None:
    """C37: in a finite row; the rest is drawn as if it were -inf."""
    assert sample_token([1.0, NAN, 2.0, 0.0], GREEDY) == 2
    counts = sample_many([1.0, NAN, 2.0, 0.0], SamplingParams(temperature=5), 400)
    assert counts[1] == 0
    np.testing.assert_array_equal(
        counts, sample_many([1.0, -INF, 2.0, 0.0], SamplingParams(temperature=5), 400)
    )


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.2}])
def test_plus_infinity_is_chosen(settings: dict[str, Any]) -> None:
    """C37: whatever the noise says; also beside a NaN; unless a constraint bars it."""
    for seed in range(30):
        params = SamplingParams(temperature=2.0, **settings)
        assert sample_token([9.0, 1.0, INF, NAN, 2.0], params, seed=seed) == 2
    assert sample_token([9.0, 1.0, INF], GREEDY) == 2
    barred = SamplingParams(allowed_token_ids=[0, 1], temperature=0.1, **settings)
    assert sample_token([9.0, 1.0, INF], barred) == 0


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError(), KeyError("x")])
def test_an_exception_in_one_row_is_that_rows_fault(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C106: raised inside the penalties of row 1 of 4; 0, 2 and 3 give their solo results."""
    rng = np.random.default_rng(10)
    logits = rng.standard_normal((4, 100)).astype(np.float32)
    rows = [make_row(SamplingParams(logprobs=2), row=i, seed=i) for i in range(4)]
    alone = [sample_one(logits[i], rows[i]) for i in range(4)]
    apply_penalties = sampler_module.apply_penalties

    def break_row_1(row_logits: np.ndarray, state: RowState) -> bool:
        if state.row == 1:
            row_logits.fill(NAN)
            raise error
        return apply_penalties(row_logits, state)

    monkeypatch.setattr(sampler_module, "apply_penalties", break_row_1)
    results = sample(logits, rows)
    fault = results[1]
    assert isinstance(fault, RowFault)
    assert fault.row == 1
    assert type(error).__name__ in fault.message
    assert [results[i] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]
    assert "request 1" in caplog.text


def test_logits_of_the_wrong_form_are_our_own_bug() -> None:
    sampler = Sampler(8)
    rows = [make_row(GREEDY)]
    wrong = [
        np.zeros((1, 9), np.float32),
        np.zeros((2, 8), np.float32),
        np.zeros((1, 8)),
        np.zeros((1, 16), np.float32)[:, ::2],
    ]
    for logits in wrong:
        with pytest.raises(AssertionError):
            sampler.sample(logits, rows)
    assert sampler.sample(np.zeros((0, 8), np.float32), []) == []
