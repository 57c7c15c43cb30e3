"""The audit sees: each invariant is broken by hand once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from beds.assertions import unseen
from beds.core_bed import CoreBed
from beds.tape_model import KVCorruption, Slot
from octavo.core import audit
from octavo.core.event_log import Event, EventLog, Reason
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.radix_cache import Node
from octavo.core.scheduler import Scheduler
from octavo.request import Status, Swapped


def busy_bed() -> CoreBed:
    """Request 1 and 2 run and share a prefix, 3 was preempted, 4 waits; something is cached."""
    bed = CoreBed(num_blocks=32, max_num_seqs=3, num_slots=(4, 0))
    bed.add(list(range(9)), 1)
    bed.run()
    for i in range(3):
        bed.add([*range(9), 50 + i], 20)
    bed.add([7, 7, 7], 20)
    bed.step()
    bed.scheduler.preempt(3)
    bed.scheduler.audit()
    return bed


def too_many_blocks(s: Scheduler) -> None:
    block_ids = s.kv.pool.allocate(1)
    assert block_ids is not None
    s.requests[1].block_ids += block_ids


def unpinned_in_use(s: Scheduler) -> None:
    s.kv.cache.unpin(s.kv._pinned.pop(1))
    s.kv.cache.unpin(s.kv._pinned.pop(2))


def foreign_block(s: Scheduler) -> None:
    s.requests[1].block_ids[-1] = s.requests[2].block_ids[-1]


def miscounted_behind_the_checks(s: Scheduler) -> None:
    s.kv.check = lambda *args: None  # type: ignore[method-assign]
    s.kv.cache.num_evictable += 1


def top(s: Scheduler) -> Node:
    return next(iter(s.kv.cache.nodes()))


CORRUPTIONS: list[tuple[Callable[[Scheduler], object], str]] = [
    (lambda s: s.waiting.put_back(s.requests[3]), "waits twice"),
    (lambda s: s.waiting.push(s.requests[1], 0), "both waits and runs"),
    (lambda s: s.requests.pop(1), "was lost"),
    (lambda s: s.requests.update({99: s.requests[1]}), "was lost"),
    (lambda s: s.journal.waiting_for.update({1: Reason.NO_BLOCKS}), "is held that does not wait"),
    (lambda s: s.journal.num_dropped.clear(), "preempted requests are miscounted"),
    (lambda s: setattr(s.requests[4], "status", Status.FINISHED), "in the queue"),
    (lambda s: s.requests[4].block_ids.append(0), "waits and holds blocks"),
    (lambda s: setattr(s.requests[4], "row", 0), "waits and holds a row"),
    (lambda s: setattr(s.requests[4], "num_computed_tokens", 4), "claims computed tokens"),
    (lambda s: setattr(s.requests[4], "swapped", Swapped([], 0)), "never ran"),
    (lambda s: setattr(s.requests[1], "status", Status.WAITING), "among the running"),
    (lambda s: setattr(s.requests[1], "num_computed_tokens", 11), "has nothing to do"),
    (lambda s: setattr(s, "limits", s.limits._replace(max_model_len=11)), "is too long"),
    (lambda s: setattr(s.requests[1], "max_tokens", 1), "goes on too long"),
    (lambda s: setattr(s.requests[1], "row", s.requests[2].row), "a row is lost or has two owners"),
    (lambda s: s.free_rows.pop(), "a row is lost or has two owners"),
    (lambda s: s.kv.pool.release([s.requests[1].block_ids.pop()]), "lost some"),
    (too_many_blocks, "holds too many"),
    (miscounted_behind_the_checks, "free, evictable and used blocks do not add up"),
    (lambda s: s.kv.slots.allocate(1), "slots are not those of tree and waiting requests"),
    (lambda s: s.kv.cache.dropped_slots.append(0), "slots left the tree and were not given back"),
    (lambda s: s.kv._find_place(s.requests[1]), "a place is kept of one that does not wait"),
    (lambda s: s.requests[1].block_ids.append(s.requests[1].block_ids[0]), "holds a block twice"),
    (lambda s: s.kv._pinned.update({99: top(s)}), "left without letting go of its prefix"),
    (lambda s: s.kv.pool.share([s.requests[1].block_ids[0]]), "references are not those of tables"),
    (lambda s: s.kv.pool.release([s.requests[1].block_ids[-1]]), "references are not those"),
    (foreign_block, "references are not those of tables and tree"),
    (lambda s: setattr(top(s), "pins", top(s).pins + 1), "number of evictable|pins are not those"),
    (unpinned_in_use, "an evictable block is in use"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS)
def test_audit_sees(corrupt: Callable[[Scheduler], object], message: str) -> None:
    """Whatever is broken by hand, in an otherwise sound scheduler, is called by its name."""
    bed = busy_bed()
    corrupt(bed.scheduler)
    with pytest.raises(AssertionError, match=message):
        bed.scheduler.audit()


def test_every_assertion_of_the_audit_is_seen_to_fail() -> None:
    """None that can't, and none that nobody has tried."""
    said = [part for _, message in CORRUPTIONS for part in message.split("|")]
    said.append("blocks are in use though nothing runs")
    audits = (audit.audit, audit._audit_requests, audit._audit_blocks, KVCacheManager.check)
    assert unseen(said, *audits) == []


def test_audit_sees_what_is_left_behind_at_idle() -> None:
    """When nothing lives, every block is free or evictable."""
    bed = CoreBed()
    bed.add(list(range(9)), 2)
    bed.run()
    kv = bed.scheduler.kv
    kv.check = lambda *args: None  # type: ignore[method-assign]
    match = kv.cache.match(list(range(9)), 8)
    assert match is not None
    node = kv.cache.pin(match)
    with pytest.raises(AssertionError, match="in use though nothing runs"):
        bed.scheduler.audit()
    kv.cache.unpin(node)
    bed.scheduler.audit()
    kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="do not add up"):
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
