"""What to look at when nothing moves: queue, blocks and reasons, as text for a log."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from .event_log import Reason

if TYPE_CHECKING:
    from ..request import Request
    from .scheduler import Scheduler

MAX_LINES = 20
"""Of running and of waiting requests each; a dump of thousands helps nobody."""


def dump(scheduler: Scheduler) -> str:
    """A line on the whole, then one for each request with its last decisions."""
    stats = scheduler.stats()
    lines = [
        f"step {stats.steps}: {stats.num_running} running, {stats.num_waiting} waiting, "
        f"{stats.num_free_blocks} free and {stats.num_cached_blocks} evictable "
        f"of {stats.num_blocks} blocks, {len(scheduler.free_rows)} free rows, "
        f"{len(scheduler.in_flight)} steps in flight"
    ]
    for name, requests in (("running", scheduler.running.values()), ("waiting", scheduler.waiting)):
        lines += [f"{name}: {_line(scheduler, r)}" for r in islice(requests, MAX_LINES)]
    return "\n  ".join(lines)


def _line(scheduler: Scheduler, request: Request) -> str:
    events = scheduler.event_log.of_request(request.request_id)[-4:]
    story = ", ".join(f"{e.reason.value}{list(e.detail)} in step {e.step}" for e in events)
    waits = scheduler.journal.waiting_for.get(request.request_id)
    reason = f" for {waits.value}" if isinstance(waits, Reason) else ""
    return f"{request}{reason}; priority {request.priority}; {story or 'no events'}"
