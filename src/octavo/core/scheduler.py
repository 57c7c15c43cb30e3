"""Who computes what in the next step, and what its result means for each request.

There are no phases. A request has tokens that it knows and tokens that are computed (their K/V
exist), and every step lets the second chase the first (R4, R5): prefill, chunk, decode, resume
and recompute are one path. Running requests come first, in the order in which they were admitted,
then waiting ones in the order of the policy (R103), within four limits: max_num_seqs, the token
budget, max_model_len and the free blocks (R6-R9).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heappop, heappush

from ..config import CacheConfig, SchedulerConfig
from ..messages import (
    SMALL_MODEL,
    KeptRun,
    ModelCosts,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    TokenEvent,
    Transfer,
)
from ..request import Request, Status
from .admission import Admission
from .audit import audit
from .batching import BATCHING_MODES
from .event_log import EventLog, Reason
from .journal import Journal
from .kv_cache_manager import KV_MANAGERS
from .limits import Limits
from .policy import by_name
from .preemption import PREEMPTION_MODES, VICTIM_POLICIES
from .radix_cache import Match
from .rates import Rates
from .stats import SchedulerStats, stats_of
from .stop_rules import find_stop
from .waiting_orders import WAITING_ORDERS

RUNNING = Status.RUNNING  # looking a member up costs as much as all else that a loop asks


class Draft:
    """A step's plan while it is made."""

    __slots__ = ("budget", "entries", "num_blocks_owed", "preempted", "starts", "token_budget")

    def __init__(self, budget: int) -> None:
        self.token_budget = self.budget = budget
        """Tokens left to schedule."""
        self.entries: dict[Request, ScheduledRequest] = {}
        self.starts: list[NewRequest] = []
        self.num_blocks_owed = 0
        """Blocks that prefills in flight will still ask for. One that is cut in this very step
        took all that was left of the budget, so nobody is admitted beside it."""
        self.preempted = False

    def plan(self, step: int, transfers: tuple[Transfer, ...]) -> SchedulerOutput:
        num_tokens = self.token_budget - self.budget
        entries = tuple(self.entries.values())
        return SchedulerOutput(step, tuple(self.starts), entries, num_tokens, transfers)


class Scheduler:
    """Owns every request from `add` until it finishes. No clock, no threads, no randomness."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        num_slots: tuple[int, int] = (0, 0),
        costs: ModelCosts = SMALL_MODEL,
        event_log: EventLog | None = None,
    ) -> None:
        """`num_slots`: room for blocks in the tiers below the pool, RAM and file."""
        config = scheduler_config
        self.config = config
        self.event_log = EventLog() if event_log is None else event_log
        self.journal = Journal(self.event_log)
        capacity = num_blocks * cache_config.block_size
        max_prompt_tokens = None if config.enable_chunked_prefill else config.token_budget
        self.limits = Limits(max_model_len, capacity, max_prompt_tokens)
        self.rates = Rates(num_slots, config.token_budget, costs)
        manager = KV_MANAGERS[cache_config.kv_reservation]
        self.kv = manager(cache_config, self.limits, self.rates, self.event_log)
        self.requests: dict[int, Request] = {}
        """Live ones, by id."""
        self.running: dict[int, Request] = {}
        """By id, in order of admission."""
        order = by_name("scheduling_policy", config.scheduling_policy, WAITING_ORDERS)
        self.waiting = order(config)
        means = by_name("preemption_mode", config.preemption_mode, PREEMPTION_MODES)
        self._preemption = means(config, self.rates)
        victims = by_name("victim_policy", config.victim, VICTIM_POLICIES)
        self.victims = victims(lambda request: self._preemption.cost(request, self.kv))
        self.batching = by_name("batching_mode", config.batching_mode, BATCHING_MODES)()
        self.free_rows = list(range(config.max_num_seqs))
        """Heap: the worker's persistent rows that nobody has."""
        self.in_flight: dict[int, tuple[Request, ...]] = {}
        """Requests of each plan whose result has not come, by step."""
        self._admission = Admission(self)

    def close(self) -> None:
        """Nothing will be asked any more."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that can never run (C1)."""
        self.limits.check(request)
        assert request.request_id not in self.requests, "two live requests have one id"
        assert request.status is Status.WAITING, "a request was added twice"
        self.requests[request.request_id] = request
        self.waiting.push(request, self.journal.steps)

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Output tokens that the limits leave to such a prompt; below 1: it can't run."""
        return self.limits.max_output_tokens(num_prompt_tokens)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Nothing is scheduled when nothing can run.

        May be called again before the result of the plan before is known: requests in flight
        then sit out, keep their blocks and are nobody's victims.
        """
        step = self.journal.next_step()
        busy = {request for requests in self.in_flight.values() for request in requests}
        draft = Draft(self.config.token_budget)
        self._schedule_running(draft, busy)
        self._schedule_padding(draft, busy)
        self._admission.admit(draft, busy)
        if draft.entries:
            self.in_flight[step] = tuple(draft.entries)
        return draft.plan(step, self.kv.take_transfers())

    def _schedule_running(self, draft: Draft, busy: Container[Request]) -> None:
        block_size = self.kv.block_size
        for request in tuple(self.running.values()):
            num_tokens = len(request.token_ids)
            num_computed = request.num_computed_tokens
            if request in busy:
                draft.num_blocks_owed += self.kv.num_blocks_owed(request)
                continue
            if request.status is not RUNNING:  # a victim of this step
                continue
            num_new = min(num_tokens - num_computed, draft.budget)
            if num_new == 0:
                return self.journal.starve(request, num_tokens - num_computed)
            end = num_computed + num_new
            new_block_ids: tuple[int, ...] = ()
            if end > len(request.block_ids) * block_size:
                allocated = self._allocate_or_preempt(request, end, draft, busy)
                if allocated is None:
                    continue
                new_block_ids = allocated
            assert request.row is not None
            draft.budget -= num_new
            draft.entries[request] = ScheduledRequest(
                request.row, num_computed, num_new, end == num_tokens, new_block_ids
            )
        self.journal.starved = None

    def _schedule_padding(self, draft: Draft, busy: Container[Request]) -> None:
        """Finished rows of a static batch compute their last position once more."""
        for request in self.batching.padding:
            if draft.budget and request not in busy:
                assert request.row is not None
                draft.budget -= 1
                draft.entries[request] = ScheduledRequest(
                    request.row, request.num_computed_tokens - 1, 1, samples=False
                )

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, draft: Draft, busy: Container[Request]
    ) -> tuple[int, ...] | None:
        """Blocks for a running request, others yielding theirs; None if it can't join."""
        while (block_ids := self.kv.allocate(request, num_tokens)) is None:
            if self._drop_padding():
                continue
            running, outranks = self.running.values(), self.waiting.outranks
            equals = (other for other in running if not outranks(other, request))
            victim = self.victims.choose(self.waiting.weaker(request, running) or equals)
            if victim in busy:
                return None  # not now: what is in flight has to come back first (C22)
            self.give_way(victim, request, draft)
            if victim is request:
                return None
        return block_ids

    def give_way(self, victim: Request, needy: Request, draft: Draft) -> None:
        """A running request leaves this step, and its blocks, to `needy`."""
        draft.preempted = True
        entry = draft.entries.pop(victim, None)
        if entry is not None:  # it was placed in this very step (C7)
            draft.budget += entry.num_new_tokens
        self._preempt(victim, needy)

    def import_prefixes(self, runs: list[KeptRun]) -> None:
        """Begin with cached prefixes that the tiers hold already."""
        self.kv.import_prefixes(runs)

    def preempt(self, request_id: int) -> bool:
        """Make a running request yield its blocks between two steps; False if it doesn't run."""
        request = self.running.get(request_id)
        if request is None:
            return False
        assert not self.in_flight, "a step is in flight"
        self._preempt(request, request)
        return True

    def _preempt(self, victim: Request, needy: Request) -> None:
        self.journal.preempt(victim, needy)
        del self.running[victim.request_id]
        if not self.running:
            self._drop_padding()
        self._preemption.preempt(victim, self.kv)
        self._free_row(victim)
        victim.status = Status.PREEMPTED
        victim.num_preemptions += 1
        self.waiting.put_back(victim)

    def start(self, request: Request, match: Match | None, num_new: int, draft: Draft) -> None:
        """Waiting or preempted -> running, with the whole state that the worker needs."""
        self.waiting.admit(request)
        self.kv.start(request, match)
        num_hits = request.num_computed_tokens
        end = num_hits + num_new
        allocated = self.kv.allocate(request, end)
        assert allocated is not None, "admission promised blocks that are not there"
        self.journal.start(request, num_hits)
        if request.status is Status.WAITING:
            leader = request.leader
            request.num_cached_tokens = num_hits if leader is None else leader.num_cached_tokens
        row = request.row = heappop(self.free_rows)
        request.status = RUNNING
        self.running[request.request_id] = request
        draft.starts.append(request.start_message())
        draft.entries[request] = ScheduledRequest(
            row, num_hits, num_new, end == request.num_tokens, tuple(request.block_ids)
        )
        draft.budget -= num_new

    def update_from_output(self, plan: SchedulerOutput, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed; what it means for each request, in the plan's order.

        Requests that were finished meanwhile are passed over; their blocks are freed here.
        """
        assert plan.step == result.step, "this is the result of another step"
        if result.timing is not None:
            self.rates.observe(result.timing)
        faults = {fault.row: fault for fault in result.faults}
        sampled = {token.row: token for token in result.sampled}
        scored = {part.row: part.logprobs for part in result.prompt_logprobs}
        events: list[TokenEvent] = []
        requests = self.in_flight.pop(plan.step, ())
        for entry, request in zip(plan.scheduled, requests, strict=True):
            if request.status is not RUNNING:
                if request.row is not None and request not in self.batching.padding:
                    self._free(request)
                continue
            request_id = request.request_id
            if faults and entry.row in faults:
                _, message, retry, refused = faults[entry.row]
                if retry:
                    self.event_log.record(Reason.LOST, request.request_id)
                    self.kv.free(request, publish=False)
                    request.num_computed_tokens = 0
                    self._preempt(request, request)
                    continue
                self._end(request, "error", message)
                events.append(TokenEvent(request_id, (), (), "error", None, message, refused))
                continue
            request.num_computed_tokens = entry.num_computed_tokens + entry.num_new_tokens
            if scored and entry.row in scored:
                request.prompt_logprobs += scored[entry.row]
            if not entry.samples:
                continue
            _, token_id, logprobs = sampled[entry.row]
            request.token_ids.append(token_id)
            finish_reason, stop_reason = find_stop(request, token_id, self.limits.max_model_len)
            if finish_reason is not None:
                self._end(request, finish_reason)
            elif entry.num_new_tokens > 1 or entry.num_computed_tokens < request.num_prompt_tokens:
                # A prefill is done, and its last row, which attends to all others, was good.
                self.kv.publish(request)
            parts = () if logprobs is None else (logprobs,)
            events.append(TokenEvent(request_id, (token_id,), parts, finish_reason, stop_reason))
        if not self.running:
            self._drop_padding()
        return events

    def extend(self, request_id: int, token_ids: Sequence[int]) -> TokenEvent:
        """Append tokens that nobody has to sample to a running request, between two steps; later
        steps compute them like any that are known. Those behind an end are left out."""
        request = self.requests[request_id]
        num_before, stop_reason = len(request.token_ids), None
        for token_id in token_ids:
            request.token_ids.append(token_id)
            finish_reason, stop_reason = find_stop(request, token_id, self.limits.max_model_len)
            if finish_reason is not None:
                self._end(request, finish_reason)
                break
        added = tuple(request.token_ids[num_before:])
        return TokenEvent(request_id, added, (), request.finish_reason, stop_reason)

    def finish(self, request_id: int, reason: str) -> bool:
        """End a request from outside (abort, a stop string): False if it is not live any more.

        Its blocks are free at once; if a step with it is in flight, when that has come back.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason)
        return True

    def _end(self, request: Request, reason: str, message: str = "") -> None:
        self.journal.end(request, reason, message)
        request_id = request.request_id
        del self.requests[request_id]
        was_running = request.status is RUNNING
        request.status = Status.FINISHED
        request.finish_reason = reason
        if not was_running:
            self.kv.drop_swapped(request)
            self.waiting.remove(request)
            return
        del self.running[request_id]
        self.waiting.ended(request)
        if not self._in_flight(request):
            self._free(request)
        if not self.running:
            self._drop_padding()

    def _free(self, request: Request) -> None:
        """Give back blocks and row; what a failed request computed is not kept."""
        if self.running and self.batching.keep(request):
            return
        self.kv.free(request, publish=request.finish_reason != "error")
        self._free_row(request)

    def _drop_padding(self) -> bool:
        """Free the padding that no step in flight computes; False if there is none."""
        padding = self.batching.padding
        dropped = [request for request in padding if not self._in_flight(request)]
        for request in dropped:
            del padding[request]
            self.kv.free(request)
            self._free_row(request)
        return bool(dropped)

    def _in_flight(self, request: Request) -> bool:
        return any(request in requests for requests in self.in_flight.values())

    def _free_row(self, request: Request) -> None:
        assert request.row is not None
        heappush(self.free_rows, request.row)
        request.row = None

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def stats(self) -> SchedulerStats:
        """A snapshot, cheap enough for every step."""
        return stats_of(self)

    def audit(self) -> None:
        """Recount everything from scratch; an AssertionError is a bug of ours."""
        audit(self)
