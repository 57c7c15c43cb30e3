"""What the scheduler counts and logs about the life of requests, kept out of its decisions."""

from __future__ import annotations

from ..request import Request, Status
from .event_log import EventLog, Reason


class Journal:
    """Counters since the start (see SchedulerStats), and events with their reasons."""

    def __init__(self, event_log: EventLog) -> None:
        self.event_log = event_log
        self.waiting_for: dict[int, Reason] = {}
        """Why each waiting request waits, as last logged, by id."""
        self.num_dropped: dict[int, int] = {}
        """Tokens that each preempted request had computed, by id."""
        self.hits_tokens = 0
        self.num_preemptions = 0
        self.queries_tokens = 0
        self.recomputed_tokens = 0
        self.starved: int | None = None
        """The first running request that the last step's budget did not reach, as logged."""
        self.steps = 0

    def next_step(self) -> int:
        """Open a new step; its number."""
        self.steps += 1
        self.event_log.step = self.steps
        return self.steps

    def hold(self, request: Request, reason: Reason, *detail: int) -> bool:
        """A waiting request goes on waiting; logged when the reason changes. Always False."""
        if self.waiting_for.get(request.request_id) is not reason:
            self.waiting_for[request.request_id] = reason
            self.event_log.record(reason, request.request_id, *detail)
        return False

    def starve(self, request: Request, num_wanted: int) -> None:
        """The budget ends before this running request; logged when it is not the one of before."""
        if self.starved != request.request_id:
            self.starved = request.request_id
            self.event_log.record(Reason.TOKEN_BUDGET, request.request_id, num_wanted, 0)

    def start(self, request: Request, num_hits: int) -> None:
        """A request, still waiting or preempted, starts with `num_hits` tokens from the cache."""
        request_id, num_tokens = request.request_id, request.num_tokens
        self.waiting_for.pop(request_id, None)
        if request.status is Status.PREEMPTED:
            # What it finds again is its own: a hit would be counted twice (C5).
            self.recomputed_tokens += max(0, self.num_dropped.pop(request_id) - num_hits)
            self.event_log.record(Reason.RESUMED, request_id, num_tokens, num_hits)
            return
        self.event_log.record(Reason.ADMITTED, request_id, num_tokens, num_hits)
        if request.leader is not None:  # the n answers of a prompt count once (C65)
            self.event_log.record(Reason.FORKED, request_id, num_hits)
            return
        self.queries_tokens += num_tokens
        self.hits_tokens += num_hits
        if num_hits:
            self.event_log.record(Reason.PREFIX_HIT, request_id, num_hits)

    def preempt(self, victim: Request, needy: Request) -> None:
        """`victim` is about to lose its blocks to `needy`."""
        request_id, num_computed = victim.request_id, victim.num_computed_tokens
        self.num_preemptions += 1
        self.num_dropped[request_id] = num_computed
        self.event_log.record(Reason.PREEMPTED, request_id, num_computed, needy.request_id)

    def end(self, request: Request, reason: str, message: str) -> None:
        """A request ends, in whatever state it is."""
        request_id = request.request_id
        self.waiting_for.pop(request_id, None)
        self.num_dropped.pop(request_id, None)
        if reason == "error":
            self.event_log.record(Reason.FAULT, request_id, message)
        elif reason == "abort":
            self.event_log.record(Reason.ABORTED, request_id, request.num_output_tokens)
        else:
            self.event_log.record(Reason.FINISHED, request_id, reason, request.num_output_tokens)
