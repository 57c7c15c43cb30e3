"""Preemption by recompute: who yields, what it costs, and that nobody can tell from the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from beds.core_bed import CoreBed, alone
from octavo.core import preemption
from octavo.core.event_log import Reason
from octavo.request import Request, Status


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def test_the_last_arrived_yields_everything_and_goes_to_the_front() -> None:
    """R96: blocks freed, nothing computed, PREEMPTED, ahead of those that wait."""
    bed = CoreBed(num_blocks=4, max_num_seqs=2, enable_prefix_caching=False)
    a, b = bed.add(prompt(7), 8), bed.add(prompt(7, 1), 8)
    c = bed.add(prompt(1, 2), 1)
    while bed.scheduler.stats().num_preemptions == 0:
        bed.step()
    request = bed.requests[b]
    assert request.status is Status.PREEMPTED
    assert (request.num_computed_tokens, request.block_ids, request.row) == (0, [], None)
    assert request.num_output_tokens > 0, "what it generated is kept (R99)"
    assert [waiting.request_id for waiting in bed.scheduler.waiting] == [b, c]
    bed.run()
    assert bed.outputs[a] == alone(prompt(7), 8)
    assert bed.outputs[b] == alone(prompt(7, 1), 8)


def test_several_preempted_ones_return_in_order_of_arrival() -> None:
    """R93, R96: whichever yielded first."""
    bed = CoreBed()
    ids = [bed.add(prompt(5, i), 9) for i in range(4)]
    bed.step()
    for i in (1, 3, 2):
        assert bed.scheduler.preempt(ids[i])
    assert not bed.scheduler.preempt(ids[1]), "it does not run any more"
    late = bed.add(prompt(5, 9), 9)
    assert [request.request_id for request in bed.scheduler.waiting] == [1, 2, 3, late]
    bed.run()


def test_a_step_that_preempts_admits_nobody() -> None:
    """R105: not even a request that would fit."""
    bed = CoreBed(num_blocks=4, enable_prefix_caching=False)
    bed.add(prompt(8), 8)
    b = bed.add(prompt(7, 1), 8)
    bed.step()
    c = bed.add(prompt(1, 2), 1)
    plan = bed.step()
    assert bed.events(Reason.PREEMPTED)[-1].step == plan.step
    assert bed.reasons(b)[-2:] == [Reason.PREEMPTED, Reason.PREEMPTION_STEP]
    assert plan.starts == ()
    assert bed.scheduler.kv.num_available > 0, "the small one would have fitted"
    bed.run()
    assert bed.outputs[c] == alone(prompt(1, 2), 1)


class FirstAdmitted:
    """The worst victim: one whose part of the step is planned already."""

    def __init__(self, cost: Callable[[Request], int]) -> None:
        pass

    def choose(self, running: Iterable[Request]) -> Request:
        return next(iter(running))


def test_a_victim_placed_in_this_very_step_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: lo is scheduled first, then hi needs a block that only lo can give."""
    monkeypatch.setitem(preemption.VICTIM_POLICIES, "first_admitted", FirstAdmitted)
    bed = CoreBed(
        num_blocks=4,
        victim_policy="first_admitted",
        max_num_batched_tokens=17,
        enable_prefix_caching=False,
    )
    lo, hi = bed.add(prompt(6), 6), bed.add(prompt(8, 1), 6)
    bed.step()
    plan = bed.step()
    assert bed.requests[lo].status is Status.PREEMPTED
    assert bed.ran()[1] == {hi}
    assert plan.num_scheduled_tokens == 1, "lo's budget is handed back"
    bed.run()
    assert bed.outputs[lo] == alone(prompt(6), 6)
    assert bed.outputs[hi] == alone(prompt(8, 1), 6)


def test_recomputed_tokens_are_no_cache_hits() -> None:
    """C5: six prompts with nothing in common: no hit, whatever is found again of their own."""
    bed = CoreBed(num_blocks=9, max_num_batched_tokens=64)
    for i in range(6):
        bed.add(prompt(7, i), 12)
    bed.run()
    stats = bed.scheduler.stats()
    assert stats.num_preemptions >= 3
    assert stats.prefix_hits_tokens == 0
    assert stats.prefix_queries_tokens == 6 * 7
    assert stats.recomputed_tokens > 0
    assert bed.events(Reason.PREFIX_HIT) == []
    assert all(request.num_cached_tokens == 0 for request in bed.requests.values())
    assert [bed.outputs[i] for i in range(6)] == [alone(prompt(7, i), 12) for i in range(6)]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_long_request_is_not_resumed_to_be_sent_away_again(prefix_caching: bool) -> None:
    """C13: it needs 10 blocks, fewer stay free for 100 steps: admitted again once, at the end."""
    bed = CoreBed(
        num_blocks=15,
        block_size=128,
        max_num_batched_tokens=1024,
        enable_prefix_caching=prefix_caching,
    )
    bed.add(prompt(5 * 128 - 2), 105)
    long = bed.add(prompt(10 * 128 - 10, 1), 5)
    bed.run()
    assert bed.requests[long].num_preemptions == 1
    resumed = bed.events(Reason.RESUMED)
    assert [event.request_id for event in resumed] == [long]
    assert resumed[0].step > 100
    assert bed.scheduler.stats().recomputed_tokens < 2 * 10 * 128
    assert bed.outputs[long] == alone(prompt(10 * 128 - 10, 1), 5)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_never_changes_an_answer(chunk: int, prefix_caching: bool) -> None:
    """C14, R99: preempted at output tokens 10 and 14; nothing lost, doubled, or taken for prompt.

    TapeModel's next token depends on where the prompt ends.
    """
    bed = CoreBed(max_num_batched_tokens=chunk, enable_prefix_caching=prefix_caching)
    a = bed.add(prompt(3), 20)
    for num_output in (10, 14):
        while len(bed.outputs[a]) < num_output:
            bed.step()
        assert bed.scheduler.preempt(a)
        bed.scheduler.audit()
    bed.run()
    assert bed.requests[a].num_preemptions == 2
    assert bed.outputs[a] == alone(prompt(3), 20)
    assert bed.ends[a].finish_reason == "length"
    assert bed.requests[a].num_prompt_tokens == 3


def test_preemption_in_the_middle_of_a_prompt() -> None:
    """Only what was computed is kept; the rest of the prompt follows after the resume."""
    for num_chunks in range(1, 5):
        bed = CoreBed(max_num_batched_tokens=6)
        a = bed.add(prompt(30), 3)
        for _ in range(num_chunks):
            bed.step()
        assert bed.scheduler.preempt(a)
        bed.scheduler.audit()
        assert bed.scheduler.stats().num_cached_blocks == num_chunks * 6 // 4
        bed.run()
        assert bed.outputs[a] == alone(prompt(30), 3)


def test_the_oldest_request_always_gets_on() -> None:
    """No thrash: in the tightest pool that admits them, each ends, with a bounded number of steps.

    Every request alone needs all blocks but one.
    """
    bed = CoreBed(num_blocks=6, max_num_batched_tokens=8)
    ids = [bed.add(prompt(9, i), 12) for i in range(5)]
    bed.run(max_steps=5 * 40)
    assert [bed.outputs[i] for i in ids] == [alone(prompt(9, i), 12) for i in ids]
    ends = [event.request_id for event in bed.events(Reason.FINISHED)]
    assert ends == ids
