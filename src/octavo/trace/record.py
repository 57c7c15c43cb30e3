"""A run of the scheduler as lines of JSON: all that went in, and what it decided.

The first line is the settings; then one line for each call, in order. Prompts are in it as token
ids, in the clear: treat the file as you treat the prompts. Or as keyed hashes (pseudonyms.py):
then it tells how long they are, what they share and when they came, and nothing of what they say.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from fcntl import LOCK_EX, LOCK_NB, flock
from io import FileIO
from stat import S_ISREG
from typing import Any

from ..config import CacheConfig, SchedulerConfig
from ..core.scheduler import Scheduler
from ..errors import ConfigError
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
from .pseudonyms import Pseudonyms, State

logger = logging.getLogger("octavo")

FORMAT = 2
PLAIN = (bool, int, float, str, tuple)
NO_SECRET = ("min_tokens", "max_tokens", "ignore_eos", "prompt_logprobs")
"""What the scheduler reads of sampling parameters, beside stop ids."""
ENDS_AS_EOS, ENDS_AS_STOP = 1, 2
"""Of a hashed token: it is one of the request's end-of-sequence ids, of its own stop ids."""


class RecordingFile:
    """A file of lines, readable by its owner, that one recording has to itself.

    Line by line, so that what a killed process decided last is in the file.
    """

    def __init__(self, path: str) -> None:
        """Raises ConfigError, and what is there stays as it is."""
        try:
            self._file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
            try:
                if S_ISREG(os.fstat(self._file.fileno()).st_mode):  # not a device, nor a pipe
                    flock(self._file, LOCK_EX | LOCK_NB)
                    os.fchmod(self._file.fileno(), 0o600)
                    self._file.truncate()
            except OSError:
                self.close()
                raise
        except BlockingIOError:
            wanted = "a file that nobody else records to at this time"
            raise ConfigError("record", path, wanted) from None
        except OSError as error:
            raise ConfigError("record", path, f"a file that can be written ({error})") from None

    def write(self, line: str) -> None:
        """Raises OSError."""
        data = line.encode()
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Leave the file to others."""
        self._file.close()


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
        close: Callable[[], object] = lambda: None,
        hashed: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`close`: called once no more lines come. `now`: seconds; each plan has its time, for
        people: no decision depends on it."""
        super().__init__(
            scheduler_config,
            cache_config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_slots=num_slots,
            costs=costs,
        )
        self.recorder = Recorder(write, hashed=hashed, now=now)
        self._close = close
        self.recorder.line(
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

    def close(self) -> None:
        """The recording is whole."""
        self._close()

    def add(self, request: Request) -> None:
        """Queue a request; only what was accepted is recorded."""
        super().add(request)
        self.recorder.add(request)

    def finish(self, request_id: int, reason: str) -> bool:
        """End a request from outside."""
        live = super().finish(request_id, reason)
        if live:
            self.recorder.line("finish", request_id, reason)
            self.recorder.forget(request_id)
        return live

    def extend(self, request_id: int, token_ids: Sequence[int]) -> TokenEvent:
        """Append tokens that nobody has to sample."""
        self.recorder.extend(self.requests[request_id], token_ids)
        event = super().extend(request_id, token_ids)
        if event.finish_reason is not None:
            self.recorder.forget(request_id)
        return event

    def preempt(self, request_id: int) -> bool:
        """Make a running request yield between two steps."""
        self.recorder.line("preempt", request_id)
        return super().preempt(request_id)

    def import_prefixes(self, runs: list[KeptRun]) -> None:
        """Begin with cached prefixes."""
        self.recorder.kept(runs)
        super().import_prefixes(runs)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        plan = super().schedule()
        self.recorder.plan(plan)
        return plan

    def update_from_output(self, plan: SchedulerOutput, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed."""
        requests = self.in_flight.get(plan.step, ())
        rows = (entry.row for entry in plan.scheduled)
        self.recorder.result(result, dict(zip(rows, requests, strict=False)))
        events = super().update_from_output(plan, result)
        for event in events:
            if event.finish_reason is not None:
                self.recorder.forget(event.request_id)
        return events


class Recorder:
    """What a line says: in the clear, or `hashed`."""

    def __init__(
        self, write: Callable[[str], object], *, hashed: bool, now: Callable[[], float]
    ) -> None:
        self._write = write
        self._now, self._start = now, now()
        self._pseudonyms = Pseudonyms() if hashed else None
        self._states: dict[int, State] = {}
        """Where the numbers of each live request's tokens have come to, by id."""

    def line(self, *parts: object) -> None:
        """A disk that is full ends the recording, not the run."""
        try:
            self._write(json.dumps(parts, separators=(",", ":"), default=str) + "\n")
        except OSError as error:
            logger.error("the recording ends here: %s", error)
            self._write = lambda line: None

    def add(self, request: Request) -> None:
        record = request_record(request)
        if self._pseudonyms is not None:
            hide = self._pseudonyms
            start, token_ids = hide.begin(request.cache_scope), record["prompt_token_ids"]
            state, record["prompt_token_ids"] = hide.extend(start, token_ids)
            self._states[request.request_id] = state
            params = record["params"]
            record["params"] = {name: params[name] for name in NO_SECRET if name in params}
            record["eos_token_ids"] = ()
            record["cache_scope"] = hide.name(request.cache_scope)
            record["tenant"] = hide.name(request.tenant)
        self.line("add", record)

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self._states.pop(request_id, None)

    def kept(self, runs: list[KeptRun]) -> None:
        if self._pseudonyms is not None:
            numbers = self._pseudonyms.runs(run[:3] for run in runs)
            hidden = zip(runs, list(numbers), strict=True)
            name = self._pseudonyms.name
            runs = [run._replace(scope=name(run.scope), token_ids=new) for run, new in hidden]
        self.line("kept", runs)

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        tokens = [self._token(request, token_id) for token_id in token_ids]
        self.line("extend", request.request_id, tokens)

    def plan(self, plan: SchedulerOutput) -> None:
        self.line("plan", plan_record(plan), round(self._now() - self._start, 6))

    def result(self, result: StepResult, requests: dict[int, Request]) -> None:
        """`requests`: by row, of this step."""
        sampled = [
            (row, *self._token(requests[row], token_id)) for row, token_id, _ in result.sampled
        ]
        messages = (
            fault.message if self._pseudonyms is None else "fault" for fault in result.faults
        )
        faults = [
            (fault.row, message, fault.retry)
            for fault, message in zip(result.faults, messages, strict=True)
        ]
        scored = [(part.row, len(part.logprobs)) for part in result.prompt_logprobs]
        self.line("result", result.step, sampled, faults, result.timing, scored)

    def _token(self, request: Request, token_id: int) -> tuple[int, ...]:
        """Itself; or hashed: its number, and whether it may end the answer."""
        if self._pseudonyms is None:
            return (token_id,)
        state = self._states.get(request.request_id)
        if state is None:
            return 0, 0
        self._states[request.request_id], (number,) = self._pseudonyms.extend(state, (token_id,))
        ends = ENDS_AS_EOS * (token_id in request.eos_token_ids)
        ends += ENDS_AS_STOP * (token_id in request.params.stop_token_ids)
        return number, ends


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
    return tuple(SampledToken(row, token_id) for row, token_id, *_ in pairs)
