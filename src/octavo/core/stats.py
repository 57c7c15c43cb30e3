"""A snapshot of the scheduler, for metrics and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .scheduler import Scheduler


class SchedulerStats(NamedTuple):
    """Where things stand; the second half counts since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Cached and used by nobody: as good as free."""
    num_preemptions: int
    prefix_queries_tokens: int
    """Known tokens of all first admissions."""
    prefix_hits_tokens: int
    """Of these, found in the prefix cache; what preempted requests find again does not count."""
    recomputed_tokens: int
    """Computed before a preemption, and not found again after it (C5)."""
    steps: int


def stats_of(scheduler: Scheduler) -> SchedulerStats:
    """A snapshot, cheap enough for every step."""
    kv, journal = scheduler.kv, scheduler.journal
    return SchedulerStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=kv.pool.num_blocks,
        num_free_blocks=kv.pool.num_free,
        num_cached_blocks=kv.cache.num_evictable,
        num_preemptions=journal.num_preemptions,
        prefix_queries_tokens=journal.queries_tokens,
        prefix_hits_tokens=journal.hits_tokens,
        recomputed_tokens=journal.recomputed_tokens,
        steps=journal.steps,
    )
