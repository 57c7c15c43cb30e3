"""A stage for the real scheduler: requests with names, no model, every step written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ..config import CacheConfig, SchedulerConfig
from ..core.event_log import Event, Reason
from ..core.scheduler import Scheduler
from ..messages import (
    SMALL_MODEL,
    ModelCosts,
    SampledToken,
    SchedulerOutput,
    StepResult,
    Timing,
)
from ..request import Request
from ..sampling_params import SamplingParams

TOKEN_ID = 0
"""What a model that is not there answers."""

MAX_STEPS = 100_000
STORIES = {
    Reason.ESTIMATED: "{name}: out and in again {0} us, to compute again {1} us",
    Reason.SWAPPED: "{name}: {0} blocks are swapped out",
    Reason.LOADED: "{name}: {0} blocks are swapped in",
    Reason.PREFIX_HIT: "{name} finds {0} tokens in the prefix cache",
    Reason.EVICTED: "{0} cached blocks are evicted",
    Reason.NO_BLOCKS: "{name} waits: it needs {0} blocks, {1} are left",
}
"""What a timeline says of an event, by its reason: of its request and its details."""
SILENT = {Reason.ADMITTED, Reason.RESUMED, Reason.FINISHED, Reason.TOKEN_BUDGET}
"""Reasons that a timeline shows anyway, by who is in a step."""


class Stage:
    """Adds requests, steps, and keeps for each step who computed which positions.

    `lines` is the timeline so far; `failures` are expectations that did not come true. Without
    audit after each step it is quicker, and blocks may be held by somebody who is not on stage.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        max_model_len: int = 100_000,
        num_slots: tuple[int, int] = (0, 0),
        costs: ModelCosts = SMALL_MODEL,
        audit: bool = True,
        **settings: object,
    ) -> None:
        in_cache = {field.name for field in fields(CacheConfig)}
        cache = {name: value for name, value in settings.items() if name in in_cache}
        rest = {name: value for name, value in settings.items() if name not in in_cache}
        self.scheduler = Scheduler(
            SchedulerConfig(**rest),  # type: ignore[arg-type]
            CacheConfig(**cache),  # type: ignore[arg-type]
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_slots=num_slots,
            costs=costs,
        )
        self.audit = audit
        self.timing: Timing | None = None
        """What the following steps take, as far as the scheduler is told."""
        self.requests: dict[str, Request] = {}
        self.steps: list[dict[str, tuple[int, int]]] = []
        """By step: who computed positions [first, second)."""
        self.lines: list[str] = []
        self.failures: list[str] = []
        self._names: list[str] = []
        self._open: tuple[str, int] | None = None
        """What the steps that are not written yet have in common, and the first of them."""
        self._num_told = 0
        self._blocks = ""

    def add(
        self, name: str, prompt: int | Sequence[int], max_tokens: int, *, priority: int = 0
    ) -> Request:
        """Queue a request: a prompt by its tokens, or by their number, then shared by nobody."""
        number = len(self._names)
        token_ids = list(prompt) if isinstance(prompt, Sequence) else tokens(prompt, number + 1)
        request = Request(
            number,
            token_ids,
            SamplingParams(ignore_eos=True),
            max_tokens=max_tokens,
            priority=priority,
        )
        self.scheduler.add(request)
        self._names.append(name)
        self.requests[name] = request
        return request

    def step(self) -> dict[str, tuple[int, int]]:
        """Plan, pretend to compute, update; who computed what."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        rows = {r.row: r for requests in scheduler.in_flight.values() for r in requests}
        part = {
            self._names[rows[entry.row].request_id]: (
                entry.num_computed_tokens,
                entry.num_computed_tokens + entry.num_new_tokens,
            )
            for entry in plan.scheduled
        }
        held = {name: len(self.requests[name].block_ids) for name in part}
        self.steps.append(part)
        scheduler.update_from_output(plan, answer(plan)._replace(timing=self.timing))
        if self.audit:
            scheduler.audit()
        self._tell(plan, held)
        return part

    def run(self, until: int | None = None) -> Stage:
        """Step until nobody is left, or so many steps are done in all."""
        while self.scheduler.has_unfinished() and len(self.steps) < (until or MAX_STEPS):
            self.step()
        self._close(len(self.steps))
        return self

    def say(self, text: str) -> None:
        """A line of comment."""
        self._close(len(self.steps))
        self.lines.append(text)

    def expect(self, what: str, actual: object, wanted: object) -> None:
        """Write down whether `actual` is what the worked example says."""
        self._close(len(self.steps))
        if actual == wanted:
            self.lines.append(f"ok: {what}: {_shown(actual)}")
        else:
            text = f"{what}: {_shown(actual)}, but it should be {_shown(wanted)}"
            self.failures.append(text)
            self.lines.append(f"FAILED: {text}")

    def sets(self) -> list[str]:
        """Who was in the steps, as "ABC", without repeats in a row."""
        found: list[str] = []
        for part in self.steps:
            now = "".join(sorted(part))
            if not found or found[-1] != now:
                found.append(now)
        return found

    def order(self) -> str:
        """Names in the order in which they first ran."""
        return "".join(dict.fromkeys(name for part in self.steps for name in part))

    def _tell(self, plan: SchedulerOutput, held: dict[str, int]) -> None:
        """Steps that look alike become one line; what was decided in between has its own."""
        step = len(self.steps)
        news = [event for event in self._new_events() if event.reason not in SILENT]
        parts = []
        for name, (begin, end) in self.steps[-1].items():
            decodes = end - begin == 1 and begin > 0
            parts.append(name if decodes else f"{name}[{begin}-{end - 1}]")
        look = " ".join(parts) or "nobody"
        if self._open is None or self._open[0] != look or news:
            self._close(step - 1)
            self._open = (look, step)
        self.lines += [f"{'':17}{self._story(event)}" for event in news]
        self._blocks = " ".join(f"{name}:{count}" for name, count in held.items())

    def _close(self, last: int) -> None:
        if self._open is None:
            return
        look, first = self._open
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        stats = self.scheduler.stats()
        tail = f"blocks {self._blocks}; {stats.num_free_blocks + stats.num_cached_blocks} left"
        self.lines.append(f"{steps:16} {look:32} {tail}")
        self._open = None

    def _new_events(self) -> list[Event]:
        events = list(self.scheduler.event_log)
        new = events[self._num_told :]
        self._num_told = len(events)
        return new

    def _story(self, event: Event) -> str:
        name = "" if event.request_id is None else self._names[event.request_id]
        detail = [str(part) for part in event.detail]
        match event.reason:
            case Reason.PREEMPTED:
                needy = self._names[int(detail[1])]
                whom = "its own need can't be met" if needy == name else f"{needy} needs its blocks"
                always = self.scheduler.config.preemption_mode == "recompute"
                what = "are dropped" if always else "are kept or dropped"
                return f"{name} yields, {detail[0]} computed tokens {what}: {whom}"
            case Reason.PASSED_BY:
                return f"{name} is passed by {self._names[int(detail[0])]}"
            case _:
                story = STORIES.get(event.reason, f"{{name}} waits: {event.reason.value}")
                return story.format(*detail, name=name)


def tokens(number: int, start: int) -> list[int]:
    """So many tokens; those of different `start` have nothing in common."""
    return [start * 1_000_000 + i for i in range(number)]


def answer(plan: SchedulerOutput) -> StepResult:
    """A result of the plan: one token for each row that samples."""
    sampled = tuple(SampledToken(entry.row, TOKEN_ID) for entry in plan.scheduled if entry.samples)
    return StepResult(plan.step, sampled)


def _shown(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else str(value)
