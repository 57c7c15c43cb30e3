"""Laws under disturbance: what else happens never changes an answer.

Workloads are drawn at random, pools are too small on purpose. CoreBed audits after every step and
TapeModel raises when any row reads a slot that is not its own history.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from beds.core_bed import CoreBed
from beds.workloads import Work, run, workloads
from octavo.core.batching import BATCHING_MODES
from octavo.core.preemption import VICTIM_POLICIES
from octavo.core.waiting_orders import WAITING_ORDERS

FEWER = settings().max_examples // 3
"""Examples of the narrower laws; the profile sets how many (make fuzz: more)."""


@given(workloads, st.integers(5, 9), st.integers(1, 24), st.integers(1, 6), st.booleans())
def test_pressure_never_changes_an_answer(
    workload: list[Work], num_blocks: int, budget: int, max_num_seqs: int, prefix_caching: bool
) -> None:
    """R99, R111: chunks, evictions, preemptions, neighbours: batched = alone."""
    bed = CoreBed(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=prefix_caching,
    )
    run(workload, bed)


@given(
    workloads,
    st.sampled_from(sorted(WAITING_ORDERS)),
    st.sampled_from(sorted(VICTIM_POLICIES)),
    st.sampled_from(sorted(BATCHING_MODES)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_no_policy_changes_an_answer(
    workload: list[Work], policy: str, victim: str, mode: str, limits: tuple[int, int]
) -> None:
    """Order, victims and batching decide when, never what; all in a pool that is too small."""
    bed = CoreBed(
        num_blocks=7,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        scheduling_policy=policy,
        victim_policy=victim,
        batching_mode=mode,
        skip_limit=limits[0],
        priority_ageing_steps=limits[1],
    )
    run(workload, bed)


@given(workloads, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=FEWER)
def test_any_chunk_equals_the_whole(workload: list[Work], one: int, other: int) -> None:
    """R111: two chunk sizes, in a pool with room for everybody, and no chunks at all."""
    for settings_of in (
        {"max_num_batched_tokens": one},
        {"max_num_batched_tokens": other},
        {"max_num_batched_tokens": 40, "enable_chunked_prefill": False},
    ):
        run(workload, CoreBed(**settings_of))


@given(workloads, st.permutations(range(8)))
@settings(max_examples=FEWER)
def test_any_order_of_arrival_gives_the_same_answers(
    workload: list[Work], order: list[int]
) -> None:
    """Who came first decides when, never what."""
    shuffled = [workload[i] for i in order if i < len(workload)]
    moved = [replace(work, arrival_step=i) for i, work in enumerate(shuffled)]
    run(moved, CoreBed(num_blocks=8, max_num_batched_tokens=9))


@given(workloads, st.integers(1, 9), st.data())
@settings(max_examples=FEWER)
def test_a_prefix_hit_equals_a_fresh_run(
    workload: list[Work], budget: int, data: st.DataObject
) -> None:
    """The same workload twice through one cache, parts of it evicted at random meanwhile."""
    bed = CoreBed(num_blocks=24, max_num_batched_tokens=budget)

    def evict(step: int) -> None:
        if step % 3 == 0:
            kv = bed.scheduler.kv
            evicted = kv.cache.evict(data.draw(st.integers(0, 3)))
            kv.pool.release(evicted)
            for block_id in evicted:
                bed.model.poison(block_id)

    run(workload, bed, evict)
    run(workload, bed, evict)


@given(workloads, st.integers(1, 9), st.booleans(), st.data())
@settings(max_examples=FEWER)
def test_preempted_equals_undisturbed(
    workload: list[Work], budget: int, prefix_caching: bool, data: st.DataObject
) -> None:
    """R99, C14: anybody may be preempted after any step."""
    bed = CoreBed(max_num_batched_tokens=budget, enable_prefix_caching=prefix_caching)
    num_left = 12

    def preempt(step: int) -> None:
        nonlocal num_left
        running = sorted(bed.scheduler.running)
        if running and num_left and data.draw(st.booleans()):
            num_left -= 1
            assert bed.scheduler.preempt(data.draw(st.sampled_from(running)))

    run(workload, bed, preempt)
