"""A snapshot of the scheduler, for metrics and benchmarks."""

from __future__ import annotations

from typing import NamedTuple


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
