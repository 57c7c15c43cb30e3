"""From events to bytes: the stream is the truth, and the plain response is its fold.

Each event becomes one chunk, also when its text is empty: clients take the time between chunks
for the time between tokens. The first chunk of an answer carries the role and the first token
together, since clients take it for the time to first token.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..outputs import StreamEvent
from .answer import Answer, PromptEvent
from .errors import ApiError, to_api_error, unavailable
from .logprobs import chat_logprobs, completion_logprobs
from .protocol import GenerateRequest
from .translate import Job
from .wire import JsonResponse, encode_json

SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"


class ChoiceState:
    """What one answer has sent so far."""

    __slots__ = ("num_chars", "num_generated", "started")

    def __init__(self) -> None:
        self.started = False
        self.num_chars = 0
        self.num_generated = 0


class Shape(Protocol):
    """How one of the two routes writes a choice."""

    id_prefix: str
    chunk_object: str
    plain_object: str

    def chunk(self, text: str, logprobs: Any, *, first: bool) -> dict[str, Any]:
        """The part of a chunk's choice that carries the text."""
        ...

    def logprobs(self, event: StreamEvent, offset: int, end: int, *, as_ids: bool) -> Any: ...

    def plain(self) -> dict[str, Any]:
        """A choice before its first chunk."""
        ...

    def add_text(self, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
        """Fold the text of a chunk's choice into a plain one."""
        ...


class ChatShape:
    """Choices of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    plain_object = "chat.completion"

    def chunk(self, text: str, logprobs: Any, *, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, event: StreamEvent, offset: int, end: int, *, as_ids: bool) -> Any:
        return chat_logprobs(event.logprobs, as_ids=as_ids)

    def plain(self) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", "refusal": None}}

    def add_text(self, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
        choice["message"]["content"] += chunk["delta"]["content"]


class CompletionShape:
    """Choices of /v1/completions."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    plain_object = "text_completion"

    def chunk(self, text: str, logprobs: Any, *, first: bool) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def logprobs(self, event: StreamEvent, offset: int, end: int, *, as_ids: bool) -> Any:
        return completion_logprobs(event.logprobs, as_ids=as_ids, offset=offset, end=end)

    def plain(self) -> dict[str, Any]:
        return {"text": ""}

    def add_text(self, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
        choice["text"] += chunk["text"]


class ResponseBuilder:
    """One response while it is made: turns events into choices of chunks, and counts."""

    def __init__(
        self,
        shape: Shape,
        request: GenerateRequest,
        jobs: Sequence[Job],
        answer: Answer,
        *,
        model: str,
    ) -> None:
        self.shape = shape
        self.request = request
        self.jobs = jobs
        self.streams = answer.streams
        self.n = jobs[0].params.n
        self.wants_logprobs = jobs[0].params.logprobs is not None
        self.states = [ChoiceState() for _ in range(self.n * len(jobs))]
        self.num_cached = [0] * len(jobs)
        self.envelope = self._envelope(model)

    def _envelope(self, model: str) -> dict[str, Any]:
        """Fields around the choices, the same in every chunk."""
        seeds = [stream.seed for stream in self.streams]
        envelope: dict[str, Any] = {
            "id": self.shape.id_prefix + uuid.uuid4().hex,
            "object": self.shape.chunk_object,
            "created": int(time.time()),
            "model": model,
        }
        envelope |= {"seed": seeds[0]} if len(seeds) == 1 else {"seeds": seeds}
        num_truncated = sum(job.num_truncated for job in self.jobs)
        if num_truncated:
            envelope["truncated_prompt_tokens"] = num_truncated
        if self.request.return_token_ids and isinstance(self.shape, ChatShape):
            envelope["prompt_token_ids"] = self.streams[0].prompt_token_ids
        return envelope

    def choice(self, prompt: int, event: StreamEvent) -> dict[str, Any]:
        """The choice of the chunk for one event. Raises ApiError if the event is an error."""
        if event.finish_reason == "error":
            raise ApiError(500, event.error or "The engine ended this answer with an error.")
        if event.finish_reason == "timeout" and not any(state.started for state in self.states):
            raise unavailable("The request timed out before it could start.")
        index = prompt * self.n + event.index
        state = self.states[index]
        first = not state.started
        text = event.text
        if first:
            state.started = True
            text = self.jobs[prompt].echo + text
        offset = state.num_chars
        state.num_chars += len(text)
        state.num_generated = event.num_generated_tokens
        if event.index == 0:
            self.num_cached[prompt] = event.num_cached_tokens
        logprobs = None
        if self.wants_logprobs:
            as_ids = self.request.tokens_as_ids
            logprobs = self.shape.logprobs(event, offset, state.num_chars, as_ids=as_ids)
        choice = {"index": index, **self.shape.chunk(text, logprobs, first=first)}
        choice["finish_reason"] = event.finish_reason
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = event.token_ids
            if first and isinstance(self.shape, CompletionShape):
                choice["prompt_token_ids"] = self.streams[prompt].prompt_token_ids
        return choice

    def usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt counts once, each of its n answers by itself."""
        num_prompt = sum(len(stream.prompt_token_ids) for stream in self.streams)
        num_generated = sum(state.num_generated for state in self.states)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached)},
        }


class ChunkWriter:
    """Bytes of SSE chunks; all that is the same in each chunk is encoded once."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._head = b"data: " + encode_json(builder.envelope)[:-1] + b',"choices":['
        envelope = {k: v for k, v in builder.envelope.items() if k != "prompt_token_ids"}
        self._later_head = b"data: " + encode_json(envelope)[:-1] + b',"choices":['
        request = builder.request
        self._continuous = request.continuous_usage
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def chunk(self, prompt: int, event: StreamEvent) -> bytes:
        """One event as one chunk. Raises ApiError if it is an error."""
        choice = encode_json(self._builder.choice(prompt, event))
        head, self._head = self._head, self._later_head
        if self._continuous:
            return b"".join((head, choice, self._usage_tail()))
        return b"".join((head, choice, self._tail))

    def end(self) -> bytes:
        """What closes a stream that went well: usage if it was asked for, and [DONE]."""
        if self._builder.request.include_usage:
            return self._later_head + self._usage_tail() + DONE
        return DONE

    def _usage_tail(self) -> bytes:
        return b'],"usage":' + encode_json(self._builder.usage()) + b"}\n\n"


class EventStream(StreamingResponse):
    """Starlette would start a second task that listens for the client to go away; ours does."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


Events = AsyncGenerator[PromptEvent, None]


async def stream_response(events: Events, answer: Answer, builder: ResponseBuilder) -> Response:
    """Server-sent events. Waits for the first token: a fault before it is raised (ApiError)."""
    writer = ChunkWriter(builder)
    first = await anext(events, None)
    if first is None:
        raise ClientDisconnect
    chunks = _chunks(writer.chunk(*first), events, answer, writer)
    return EventStream(chunks, headers=SSE_HEADERS)


async def _chunks(
    first: bytes, events: Events, answer: Answer, writer: ChunkWriter
) -> AsyncGenerator[bytes, None]:
    """A fault is now sent as an event of its own, and [DONE] follows (C62)."""
    yield first
    try:
        async for prompt, event in events:
            yield writer.chunk(prompt, event)
        end = writer.end()
    except Exception as error:
        answer.abort()
        end = b"data: " + encode_json(to_api_error(error).body()) + b"\n\n" + DONE
    yield end


async def plain_response(events: Events, answer: Answer, builder: ResponseBuilder) -> Response:
    """The fold of the stream, as one JSON object. Raises ApiError at the first fault."""
    shape = builder.shape
    folded: dict[int, dict[str, Any]] = {}
    async for prompt, event in events:
        chunk = builder.choice(prompt, event)
        index = chunk["index"]
        if index not in folded:
            folded[index] = {"index": index, **shape.plain()}
        fold(shape, folded[index], chunk)
    if answer.gone:
        raise ClientDisconnect
    choices = [folded[index] for index in sorted(folded)]
    body = {**builder.envelope, "object": shape.plain_object, "choices": choices}
    return JsonResponse({**body, "usage": builder.usage()})


def fold(shape: Shape, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Add the choice of a chunk to the choice of a plain response: texts and lists are joined."""
    shape.add_text(choice, chunk)
    if chunk["logprobs"] is None:
        choice["logprobs"] = None
    else:
        lists = choice.setdefault("logprobs", {})
        for name, values in chunk["logprobs"].items():
            lists.setdefault(name, []).extend(values)
    for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
        if name in chunk:
            choice[name] = chunk[name]
    if "token_ids" in chunk:
        choice.setdefault("token_ids", []).extend(chunk["token_ids"])
