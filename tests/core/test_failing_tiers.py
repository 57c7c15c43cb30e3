"""Tiers that fail, and transfers that are late: no answer changes, and no block is lost."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.core_bed import CoreBed, alone
from beds.workloads import Work, add, run, workloads
from octavo.core.event_log import Reason
from octavo.messages import SchedulerOutput, StepResult

FEWER = settings().max_examples // 2
MEANS = ["recompute", "swap", "threshold", "auto"]


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


@pytest.mark.parametrize("what", ["swapped", "cached"])
def test_what_can_not_be_read_back_is_computed_again(what: str) -> None:
    """R98: a tier that fails costs time and no answer; what it lost is not asked for again."""
    bed = CoreBed(num_blocks=12, num_slots=(20, 0), preemption_mode="swap")
    bed.add(prompt(20), 8)
    if what == "swapped":
        bed.step()
        bed.step()
        bed.scheduler.preempt(0)
    else:
        bed.run()
        bed.add(prompt(40, 1), 4)
        bed.run()
    bed.model.broken_slots = set(range(20))
    victim = 0 if what == "swapped" else bed.add(prompt(20), 8)
    other = bed.add(prompt(5, 2), 8)
    bed.run()
    assert [event.request_id for event in bed.events(Reason.LOST)] == [victim]
    assert bed.ends[victim].finish_reason == "length"
    assert bed.outputs[victim] == alone(prompt(20), 8)
    assert bed.outputs[other] == alone(prompt(5, 2), 8)
    again = bed.add(prompt(20), 8)
    bed.run()
    assert bed.outputs[again] == alone(prompt(20), 8)
    assert len(bed.events(Reason.LOST)) == 1


@given(
    workloads,
    st.sampled_from(MEANS),
    st.booleans(),
    st.sampled_from(["continuous", "static", "static_dropped"]),
    st.sets(st.integers(0, 11), min_size=1),
)
@settings(max_examples=FEWER)
def test_a_tier_that_loses_blocks_never_changes_an_answer(
    workload: list[Work], means: str, prefix_caching: bool, mode: str, broken: set[int]
) -> None:
    """R98: whatever was in them, whoever shares it, n answers and scopes; all answers come."""
    bed = CoreBed(
        num_blocks=7,
        max_num_batched_tokens=16,
        enable_prefix_caching=prefix_caching,
        preemption_mode=means,
        swap_threshold=5,
        batching_mode=mode,
        num_slots=(6, 6),
    )
    bed.model.broken_slots = broken
    run(workload, bed)
    run(workload, bed)


def test_overlapped_steps_with_swaps() -> None:
    """C22: plans are made one step ahead of results, and executed late: no block is read by one
    and written by another, whatever is swapped, aborted or preempted in between."""
    bed = CoreBed(num_blocks=6, num_slots=(4, 4), preemption_mode="swap", max_num_seqs=4)
    for i in range(12):
        bed.add(prompt(4 + i % 5, i % 3), 6 + i % 4)
    ahead = bed.scheduler.schedule()
    while bed.scheduler.has_unfinished() or ahead.scheduled:
        following = bed.scheduler.schedule()
        bed.scheduler.audit()
        results: StepResult = bed.model.submit(ahead)
        bed.take(bed.scheduler.update_from_output(ahead, results))
        bed.scheduler.audit()
        ahead = following
    for i in range(12):
        assert bed.outputs[i] == alone(prompt(4 + i % 5, i % 3), 6 + i % 4)


@given(
    workload=workloads,
    means=st.sampled_from(MEANS),
    prefix_caching=st.booleans(),
    depth=st.integers(2, 4),
    broken=st.sets(st.integers(0, 6), max_size=3),
    data=st.data(),
)
@settings(max_examples=FEWER)
def test_blocks_in_flight_are_nobodys_whatever_ends_meanwhile(
    workload: list[Work],
    means: str,
    prefix_caching: bool,
    depth: int,
    broken: set[int],
    data: st.DataObject,
) -> None:
    """C22: up to `depth` plans are made before the first of them is executed, so that copies and
    steps are late; requests are aborted and end in between; 6 blocks. No slot is written by a past
    owner or read by a wrong one, and at the end no block is lost."""
    bed = CoreBed(
        num_blocks=6,
        num_slots=(4, 3),
        preemption_mode=means,
        swap_threshold=3,
        max_num_batched_tokens=12,
        max_num_seqs=4,
        enable_prefix_caching=prefix_caching,
    )
    bed.model.broken_slots = broken
    scheduler = bed.scheduler
    work_of: dict[int, Work] = {}
    for work in workload:
        if work.max_tokens <= scheduler.max_output_tokens(len(work.prompt)):
            add(bed, work, work_of)
    aborted: set[int] = set()
    ahead: deque[SchedulerOutput] = deque()
    for step in range(3000):
        if not scheduler.has_unfinished() and not ahead:
            break
        if len(ahead) < depth and (not ahead or data.draw(st.booleans()) or step > 60):
            ahead.append(scheduler.schedule())
        else:
            plan = ahead.popleft()
            result: StepResult = bed.model.submit(plan)
            bed.take(scheduler.update_from_output(plan, result))
        if scheduler.requests and step < 60 and data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(sorted(scheduler.requests)))
            scheduler.finish(victim, "abort")
            aborted.add(victim)
        scheduler.audit()
    assert not scheduler.has_unfinished()
    for request_id, work in work_of.items():
        output, expected = bed.outputs[request_id], alone(list(work.prompt), work.max_tokens)
        assert output == (expected[: len(output)] if request_id in aborted else expected)
    assert scheduler.kv.num_available == 6
