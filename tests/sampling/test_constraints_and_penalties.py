"""What may be sampled, and what was said already."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from beds.sampler_rows import make_row, sample, sample_one, sample_token
from beds.step_count import count_steps, memory_kept
from octavo.messages import RowFault, SampledToken
from octavo.sampling.constraints import apply_constraints
from octavo.sampling.penalties import apply_penalties
from octavo.sampling_params import SamplingParams

INF = math.inf
V = 32


@pytest.mark.parametrize(("logit", "penalised"), [(1.0, 0.5), (-1.0, -2.0)])
def test_repetition_counts_prompt_and_output_once_each(logit: float, penalised: float) -> None:
    """R71, C31: prompt [3, 3, 5], penalty 2, before any output."""
    logits = np.full(V, logit, np.float32)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    apply_penalties(logits, make_row(params, prompt=[3, 3, 5]))
    expected = np.full(V, logit, np.float32)
    expected[[3, 5]] = penalised
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [({"presence_penalty": 1.0}, 0.0), ({"frequency_penalty": 0.5}, 0.0)],
    ids=["presence", "frequency"],
)
def test_presence_and_frequency_count_the_output_only(
    penalties: dict[str, float], expected: float
) -> None:
    """C31: after output 7, 7 presence 1 takes 1, frequency 0.5 takes 2 x 0.5; prompt ids stay."""
    logits = np.ones(V, np.float32)
    apply_penalties(logits, make_row(SamplingParams(**penalties), prompt=[3, 3, 5], output=[7, 7]))
    assert logits[7] == expected
    assert logits[[3, 5]].tolist() == [1.0, 1.0]
    assert np.count_nonzero(logits != 1) == 1


def test_frequency_grows_with_each_occurrence_and_presence_does_not() -> None:
    """C31."""
    for output, frequency, presence in (([7], 0.5, 0.0), ([7] * 3, -0.5, 0.0)):
        logits = np.ones(V, np.float32)
        apply_penalties(logits, make_row(SamplingParams(frequency_penalty=0.5), output=output))
        assert logits[7] == frequency
        logits = np.ones(V, np.float32)
        apply_penalties(logits, make_row(SamplingParams(presence_penalty=1.0), output=output))
        assert logits[7] == presence


@pytest.mark.parametrize("preempted", [False, True])
def test_the_newest_token_is_penalised_in_the_very_next_step(preempted: bool) -> None:
    """C32: a model that always prefers its last token never repeats it, also when each step
    resumes from scratch, as after a preemption."""
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    state = make_row(params, prompt=[4])
    output: list[int] = []
    for _ in range(V - 1):
        logits = np.zeros(V, np.float32)
        logits[output[-1] if output else 4] = 1.0
        row = make_row(params, prompt=[4], output=output) if preempted else state
        result = sample_one(logits, row)
        assert isinstance(result, SampledToken)
        state.append(result.token_id)
        output.append(result.token_id)
    assert all(a != b for a, b in itertools.pairwise(output)), output


def test_a_resumed_row_has_the_state_of_one_that_ran_through() -> None:
    """R84, C31: outputs must not become prompt, nor be counted twice."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.25)
    output = [5, 9, 5, 5, 30, 9, 0] * 7
    through = make_row(params, prompt=[3, 3, 5])
    for token_id in output:
        through.append(token_id)
    resumed = make_row(params, prompt=[3, 3, 5], output=output)
    assert through.position == resumed.position == 3 + len(output)
    assert through.num_output_tokens == resumed.num_output_tokens == len(output)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(V).astype(np.float32)
    copy = logits.copy()
    apply_penalties(logits, through)
    apply_penalties(copy, resumed)
    np.testing.assert_array_equal(logits, copy)


def test_counts_survive_growth() -> None:
    """The count arrays double as they fill; nothing is lost or mixed up."""
    state = make_row(SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0), prompt=[])
    for i in range(1000):
        state.append(i * i % 307)
    assert state.output_counts is not None
    assert state.seen_counts is not None
    expected = np.bincount([i * i % 307 for i in range(1000)])
    counts = dict(zip(state.output_counts.ids, state.output_counts.counts, strict=True))
    assert counts == {i: n for i, n in enumerate(expected) if n}
    assert set(state.seen_counts.ids) == set(counts)


def test_noting_a_token_costs_the_same_after_20_000() -> None:
    """C107, the penalties' part: steps and memory follow the vocabulary, not the length."""
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    state = make_row(params, prompt=[1])

    def note(count: int) -> None:
        for i in range(count):
            state.append(i % V)

    note(100)
    early = count_steps(lambda: note(1000))
    assert memory_kept(lambda: note(18_000)) < 10_000
    assert count_steps(lambda: note(1000)) <= early
    assert count_steps(lambda: apply_penalties(np.ones(V, np.float32), state)) < 50


def test_counts_are_not_kept_for_those_who_do_not_ask() -> None:
    """C112."""
    state = make_row(SamplingParams(), prompt=[1, 2], output=[3])
    state.append(4)
    assert state.seen_counts is None
    assert state.output_counts is None
    assert state.position == 4


def test_constraints_come_before_bias_and_bias_before_penalties() -> None:
    """R69: a barred token stays barred whatever its bias; a bias counts before the division."""
    params = SamplingParams(
        temperature=0,
        allowed_token_ids=[1, 2],
        stop_token_ids=[2],
        min_tokens=1,
        logit_bias={0: 100.0, 2: 100.0, 1: 3.0},
        repetition_penalty=2.0,
    )
    logits = np.array([5, 1, 9, 7], np.float32)
    state = make_row(params, prompt=[1])
    apply_constraints(logits, state)
    assert logits.tolist() == [-INF, 4, -INF, -INF]
    apply_penalties(logits, state)
    assert logits.tolist() == [-INF, 2, -INF, -INF]
    assert sample_token([5, 1, 9, 7], params, prompt=[1]) == 1


def test_allowed_ids_leave_nothing_else() -> None:
    """R70: the classifier's use: only these ids, over many draws."""
    params = SamplingParams(temperature=5.0, allowed_token_ids=[3, 17, 3])
    logits = np.zeros(V, np.float32)
    logits[0] = 50.0
    drawn = {sample_token(logits, params, seed=seed) for seed in range(50)}
    assert drawn == {3, 17}


def test_logit_bias_adds_and_can_force_or_bar() -> None:
    logits = np.arange(V, dtype=np.float32) / 10
    greedy = {"temperature": 0}
    assert sample_token(logits, SamplingParams(**greedy, logit_bias={4: 100})) == 4
    assert sample_token(logits, SamplingParams(**greedy, logit_bias={V - 1: -100})) == V - 2
    assert sample_token(logits, SamplingParams(**greedy, logit_bias={20: 1.15})) == 20
    assert sample_token(logits, SamplingParams(**greedy, logit_bias={20: 1.05})) == V - 1


def test_ids_outside_the_vocabulary_touch_nothing() -> None:
    """C38: no index error, no write into a neighbour's logits."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, V)).astype(np.float32)
    outside = SamplingParams(
        logit_bias={V: 50.0, 10**20: 1.0, 3: 0.5},
        stop_token_ids=[10**9, 10**30, V],
        allowed_token_ids=[V, 3, 4, 10**25],
        min_tokens=4,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        seed=5,
    )
    inside = SamplingParams(
        logit_bias={3: 0.5}, allowed_token_ids=[3, 4], min_tokens=4, repetition_penalty=1.5,
        presence_penalty=1.0, frequency_penalty=1.0, seed=5,
    )  # fmt: skip
    odd = make_row(outside, row=1, prompt=[V, 3, 10**12], output=[V + 5, 4], eos=[V + 1])
    plain = make_row(inside, row=1, prompt=[0, 3, 0], output=[9, 4])
    neighbours = [make_row(SamplingParams(), row=row, seed=row) for row in (0, 2)]
    with_odd = sample(logits, [neighbours[0], odd, neighbours[1]])
    with_plain = sample(logits, [neighbours[0], plain, neighbours[1]])
    assert with_odd == with_plain
    assert all(isinstance(result, SampledToken) for result in with_odd)


def test_a_row_that_may_say_nothing_fails_alone() -> None:
    """C38: allowed ids that do not exist; C41: only end-of-sequence allowed before min_tokens."""
    logits = np.zeros((3, V), np.float32)
    rows = [
        make_row(SamplingParams(allowed_token_ids=[99]), row=7),
        make_row(SamplingParams(temperature=0), row=8),
        make_row(SamplingParams(allowed_token_ids=[2], min_tokens=1, logprobs=1), row=9, eos=[2]),
    ]
    first, second, third = sample(logits, rows)
    assert isinstance(first, RowFault)
    assert first.row == 7
    assert "allowed_token_ids" in first.message
    assert second == SampledToken(8, 0)
    assert isinstance(third, RowFault)
    assert third.row == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bars_every_end_of_sequence_id(temperature: float) -> None:
    """C41: EOS {2, 7} and stop id 9; the model prefers 7, then 2, then 9."""
    logits = np.full(V, -10.0, np.float32)
    logits[[7, 2, 9]] = 30.0, 29.0, 28.0
    params = SamplingParams(temperature=temperature, min_tokens=5, stop_token_ids=[9])
    state = make_row(params, eos=[2, 7])
    output = []
    for _ in range(6):
        result = sample_one(logits, state)
        assert isinstance(result, SampledToken)
        state.append(result.token_id)
        output.append(result.token_id)
    assert not {2, 7, 9} & set(output[:5])
    assert output[5] in {2, 7, 9}
