"""A run of the scheduler as lines of JSON: all that went in, and what it decided.

The first line is the settings; then one line for each call, in order. Prompts are in it as token
ids, in the clear: treat the file as you treat the prompts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from ..config import CacheConfig, SchedulerConfig
from ..core.scheduler import Scheduler
from ..messages import (
    SMALL_MODEL,
    KeptRun,
    ModelCosts,
    SampledToken,
    SchedulerOutput,
    StepResult,
    TokenEvent,
)
from ..request import Request
from ..sampling_params import SamplingParams

logger = logging.getLogger("octavo")

FORMAT = 2
PLAIN = (bool, int, float, str, tuple)


class RecordingScheduler(Scheduler):
    """A scheduler that hands each of its inputs and decisions to `write`, as a line of text."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        num_slots: tuple[int, int] = (0, 0),
        costs: ModelCosts = SMALL_MODEL,
        write: Callable[[str], object],
    ) -> None:
        super().__init__(
            scheduler_config,
            cache_config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_slots=num_slots,
            costs=costs,
        )
        self._write = write
        self._record(
            "octavo",
            FORMAT,
            asdict(scheduler_config),
            asdict(cache_config),
            {
                "num_blocks": num_blocks,
                "max_model_len": max_model_len,
                "num_slots": num_slots,
                "costs": costs,
            },
        )

    def _record(self, *parts: object) -> None:
        """A disk that is full ends the recording, not the run."""
        try:
            self._write(json.dumps(parts, separators=(",", ":"), default=str) + "\n")
        except OSError as error:
            logger.error("the recording ends here: %s", error)
            self._write = lambda line: None

    def add(self, request: Request) -> None:
        """Queue a request; only what was accepted is recorded."""
        super().add(request)
        self._record("add", request_record(request))

    def finish(self, request_id: int, reason: str) -> bool:
        """End a request from outside."""
        live = super().finish(request_id, reason)
        if live:
            self._record("finish", request_id, reason)
        return live

    def preempt(self, request_id: int) -> bool:
        """Make a running request yield between two steps."""
        self._record("preempt", request_id)
        return super().preempt(request_id)

    def import_prefixes(self, runs: list[KeptRun]) -> None:
        """Begin with cached prefixes."""
        self._record("kept", runs)
        super().import_prefixes(runs)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        plan = super().schedule()
        self._record("plan", plan_record(plan))
        return plan

    def update_from_output(self, plan: SchedulerOutput, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed."""
        sampled = [(token.row, token.token_id) for token in result.sampled]
        faults = [(fault.row, fault.message) for fault in result.faults]
        scored = [(part.row, len(part.logprobs)) for part in result.prompt_logprobs]
        self._record("result", result.step, sampled, faults, result.timing, scored)
        return super().update_from_output(plan, result)


def request_record(request: Request) -> dict[str, Any]:
    """What the scheduler can see of a request."""
    default = SamplingParams()
    params = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(request.params, field.name)) != getattr(default, field.name)
        and isinstance(value, PLAIN)
    }
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.token_ids[: request.num_prompt_tokens],
        "params": params,
        "max_tokens": request.max_tokens,
        "eos_token_ids": request.eos_token_ids,
        "priority": request.priority,
        "cache_scope": request.cache_scope,
        "tenant": request.tenant,
        "leader": None if request.leader is None else request.leader.request_id,
    }


def plan_record(plan: SchedulerOutput) -> dict[str, Any]:
    """A plan, without the tokens that the requests in it are known to have."""
    return {
        "step": plan.step,
        "starts": [[start.row, start.request_id, len(start.token_ids)] for start in plan.starts],
        "scheduled": [list(entry) for entry in plan.scheduled],
        "num_scheduled_tokens": plan.num_scheduled_tokens,
        "transfers": [list(transfer) for transfer in plan.transfers],
    }


def as_tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def sampled_tokens(pairs: list[list[int]]) -> tuple[SampledToken, ...]:
    """Tokens of a result, by row."""
    return tuple(SampledToken(row, token_id) for row, token_id in pairs)
