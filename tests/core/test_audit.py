"""The audit sees: each invariant is broken by hand once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from beds.core_bed import CoreBed
from beds.tape_model import KVCorruption, Slot
from octavo.core.event_log import Event, EventLog, Reason
from octavo.core.scheduler import Scheduler
from octavo.request import Status


def busy_bed() -> CoreBed:
    """Request 0 and 1 run and share a prefix, 2 waits, 3 was preempted; something is cached."""
    bed = CoreBed(num_blocks=32, max_num_seqs=3)
    bed.add(list(range(9)), 1)
    bed.run()
    for i in range(3):
        bed.add([*range(9), 50 + i], 20)
    bed.add([7, 7, 7], 20)
    bed.step()
    bed.scheduler.preempt(3)
    bed.scheduler.audit()
    return bed


def lose_a_request(s: Scheduler) -> None:
    del s.requests[1]


def run_twice(s: Scheduler) -> None:
    s.waiting.push(s.requests[1], 0)


def wait_with_blocks(s: Scheduler) -> None:
    s.requests[4].block_ids.append(0)


def wait_with_a_row(s: Scheduler) -> None:
    s.requests[4].row = 0


def wait_having_computed(s: Scheduler) -> None:
    s.requests[4].num_computed_tokens = 4


def wrong_status(s: Scheduler) -> None:
    s.requests[1].status = Status.WAITING


def nothing_left_to_compute(s: Scheduler) -> None:
    s.requests[1].num_computed_tokens = s.requests[1].num_tokens


def shared_row(s: Scheduler) -> None:
    s.requests[1].row = s.requests[2].row


def lost_row(s: Scheduler) -> None:
    s.free_rows.pop()


def lost_block(s: Scheduler) -> None:
    s.kv.pool.release([s.requests[1].block_ids.pop()])


def too_many_blocks(s: Scheduler) -> None:
    block_ids = s.kv.pool.allocate(1)
    assert block_ids is not None
    s.requests[1].block_ids += block_ids


def stray_reference(s: Scheduler) -> None:
    s.kv.pool.share([s.requests[1].block_ids[0]])


def freed_while_in_use(s: Scheduler) -> None:
    s.kv.pool.release([s.requests[1].block_ids[-1]])


def held_twice(s: Scheduler) -> None:
    s.requests[1].block_ids.append(s.requests[1].block_ids[0])


def foreign_block(s: Scheduler) -> None:
    s.requests[1].block_ids[-1] = s.requests[2].block_ids[-1]


def stray_pin(s: Scheduler) -> None:
    node = next(iter(s.kv.cache.nodes()))
    node.pins += 1


def forgotten_pin(s: Scheduler) -> None:
    s.kv._pinned[99] = next(iter(s.kv.cache.nodes()))


def unpinned_in_use(s: Scheduler) -> None:
    s.kv.cache.unpin(s.kv._pinned.pop(1))
    s.kv.cache.unpin(s.kv._pinned.pop(2))


def miscounted_preemptions(s: Scheduler) -> None:
    s.journal.num_dropped.clear()


def held_though_running(s: Scheduler) -> None:
    s.journal.waiting_for[1] = Reason.NO_BLOCKS


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_request,
        run_twice,
        wait_with_blocks,
        wait_with_a_row,
        wait_having_computed,
        wrong_status,
        nothing_left_to_compute,
        shared_row,
        lost_row,
        lost_block,
        too_many_blocks,
        stray_reference,
        freed_while_in_use,
        held_twice,
        foreign_block,
        stray_pin,
        forgotten_pin,
        unpinned_in_use,
        miscounted_preemptions,
        held_though_running,
    ],
)
def test_audit_sees(corrupt: Callable[[Scheduler], None]) -> None:
    """Whatever is broken by hand, in an otherwise sound scheduler, raises."""
    bed = busy_bed()
    corrupt(bed.scheduler)
    with pytest.raises(AssertionError):
        bed.scheduler.audit()


def test_audit_sees_what_is_left_behind_at_idle() -> None:
    """When nothing lives, every block is free or evictable."""
    bed = CoreBed()
    bed.add(list(range(9)), 2)
    bed.run()
    bed.scheduler.kv.pool.allocate(1)
    with pytest.raises(AssertionError):
        bed.scheduler.audit()


@pytest.mark.parametrize("slot", [None, Slot(0, 5, 2, 1), Slot(0, 2, 2, 1), Slot(0, 2, 1, 1)])
def test_tape_model_sees_a_slot_that_is_not_its_own(slot: Slot | None) -> None:
    """Unwritten, another token, another history, another position: each raises."""
    bed = CoreBed()
    bed.add(list(range(9)), 5)
    bed.step()
    bed.model.slots[2] = slot
    with pytest.raises(KVCorruption):
        bed.step()


def test_tape_model_sees_a_block_given_away_too_early() -> None:
    """A block that is freed while in use is soon written by another, and then read."""
    bed = CoreBed(enable_prefix_caching=False)
    bed.add(list(range(9)), 5)
    plan = bed.scheduler.schedule()
    bed.scheduler.update_from_output(plan, bed.model.submit(plan))
    bed.scheduler.kv.pool.release(bed.requests[0].block_ids)
    bed.add(list(range(50, 59)), 5)
    plan = bed.scheduler.schedule()
    with pytest.raises(KVCorruption):
        bed.model.submit(plan)


def test_event_log_is_bounded_and_counts_all() -> None:
    """Old events go, totals stay."""
    log = EventLog(capacity=3)
    for step in range(5):
        log.step = step
        log.record(Reason.ADMITTED, step, 10, 0)
    assert len(log) == 3
    assert next(iter(log)) == Event(2, 2, Reason.ADMITTED, (10, 0))
    assert log.counts[Reason.ADMITTED] == 5
    assert log.of_request(4) == [Event(4, 4, Reason.ADMITTED, (10, 0))]
    assert log.of_request(0) == []
