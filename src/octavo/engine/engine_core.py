"""The engine's loop: who runs next, compute it, tell everybody. One step on one screen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ..core.dump import dump
from ..core.scheduler import Scheduler
from ..errors import EngineDead
from ..messages import RowFault, SchedulerOutput, StepResult, TokenEvent
from ..outputs import StreamEvent
from ..request import Request, Status
from ..worker.executor import Executor
from .grammar import Grammars
from .metrics import Metrics
from .output_processor import OutputProcessor
from .prefix_keeper import PrefixKeeper
from .queue_limits import QueueLimits
from .tokenizer import Tokenizer

logger = logging.getLogger("octavo")

MAX_IDLE_STEPS = 3
"""Steps in a row that may schedule nothing while requests wait; then the engine says so."""


class EngineCore:
    """Scheduler, executor and text, stepped by one thread. `now` is monotonic, in seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        grammars: Grammars,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.grammars = grammars
        self.metrics = metrics
        self.now = now
        self.outputs = OutputProcessor(tokenizer, metrics, self._finish, now)
        self.prefixes = PrefixKeeper(scheduler, executor, now)
        self.queue = QueueLimits(scheduler.config)
        """For front ends that turn requests away; those that enter leave it here."""
        self._deadlines: list[tuple[float, int, bool]] = []
        """Heap: (time, request id, whether it is only for those that have not started)."""
        self._num_idle_steps = 0
        metrics.watch(scheduler.stats)

    def add(self, requests: list[Request]) -> None:
        """Queue the n requests of one prompt. Raises RequestError; then none of them is queued."""
        added: list[int] = []
        try:
            for request in requests:
                added.append(request.request_id)
                self.grammars.start(request)
                self.scheduler.add(request)
        except Exception:
            for request_id in added:
                self._finish(request_id, "abort")
            raise
        self.outputs.add(requests)
        for request in requests:
            for seconds, only_queued in (
                (request.params.timeout, False),
                (self.scheduler.config.max_queue_seconds, True),
            ):
                if seconds is not None:
                    deadline = request.arrival_time + seconds
                    heappush(self._deadlines, (deadline, request.request_id, only_queued))

    def end(self, request_id: int, reason: str, error: str | None = None) -> StreamEvent | None:
        """End a request from outside and free its blocks; None if it is not running any more."""
        self._finish(request_id, reason)
        self.queue.leave(request_id)
        return self.outputs.end(request_id, reason, error)

    def _finish(self, request_id: int, reason: str) -> bool:
        self.grammars.drop(request_id)
        return self.scheduler.finish(request_id, reason)

    def step(self) -> list[StreamEvent]:
        """Schedule, compute, and give each request that moved its event."""
        if self.prefixes.due <= self.now():
            self.prefixes.keep()
        expired = self._expire() if self._deadlines else []
        plan = self.scheduler.schedule()
        if not (plan.scheduled or plan.transfers):
            return expired + self._idle()
        self._num_idle_steps = 0
        self.outputs.started(plan.starts)
        if self.grammars.live:
            plan = self.grammars.masked(plan, self.scheduler.requests)
        for start in plan.starts:
            self.queue.leave(start.request_id)
        try:
            result = self._compute(plan)
        except BaseException:  # Ctrl-C: nothing comes of this step, but no block is lost with it
            self._take(plan, _failed(plan, "interrupted"))
            raise
        return expired + self._take(plan, result)

    def _expire(self) -> list[StreamEvent]:
        """End those whose time is over, before anything is computed for them."""
        now, live, events = self.now(), self.scheduler.requests, list[StreamEvent]()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, only_queued = heappop(self._deadlines)
            request = live.get(request_id)
            if request and not (only_queued and request.status is not Status.WAITING):
                event = self.end(request_id, "timeout")
                events += [] if event is None else [event]
        if len(self._deadlines) > 64 + 4 * len(live):  # mostly of requests that have ended
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapify(self._deadlines)
        return events

    def _constrained(self, event: TokenEvent) -> TokenEvent:
        """The event, with the tokens and the end that its grammar puts there."""
        taken = self.grammars.advance(event, self.scheduler.extend)
        if taken.finish_reason != event.finish_reason:
            reason = "error" if taken.error is not None else "stop"
            self.scheduler.finish(event.request_id, reason)
        return taken

    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_unfinished()

    def _take(self, plan: SchedulerOutput, result: StepResult) -> list[StreamEvent]:
        events = self.scheduler.update_from_output(plan, result)
        if self.grammars.live:
            events = [self._constrained(event) for event in events]
        self.metrics.stepped(plan.num_scheduled_tokens, len(result.faults))
        return self.outputs.process(events)

    def close(self, *, healthy: bool = True) -> None:
        """Keep cached prefixes, if that is wanted, and give back memory and files."""
        if healthy:
            self.prefixes.keep(at_once=True)
        self.executor.close()
        self.scheduler.close()

    def _compute(self, plan: SchedulerOutput) -> StepResult:
        """Run the step; a fault of the whole step ends the requests in it, not the engine."""
        try:
            return self.executor.collect(self.executor.submit(plan))
        except Exception as fault:
            logger.exception("step %d failed", plan.step)
            message = f"internal error in the step of this request: {type(fault).__name__}"
            return _failed(plan, message)

    def _idle(self) -> list[StreamEvent]:
        """Nothing was scheduled: normal without requests, our own bug with them."""
        if not self.scheduler.has_unfinished():
            return []
        self._num_idle_steps += 1
        if self._num_idle_steps < MAX_IDLE_STEPS:
            return []
        self._num_idle_steps = 0
        stats = self.scheduler.stats()
        logger.error("no progress: %s", dump(self.scheduler))
        message = "the engine makes no progress with this request; it was given up"
        events = [
            self.end(request_id, "error", message) for request_id in list(self.outputs.answers)
        ]
        if self.scheduler.has_unfinished():
            raise EngineDead(f"the scheduler holds requests that nobody waits for: {stats}")
        return [event for event in events if event is not None]


def _failed(plan: SchedulerOutput, message: str) -> StepResult:
    """The result of a step in which every row failed."""
    return StepResult(
        plan.step, (), tuple(RowFault(entry.row, message) for entry in plan.scheduled)
    )
