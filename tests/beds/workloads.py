"""Workloads drawn at random for a CoreBed, and how they are run against their lone twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from beds.core_bed import CoreBed
from beds.core_bed import alone as compute_alone


@dataclass(frozen=True)
class Work:
    """One request: it arrives in a step, shares a prefix with others, and has its own tail."""

    arrival_step: int
    prompt: tuple[int, ...]
    max_tokens: int
    scope: str
    n: int = 1


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
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
    )


workloads = st.lists(works(), min_size=1, max_size=8)


@cache
def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return compute_alone(prompt, max_tokens)


def add(bed: CoreBed, work: Work, work_of: dict[int, Work]) -> None:
    """The n answers of one request; the first computes the prompt. Priority and tenant follow
    from the prompt: most policies do not look at them."""
    leader: int | None = None
    for _ in range(work.n):
        request_id = bed.add(
            work.prompt,
            work.max_tokens,
            scope=work.scope,
            priority=work.prompt[-1],
            tenant=str(work.prompt[0]),
            leader=leader,
        )
        work_of[request_id] = work
        leader = request_id if leader is None else leader


def run(workload: list[Work], bed: CoreBed, meanwhile: Callable[[int], None] | None = None) -> None:
    """Let each request arrive in its step, run to the end, and compare with the lone twins."""
    work_of: dict[int, Work] = {}
    queue = sorted(workload, key=lambda work: work.arrival_step)
    for step in range(2000):
        while queue and queue[0].arrival_step <= step:
            work = queue.pop(0)
            if work.max_tokens <= bed.scheduler.max_output_tokens(len(work.prompt)):
                add(bed, work, work_of)
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
