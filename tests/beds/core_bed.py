"""A scheduler over a TapeModel, audited after every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from beds.tape_model import TapeModel
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.event_log import Event, Reason
from octavo.core.scheduler import Scheduler
from octavo.messages import SMALL_MODEL, ModelCosts, SchedulerOutput, TokenEvent
from octavo.request import Request, Status
from octavo.sampling_params import SamplingParams

MAX_IDLE_STEPS = 3
"""Steps in a row that may schedule nothing while somebody waits (C2)."""


class CoreBed:
    """Adds requests, steps, and checks after each step what must hold after any step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 10_000,
        scripts: Mapping[int, Sequence[int]] | None = None,
        faults: Mapping[int, int] | None = None,
        num_slots: tuple[int, int] = (0, 0),
        costs: ModelCosts = SMALL_MODEL,
        **settings: object,
    ) -> None:
        in_cache = {f.name for f in fields(CacheConfig)}
        cache = {name: value for name, value in settings.items() if name in in_cache}
        rest = {name: value for name, value in settings.items() if name not in in_cache}
        self.config = SchedulerConfig(**rest)  # type: ignore[arg-type]
        self.cache_config = CacheConfig(block_size=block_size, **cache)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.config,
            self.cache_config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_slots=num_slots,
            costs=costs,
        )
        self.model = TapeModel(
            num_blocks=num_blocks,
            block_size=block_size,
            scripts=scripts,
            faults=faults,
            num_slots=num_slots,
        )
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, TokenEvent] = {}
        self.requests: dict[int, Request] = {}
        self._num_idle_steps = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        scope: str = "",
        leader: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        tenant: str = "",
        **params: object,
    ) -> int:
        """Queue a request; its id is its arrival number."""
        request_id = len(self.requests)
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(**params),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            cache_scope=scope,
            eos_token_ids=eos_token_ids,
            leader=None if leader is None else self.requests[leader],
            priority=priority,
            tenant=tenant,
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        return request_id

    def step(self, in_flight: Callable[[], object] | None = None) -> SchedulerOutput:
        """One step; `in_flight` runs between its plan and its result."""
        decoding = [r for r in self.scheduler.running.values() if r.num_output_tokens]
        decoding = [r for r in decoding if r.num_computed_tokens == r.num_tokens - 1]
        plan = self.scheduler.schedule()
        rows = {entry.row for entry in plan.scheduled}
        if self.scheduler.config is not self.config:
            decoding = []  # the budget was changed under way: it may be too small for all
        for request in decoding:  # the promise about the gap between two tokens
            assert request.status is not Status.RUNNING or request.row in rows, "left out"
        self._check(plan)
        self.scheduler.audit()
        handle = self.model.submit(plan)
        if in_flight is not None:
            in_flight()
            self.scheduler.audit()
        self.take(self.scheduler.update_from_output(plan, self.model.collect(handle)))
        self.scheduler.audit()
        return plan

    def take(self, events: list[TokenEvent]) -> None:
        """Fold events into outputs."""
        for event in events:
            assert event.request_id not in self.ends, "an event came after the last one"
            self.outputs[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.ends[event.request_id] = event

    def run(self, max_steps: int = 100_000) -> CoreBed:
        """Step until nobody is left; a scheduler that makes no progress fails."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert not self.scheduler.has_unfinished(), f"not done after {max_steps} steps"
        return self

    def set_rates(
        self,
        *,
        us_per_token: float,
        store: tuple[float, float] = (1.0, 1.0),
        load: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """As if measured for long: what a token costs, and a block to and from RAM and file."""
        rates = self.scheduler.rates
        rates._us_per_token = {1: us_per_token}
        ways = {"store": store, "load": load}
        rates._us_per_block = {(kind, i): us[i] for kind, us in ways.items() for i in (0, 1)}

    def reasons(self, request_id: int) -> list[Reason]:
        """The story of a request in one word each."""
        return [event.reason for event in self.scheduler.event_log.of_request(request_id)]

    def events(self, reason: Reason) -> list[Event]:
        return [event for event in self.scheduler.event_log if event.reason is reason]

    def ran(self) -> list[set[int]]:
        """Who ran in each step."""
        return [set(trace.num_new_tokens) for trace in self.model.traces]

    def num_computed(self) -> int:
        """Tokens computed in all steps together."""
        return sum(sum(trace.num_new_tokens.values()) for trace in self.model.traces)

    def _check(self, plan: SchedulerOutput) -> None:
        rows = [entry.row for entry in plan.scheduled]
        num_tokens = sum(entry.num_new_tokens for entry in plan.scheduled)
        assert len(set(rows)) == len(rows), "a row is scheduled twice"
        assert len(rows) <= self.config.max_num_seqs
        assert num_tokens == plan.num_scheduled_tokens <= self.config.token_budget
        assert all(entry.num_new_tokens > 0 for entry in plan.scheduled)
        assert {start.row for start in plan.starts} <= set(rows), "a start computes nothing"
        stuck = not plan.scheduled and self.scheduler.has_unfinished()
        self._num_idle_steps = self._num_idle_steps + 1 if stuck else 0
        assert self._num_idle_steps <= MAX_IDLE_STEPS, "no progress"


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The undisturbed twin: what a request answers with the whole engine to itself."""
    num_blocks = (len(prompt) + max_tokens) // 4 + 1
    bed = CoreBed(num_blocks=num_blocks, max_num_batched_tokens=10_000, enable_prefix_caching=False)
    bed.add(prompt, max_tokens)
    return bed.run().outputs[0]
