"""Why things happened: every decision of the scheduler leaves a reason code here.

Always on, so it must be cheap: nothing is recorded for a token, only for a change in a request's
life, and a waiting request's reason only when it changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

DEFAULT_CAPACITY = 8192


class Reason(Enum):
    """What was decided, or why not. In brackets: what an event's `detail` holds."""

    __hash__ = object.__hash__  # Enum's own is Python, and a third of the time of an event

    TOKEN_BUDGET = "token_budget"
    """Not in this step: its token budget is spent. (tokens wanted, tokens left)"""
    NO_BLOCKS = "no_blocks"
    """Not admitted: its known tokens do not fit. (blocks wanted, blocks available)"""
    SEQS_FULL = "seqs_full"
    """Not admitted: max_num_seqs requests run. (running)"""
    PREEMPTION_STEP = "preemption_step"
    """Not admitted: this step preempted a request (R105). ()"""
    PROMPT_PENDING = "prompt_pending"
    """Not admitted: the first of its n answers still computes their prompt. (tokens to come)"""
    BATCHING_MODE = "batching_mode"
    """Not admitted: the batching mode lets nobody join now. (running)"""
    GRAMMAR_PENDING = "grammar_pending"
    """Not queued yet: its grammar is being compiled. ()"""
    ADMITTED = "admitted"
    """Waiting -> running. (known tokens, tokens found in the prefix cache)"""
    RESUMED = "resumed"
    """Preempted -> running. (known tokens, tokens of it still in the cache)"""
    PASSED_BY = "passed_by"
    """A smaller request was admitted while this one did not fit. (that request)"""
    PREFIX_HIT = "prefix_hit"
    """A first admission reuses cached tokens. (tokens)"""
    FORKED = "forked"
    """A first admission shares the prompt of the first of its n answers. (tokens)"""
    PREEMPTED = "preempted"
    """Running -> preempted. (tokens computed until then, request that needed the blocks)"""
    SWAPPED = "swapped"
    """A preempted request's K/V are kept in a tier. (blocks)"""
    TIERS_FULL = "tiers_full"
    """They are not, and will be recomputed: no room. (blocks, slots that could be had)"""
    ESTIMATED = "estimated"
    """What either would cost, by measured rates or by the book. (us to swap out and in, us to
    recompute)"""
    LOADED = "loaded"
    """K/V come back from a tier, of a cached prefix or its own. (blocks)"""
    TIER_SLOW = "tier_slow"
    """They do not: computing them again is quicker. (blocks, us to load them)"""
    LOST = "lost"
    """They could not be read back, and are computed again. ()"""
    FINISHED = "finished"
    """Ended by a stop rule. (finish reason, output tokens)"""
    ABORTED = "aborted"
    """Ended from outside. (output tokens)"""
    FAULT = "fault"
    """Its row failed; it ends alone. (message)"""
    EVICTED = "evicted"
    """Cached blocks were given up for new ones; no request. (blocks)"""
    SAVED = "saved"
    """Such blocks were kept in a tier; no request. (blocks)"""
    DROPPED = "dropped"
    """Cached prefixes in the tiers were given up for others; no request. (blocks)"""


class Event(NamedTuple):
    """One decision."""

    step: int
    request_id: int | None
    reason: Reason
    detail: tuple[int | str, ...]


class EventLog:
    """The last `capacity` events, and how often each reason came in all."""

    __slots__ = ("_events", "counts", "step")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self.counts: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.step = 0
        """Stamped on every event; the scheduler moves it."""

    def record(self, reason: Reason, request_id: int | None, *detail: int | str) -> None:
        """Append an event of the current step."""
        self._events.append(Event(self.step, request_id, reason, detail))
        self.counts[reason] += 1

    def of_request(self, request_id: int) -> list[Event]:
        """The story of one request, oldest first."""
        return [event for event in self._events if event.request_id == request_id]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)
