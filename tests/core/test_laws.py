"""Laws under disturbance: what else happens never changes an answer.

Workloads are drawn at random, pools are too small on purpose. CoreBed audits after every step and
TapeModel raises when any row reads a slot that is not its own history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from beds.core_bed import CoreBed
from beds.core_bed import alone as compute_alone
from octavo.core.batching import BATCHING_MODES
from octavo.core.preemption import VICTIM_POLICIES
from octavo.core.waiting_orders import WAITING_ORDERS

FEWER = settings().max_examples // 3
"""Examples of the narrower laws; the profile sets how many (make fuzz: more)."""


@dataclass(frozen=True)
class Work:
    """One request: it arrives in a step, shares a prefix with others, and has its own tail."""

    arrival_step: int
    prompt: tuple[int, ...]
    max_tokens: int
    scope: str


@st.composite
def works(draw: st.DrawFn) -> Work:
    stem = draw(st.integers(0, 2))
    num_shared = draw(st.integers(0, 14))
    tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    return Work(
        arrival_step=draw(st.integers(0, 12)),
        prompt=(*range(stem * 100, stem * 100 + num_shared), *tail),
        max_tokens=draw(st.integers(1, 12)),
        scope=draw(st.sampled_from(["", "", "x"])),
    )


workloads = st.lists(works(), min_size=1, max_size=8)


@cache
def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return compute_alone(prompt, max_tokens)


def add(bed: CoreBed, work: Work) -> int:
    """Priority and tenant follow from the prompt: most policies do not look at them."""
    priority, tenant = work.prompt[-1], str(work.prompt[0])
    return bed.add(work.prompt, work.max_tokens, scope=work.scope, priority=priority, tenant=tenant)


def run(workload: list[Work], bed: CoreBed, meanwhile: Callable[[int], None] | None = None) -> None:
    """Let each request arrive in its step, run to the end, and compare with the lone twins."""
    work_of: dict[int, Work] = {}
    queue = sorted(workload, key=lambda work: work.arrival_step)
    for step in range(2000):
        while queue and queue[0].arrival_step <= step:
            work = queue.pop(0)
            if work.max_tokens <= bed.scheduler.max_output_tokens(len(work.prompt)):
                work_of[add(bed, work)] = work
        if not queue and not bed.scheduler.has_unfinished():
            break
        bed.step()
        if meanwhile is not None:
            meanwhile(step)
            bed.scheduler.audit()
    assert not bed.scheduler.has_unfinished()
    for request_id, work in work_of.items():
        assert bed.outputs[request_id] == alone(work.prompt, work.max_tokens)
    stats = bed.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


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
    moved = [Work(i, work.prompt, work.max_tokens, work.scope) for i, work in enumerate(shuffled)]
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
