"""Ends from outside: aborts in any state, failed rows, ends while a step is in flight."""

from __future__ import annotations

import pytest

from beds.core_bed import CoreBed, alone
from octavo.core.event_log import Reason


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


@pytest.mark.parametrize("num_chunks", range(6))
def test_abort_within_a_chunked_prefill(num_chunks: int) -> None:
    """C17: after k chunks, 0 being still in the queue with a cached prefix: all is let go.

    Only full computed blocks are in the cache; neighbours do not notice.
    """
    bed = CoreBed(max_num_batched_tokens=7, max_num_seqs=2)
    neighbour = bed.add(prompt(3, 1), 40)
    bed.step()
    victim = bed.add(prompt(30), 5)
    for _ in range(num_chunks):
        bed.step()
    assert bed.scheduler.finish(victim, "abort")
    bed.scheduler.audit()
    cached = bed.scheduler.kv.cache.num_blocks
    assert cached == min(30, num_chunks * 6) // 4
    again = bed.add(prompt(30), 5)
    bed.run()
    assert bed.requests[again].num_cached_tokens == min(28, cached * 4)
    assert bed.outputs[again] == alone(prompt(30), 5)
    assert bed.outputs[neighbour] == alone(prompt(3, 1), 40)
    assert bed.reasons(victim)[-1] is Reason.ABORTED


def test_abort_while_waiting_for_room_beside_a_cached_prefix() -> None:
    """C17, k = 0: nothing is pinned for a request that waits."""
    bed = CoreBed(num_blocks=6)
    bed.add(prompt(8), 1)
    bed.run()
    bed.add(prompt(9, 1), 8)
    bed.step()
    waiting = bed.add(prompt(16), 2)
    bed.step()
    assert bed.scheduler.num_waiting == 1
    assert bed.scheduler.finish(waiting, "abort")
    bed.scheduler.audit()
    bed.run()


def test_an_aborted_request_leaves_its_work_to_the_next() -> None:
    """C64: after three steps nothing is referenced, and the prompt, sent again, hits."""
    bed = CoreBed()
    a = bed.add(prompt(21), 200)
    for _ in range(3):
        bed.step()
    assert bed.scheduler.finish(a, "abort")
    assert bed.scheduler.num_running == 0
    stats = bed.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    again = bed.add(prompt(21), 3)
    bed.run()
    assert bed.requests[again].num_cached_tokens == 20


def test_ending_twice_is_no_error_and_frees_once() -> None:
    """C16: abort after the end, twice, or of an unknown id: False, nothing happens."""
    bed = CoreBed()
    a = bed.add(prompt(5), 2)
    bed.run()
    assert not bed.scheduler.finish(a, "abort")
    assert not bed.scheduler.finish(12345, "abort")
    b = bed.add(prompt(5), 2)
    assert bed.scheduler.finish(b, "abort")
    assert not bed.scheduler.finish(b, "abort")
    bed.scheduler.audit()


def test_abort_in_the_step_in_which_it_would_have_finished() -> None:
    """C16: the result that comes after the abort is passed over; all is freed, once."""
    bed = CoreBed()
    a, b = bed.add(prompt(9), 2), bed.add(prompt(9, 1), 3)
    bed.step()
    bed.step(lambda: bed.scheduler.finish(a, "abort"))
    assert a not in bed.ends, "its last token is not delivered"
    assert len(bed.outputs[a]) == 1
    assert bed.scheduler.kv.cache.num_blocks == 2 + 2
    bed.run()
    assert bed.outputs[b] == alone(prompt(9, 1), 3)


def test_blocks_of_a_step_in_flight_are_nobodys_yet() -> None:
    """C22: plan t+1 is made before the result of t is known, and a request of t is aborted.

    Its blocks and row go to nobody before t has come back; then they are free.
    """
    bed = CoreBed(num_blocks=6, enable_prefix_caching=False, max_num_seqs=2)
    scheduler, model = bed.scheduler, bed.model
    a, b = bed.add(prompt(12), 8), bed.add(prompt(8, 1), 4)
    first = scheduler.schedule()
    held = set(bed.requests[a].block_ids)
    assert scheduler.finish(a, "abort")
    scheduler.audit()
    c = bed.add(prompt(8, 2), 2)
    second = scheduler.schedule()
    assert second.scheduled == (), "b is in flight, c finds neither row nor blocks"
    scheduler.audit()
    bed.take(scheduler.update_from_output(first, model.submit(first)))
    scheduler.audit()
    bed.take(scheduler.update_from_output(second, model.submit(second)))
    bed.step()
    assert set(bed.requests[c].block_ids) <= held
    bed.run()
    assert bed.outputs[b] == alone(prompt(8, 1), 4)
    assert bed.outputs[c] == alone(prompt(8, 2), 2)


def test_a_prefill_in_flight_keeps_its_claim() -> None:
    """C2, C22: planning ahead, nobody takes the blocks that its next chunks will need."""
    bed = CoreBed(num_blocks=8, max_num_batched_tokens=4)
    scheduler, model = bed.scheduler, bed.model
    a = bed.add(prompt(24), 3)
    first = scheduler.schedule()
    b = bed.add(prompt(12, 1), 3)
    second = scheduler.schedule()
    assert second.scheduled == (), "7 blocks are free, but a needs 5 of them"
    assert bed.reasons(b) == [Reason.NO_BLOCKS]
    bed.take(scheduler.update_from_output(first, model.submit(first)))
    bed.run()
    assert scheduler.stats().num_preemptions == 0
    assert bed.outputs[a] == alone(prompt(24), 3)


def test_requests_in_flight_are_not_victims() -> None:
    """C22: planning ahead, a needs a block and only b, in flight, could yield one: a sits out."""
    bed = CoreBed(num_blocks=4, enable_prefix_caching=False)
    scheduler, model = bed.scheduler, bed.model
    a = bed.add(prompt(8), 3)
    first = scheduler.schedule()
    b = bed.add(prompt(7, 1), 3)
    second = scheduler.schedule()
    bed.take(scheduler.update_from_output(first, model.submit(first)))
    third = scheduler.schedule()
    scheduler.audit()
    assert [len(plan.scheduled) for plan in (first, second, third)] == [1, 1, 0]
    assert scheduler.stats().num_preemptions == 0
    bed.take(scheduler.update_from_output(second, model.submit(second)))
    bed.take(scheduler.update_from_output(third, model.submit(third)))
    bed.step()
    assert bed.requests[b].num_preemptions == 1
    bed.run()
    assert bed.outputs[a] == alone(prompt(8), 3)
    assert bed.outputs[b] == alone(prompt(7, 1), 3)


@pytest.mark.parametrize("index", range(5))
def test_a_failed_row_ends_alone(index: int) -> None:
    """C37, C106: B fails at its output `index`; A and C answer as if alone."""
    bed = CoreBed(faults={1: index})
    prompts = [prompt(10, i) for i in range(3)]
    for p in prompts:
        bed.add(p, 8)
    bed.run()
    assert bed.ends[1].finish_reason == "error"
    assert bed.ends[1].error == "the tape tore"
    assert bed.outputs[1] == alone(prompts[1], 8)[:index]
    for i in (0, 2):
        assert bed.outputs[i] == alone(prompts[i], 8)
    assert bed.reasons(1)[-1] is Reason.FAULT


def test_nothing_of_the_failed_step_is_published() -> None:
    """C37: blocks that became full since the last good prefill die with the request."""
    for index, kept in ((0, 0), (1, 2), (6, 2)):
        bed = CoreBed(faults={0: index})
        bed.add(prompt(10), 8)
        bed.run()
        assert bed.scheduler.kv.cache.num_blocks == kept
    bed = CoreBed(faults={0: -1}, max_num_batched_tokens=8)
    bed.add(prompt(30), 8)
    bed.run()
    assert bed.ends[0].finish_reason == "error", "a row that samples nothing may fail, too"
    assert bed.scheduler.kv.cache.num_blocks == 0


def test_the_engine_may_end_a_request_with_an_error() -> None:
    """C106: a fault outside the executor; what was computed since is not published."""
    bed = CoreBed()
    a = bed.add(prompt(6), 20)
    for _ in range(6):
        bed.step()
    assert bed.scheduler.finish(a, "error")
    assert bed.scheduler.kv.cache.num_blocks == 1
    bed.scheduler.audit()


def test_twenty_faults_in_a_row_leave_a_whole_pool() -> None:
    """C106: engine and pool are fine after each."""
    bed = CoreBed(num_blocks=10, faults={i: i % 4 for i in range(1, 40, 2)})
    for i in range(40):
        bed.add(prompt(5 + i % 7, i), 6)
    bed.run()
    faulty = [i for i, event in bed.ends.items() if event.finish_reason == "error"]
    assert len(faulty) == 20
    for i in range(0, 40, 2):
        assert bed.outputs[i] == alone(prompt(5 + i % 7, i), 6)
