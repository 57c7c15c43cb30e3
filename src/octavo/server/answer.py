"""The streams of one HTTP request (one for each prompt), merged into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import ClientDisconnect

from ..outputs import StreamEvent
from .engine_protocol import AnswerStream, Engine
from .translate import Job

PromptEvent = tuple[int, StreamEvent]
"""(number of the prompt, what happened to one of its answers)."""


class EchoStream:
    """An answer without generation or scores: max_tokens=0 with echo needs no engine."""

    request_id = -1

    def __init__(self, job: Job) -> None:
        self.prompt_token_ids = job.token_ids
        self.seed = max(0, job.params.seed or 0)
        self._indexes = iter(range(job.params.n))

    def __aiter__(self) -> EchoStream:
        return self

    async def __anext__(self) -> StreamEvent:
        for index in self._indexes:
            return StreamEvent(self.request_id, index, "", (), finish_reason="length")
        raise StopAsyncIteration

    def abort(self) -> None:
        """Nothing runs."""


class Answer:
    """Submits the jobs of one request and gives their events in the order they come.

    Whatever ends the request early (the client went away, an error, a cancelled task) must call
    `abort`, so that no stream goes on for nobody.
    """

    def __init__(
        self, engine: Engine, *, priority: int = 0, cache_scope: str = "", tenant: str = ""
    ) -> None:
        self._engine = engine
        self._options: dict[str, Any] = {
            "priority": priority,
            "cache_scope": cache_scope,
            "tenant": tenant,
        }
        self.streams: list[AnswerStream] = []
        self.gone = False
        self._complete = False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs. Raises what Engine.submit raises, and ClientDisconnect after abort.

        After an error some jobs may be queued already: `abort` takes them back.
        """
        if self.gone:
            raise ClientDisconnect
        for job in jobs:
            self.streams.append(self._submit(job))

    def _submit(self, job: Job) -> AnswerStream:
        if job.params.max_tokens == 0 and job.params.prompt_logprobs is None:
            return EchoStream(job)
        return self._engine.submit(job.token_ids, job.params, **self._options)

    def abort(self) -> None:
        """End every stream that still runs; nothing happens after a complete answer."""
        if self._complete or self.gone:
            return
        self.gone = True
        for stream in self.streams:
            stream.abort()

    async def events(self) -> AsyncGenerator[PromptEvent, None]:
        """Events of all prompts; close it when done (contextlib.aclosing)."""
        if len(self.streams) == 1:
            async for event in self.streams[0]:
                yield 0, event
            self._complete = not self.gone
            return
        queue: asyncio.Queue[PromptEvent | Exception | None] = asyncio.Queue()
        pumps = [
            asyncio.create_task(_pump(number, stream, queue))
            for number, stream in enumerate(self.streams)
        ]
        try:
            num_running = len(pumps)
            while num_running:
                item = await queue.get()
                if item is None:
                    num_running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
            self._complete = not self.gone
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(
    number: int, stream: AnswerStream, queue: asyncio.Queue[PromptEvent | Exception | None]
) -> None:
    try:
        async for event in stream:
            queue.put_nowait((number, event))
    except Exception as error:
        queue.put_nowait(error)
    queue.put_nowait(None)
