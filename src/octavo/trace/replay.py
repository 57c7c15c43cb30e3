"""Play a recorded run again, without a model: the scheduler must decide the same, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config import CacheConfig, SchedulerConfig
from ..core.scheduler import Scheduler
from ..errors import OctavoError
from ..messages import (
    KeptRun,
    ModelCosts,
    PromptLogprobs,
    RowFault,
    SchedulerOutput,
    StepResult,
    Timing,
    TokenLogprobs,
)
from ..request import Request
from ..sampling_params import SamplingParams
from .record import (
    ENDS_AS_EOS,
    ENDS_AS_STOP,
    FORMAT,
    as_tuples,
    plan_record,
    sampled_tokens,
)

MAX_SIZE = 1 << 24
"""Of anything counted in the first line: beyond that it is damaged, and would only fill memory."""

NO_SCORE = TokenLogprobs(0.0, 1, ())
"""The scheduler counts the scores of a prompt, and never looks at one."""


class ReplayError(OctavoError):
    """The file is no recording that this version can play."""


class Outcome(NamedTuple):
    """What a replay found."""

    num_steps: int
    num_requests: int
    difference: str | None
    """Where the decisions part, or None."""
    truncated: bool
    """The file ends in the middle of a line: the recording process was killed."""


def replay_file(path: Path) -> Outcome:
    """Play a file. Raises ReplayError if it can't be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            return replay(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"{path} can't be read: {error}") from None


def replay(lines: Iterable[str]) -> Outcome:
    """Run the scheduler over what was recorded, and compare every plan."""
    player, num_requests = None, 0
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            return Outcome(player.num_steps if player else 0, num_requests, None, truncated=True)
        try:
            kind, *parts = json.loads(line)
            if player is None:
                player = Player([kind, *parts])
                continue
            difference = player.play(kind, *parts)
        except Exception as error:  # a damaged line may trip over anything
            raise ReplayError(f"line {number} can't be played: {error!r}") from None
        num_requests += kind == "add"
        if difference is not None:
            return Outcome(player.num_steps, num_requests, difference, truncated=False)
    if player is None:
        raise ReplayError("the recording is empty")
    return Outcome(player.num_steps, num_requests, None, truncated=False)


class Player:
    """A scheduler with the recorded settings, and the plans whose results have not come."""

    def __init__(self, head: list[Any]) -> None:
        if head[:2] != ["octavo", FORMAT]:
            raise ValueError(f"this is no recording of format {FORMAT}")
        scheduler, cache, sizes = head[2:]
        counts = (sizes["num_blocks"], *sizes["num_slots"], scheduler["max_num_seqs"])
        if len(counts) != 4 or not all(0 <= count <= MAX_SIZE for count in counts):
            raise ValueError(f"sizes of {counts} can't be")
        sizes["costs"] = ModelCosts(*as_tuples(sizes["costs"]))
        self.scheduler = Scheduler(SchedulerConfig(**scheduler), CacheConfig(**cache), **sizes)
        self.num_steps = 0
        self._plans: dict[int, SchedulerOutput] = {}
        self._requests: dict[int, Request] = {}

    def play(self, kind: str, *parts: Any) -> str | None:
        """One line; text where the scheduler decides otherwise than it did."""
        match kind, parts:
            case "add", (record,):
                leader = self._requests.get(record.pop("leader", None))
                request = make_request(record, leader)
                self._requests[request.request_id] = request
                self.scheduler.add(request)
            case "finish", (request_id, reason):
                if not self.scheduler.finish(request_id, reason):
                    return f"request {request_id} ended ({reason}) while it ran; now it is gone"
            case "extend", (request_id, tokens):
                for token in tokens:
                    end_as_recorded(self._requests[request_id], *token)
                self.scheduler.extend(request_id, [token_id for token_id, *_ in tokens])
            case "preempt", (request_id,):
                self.scheduler.preempt(request_id)
            case "plan", (recorded, *_):
                plan = self.scheduler.schedule()
                self.num_steps += 1
                self._plans[plan.step] = plan
                return next(differences(recorded, json.loads(json.dumps(plan_record(plan)))), None)
            case "kept", (runs,):
                self.scheduler.import_prefixes([KeptRun(*as_tuples(run)) for run in runs])
            case "result", (step, sampled, faults, timing, scored):
                plan = self._plans.pop(step)
                tokens_of = {row: token for row, *token in sampled}
                requests = self.scheduler.in_flight.get(step, ())
                for entry, request in zip(plan.scheduled, requests, strict=False):
                    end_as_recorded(request, *tokens_of.get(entry.row, (0,)))
                result = StepResult(
                    step,
                    sampled_tokens(sampled),
                    tuple(RowFault(*fault) for fault in faults),
                    tuple(PromptLogprobs(row, (NO_SCORE,) * count) for row, count in scored),
                    Timing(*as_tuples(timing)) if timing else None,
                )
                self.scheduler.update_from_output(plan, result)
            case _:
                raise ValueError(f"{kind} is no kind of line")
        return None


def end_as_recorded(request: Request, token_id: int, flags: int = 0) -> None:
    """A hashed token says itself whether it is one of those that end its request."""
    if flags & ENDS_AS_EOS:
        request.eos_token_ids = (*request.eos_token_ids, token_id)
    if flags & ENDS_AS_STOP:
        stop_token_ids = (*request.params.stop_token_ids, token_id)
        request.params = replace(request.params, stop_token_ids=stop_token_ids)


def make_request(record: dict[str, Any], leader: Request | None = None) -> Request:
    """A request as it was added."""
    values = {name: as_tuples(value) for name, value in record.items()}
    params = {name: as_tuples(value) for name, value in values.pop("params").items()}
    return Request(
        values.pop("request_id"),
        list(values.pop("prompt_token_ids")),
        SamplingParams(**params),
        leader=leader,
        **values,
    )


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Where two plans part, the most telling first."""
    for name in ("step", "starts", "scheduled", "num_scheduled_tokens", "transfers"):
        before, after = recorded.get(name, []), now[name]
        if before == after:
            continue
        if isinstance(before, list):
            gone = [part for part in before if part not in after]
            new = [part for part in after if part not in before]
            before, after = gone or before, new or after
        yield f"step {recorded['step']}: {name} was {before}, now it is {after}"
