"""EngineBed: the real engine loop and text over TapeModel and a tiny tokenizer; no arithmetic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from beds.masked_model import MaskedModel
from beds.tiny_tokenizer import gguf_spec
from octavo.checkpoint import GenerationDefaults
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.engine import async_llm
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.build import Engine
from octavo.engine.engine_core import EngineCore
from octavo.engine.grammar import Grammars
from octavo.engine.input_processor import InputProcessor
from octavo.engine.metrics import Metrics
from octavo.engine.tokenizer import Tokenizer
from octavo.messages import SchedulerOutput, StepResult
from octavo.outputs import StreamEvent
from octavo.sampling_params import SamplingParams


class SlowTape(MaskedModel):
    """A tape whose steps take `seconds`, so that what is to happen meanwhile does."""

    seconds = 0.0

    def submit(self, plan: SchedulerOutput) -> StepResult:
        time.sleep(self.seconds)
        return super().submit(plan)


class EngineBed:
    """An engine whose model is a tape; its steps take no time, or step_seconds each."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 200,
        eos_token_ids: tuple[int, ...] = (),
        scheduling: dict[str, Any] | None = None,
        step_seconds: float = 0.0,
        now: Callable[[], float] = time.monotonic,
        make_scheduler: Callable[..., Scheduler] | None = None,
        **tape: Any,
    ) -> None:
        config = SchedulerConfig(**(scheduling or {}))
        self.tokenizer = Tokenizer(gguf_spec())
        self.model = SlowTape(
            token_bytes=self.tokenizer.token_bytes,
            eos_token_ids=eos_token_ids,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            **tape,
        )
        self.model.seconds = step_seconds
        make = make_scheduler or Scheduler
        self.scheduler = make(
            config,
            CacheConfig(block_size=block_size),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_slots=self.model.num_slots,
        )
        self.metrics = Metrics("tape")
        grammars = Grammars(
            self.tokenizer,
            vocab_size=self.model.vocab_size,
            eos_token_ids=eos_token_ids,
            jump_forward=config.jump_forward,
        )
        self.core = EngineCore(
            self.scheduler, self.model, self.tokenizer, self.metrics, grammars=grammars, now=now
        )
        generation = GenerationDefaults(eos_token_ids=eos_token_ids)
        self.inputs = InputProcessor(
            self.tokenizer,
            self.scheduler.limits,
            generation,
            vocab_size=self.model.vocab_size,
            seed=0,
        )
        self.engine = Engine(
            core=self.core,
            inputs=self.inputs,
            tokenizer=self.tokenizer,
            generation=generation,
            metrics=self.metrics,
            model_name="tape",
            max_model_len=max_model_len,
            load_seconds=0.0,
        )
        self.next_id = 0

    def add(self, prompt: list[int] | str, **params: Any) -> int:
        """Queue one prompt; its request id (n ids are taken)."""
        sampling = SamplingParams(**params)
        requests = self.inputs.requests(
            self.inputs.tokenize(prompt), sampling, request_id=self.next_id, arrival_time=0.0
        )
        self.core.add(requests)
        self.next_id += sampling.n
        return requests[0].request_id

    def run(self, max_steps: int = 1000) -> dict[tuple[int, int], list[StreamEvent]]:
        """Step until nothing is left; events by (request id, index)."""
        events: dict[tuple[int, int], list[StreamEvent]] = {}
        for _ in range(max_steps):
            if not self.core.has_unfinished():
                self.scheduler.audit()
                assert not self.core.outputs.answers, "an answer outlived its request"
                assert not self.core.grammars.live, "a matcher outlived its request"
                return events
            for event in self.core.step():
                events.setdefault((event.request_id, event.index), []).append(event)
        raise AssertionError("not done")

    def metric(self, line: str) -> float:
        """The value on the one metrics line that starts so."""
        found = [x for x in self.metrics.render().decode().splitlines() if x.startswith(line)]
        assert len(found) == 1, found
        return float(found[0].rsplit(" ", 1)[1])


def tokens(events: list[StreamEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def async_engine(bed: EngineBed) -> AsyncLLM:
    """AsyncLLM, thread and all, over a bed."""
    with mock.patch.object(async_llm, "build_engine", return_value=bed.engine):
        return AsyncLLM("tape")


def with_async_engine(bed: EngineBed, body: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    """Run a coroutine over an AsyncLLM that is shut down afterwards."""
    engine = async_engine(bed)
    try:
        return asyncio.run(asyncio.wait_for(_awaited(body(engine)), timeout=30))
    finally:
        engine.shutdown(timeout=5)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
