"""From events to bytes: the stream is the truth, and the plain response is its fold.

Each event becomes one chunk, also when its text is empty: clients take the time between chunks
for the time between tokens. The first chunk of an answer carries the role and the first token
together, since clients take it for the time to first token.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..errors import RequestError
from ..outputs import Logprob, StreamEvent
from .answer import Answer, PromptEvent
from .errors import ended_by, to_api_error, unavailable
from .logprobs import chat_logprobs, completion_logprobs, echoed_logprobs, prompt_logprobs
from .parts import AnswerForm, AnswerParser, Parts
from .protocol import GenerateRequest
from .translate import Job
from .wire import JsonResponse, encode_json

SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"


class ChoiceState:
    """What one answer has sent so far."""

    __slots__ = ("num_chars", "num_generated", "parser", "started")

    def __init__(self, form: AnswerForm | None) -> None:
        self.parser = None if form is None else AnswerParser(form)
        self.started = False
        self.num_chars = 0
        self.num_generated = 0


class Shape(Protocol):
    """How one of the two routes writes a choice."""

    id_prefix: str
    chunk_object: str
    plain_object: str

    def chunk(self, parts: Parts, logprobs: Any, *, first: bool) -> dict[str, Any]:
        """The part of a chunk's choice that carries the text."""
        ...

    def logprobs(self, event: StreamEvent, offset: int, end: int, *, as_ids: bool) -> Any: ...

    def plain(self) -> dict[str, Any]:
        """A choice before its first chunk."""
        ...

    def add_text(self, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
        """Fold the text of a chunk's choice into a plain one."""
        ...

    def end(self, choice: dict[str, Any]) -> None:
        """Complete a plain choice after its last chunk."""
        ...


class ChatShape:
    """Choices of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    plain_object = "chat.completion"

    def chunk(self, parts: Parts, logprobs: Any, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if parts.reasoning:
            delta |= {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}
        if parts.tool_calls:
            delta["tool_calls"] = parts.tool_calls
        if parts.content or not (parts.reasoning or parts.tool_calls):
            delta["content"] = parts.content
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, event: StreamEvent, offset: int, end: int, *, as_ids: bool) -> Any:
        return chat_logprobs(event.logprobs, as_ids=as_ids)

    def plain(self) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", "refusal": None}}

    def add_text(self, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
        message, delta = choice["message"], chunk["delta"]
        message["content"] += delta.get("content", "")
        for name in ("reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                function = dict(call["function"])
                calls.append({"id": call["id"], "type": call["type"], "function": function})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def end(self, choice: dict[str, Any]) -> None:
        message = choice["message"]
        if "tool_calls" in message and not message["content"]:
            message["content"] = None


class CompletionShape:
    """Choices of /v1/completions."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    plain_object = "text_completion"

    def chunk(self, parts: Parts, logprobs: Any, *, first: bool) -> dict[str, Any]:
        return {"text": parts.content, "logprobs": logprobs}

    def logprobs(self, event: StreamEvent, offset: int, end: int, *, as_ids: bool) -> Any:
        return completion_logprobs(event.logprobs, as_ids=as_ids, offset=offset, end=end)

    def plain(self) -> dict[str, Any]:
        return {"text": ""}

    def add_text(self, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
        choice["text"] += chunk["text"]

    def end(self, choice: dict[str, Any]) -> None:
        """The text is all there is."""


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
        self.states = [ChoiceState(job.form) for job in jobs for _ in range(self.n)]
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
        if event.refused:
            text = event.error or "the request was refused"
            raise RequestError(text, param=self.request.form_field or None)
        if event.finish_reason == "error":
            raise ended_by(event.error)
        if event.finish_reason == "timeout" and not any(state.started for state in self.states):
            raise unavailable("The request timed out before it could start.")
        index = prompt * self.n + event.index
        state = self.states[index]
        first = not state.started
        text = event.text
        offset = state.num_chars
        if first:
            state.started = True
            text = self.jobs[prompt].echo + text
            offset = len(self.jobs[prompt].echo)
        state.num_chars += len(text)
        state.num_generated = event.num_generated_tokens
        if event.index == 0:
            self.num_cached[prompt] = event.num_cached_tokens
        logprobs = None
        if self.wants_logprobs:
            as_ids = self.request.tokens_as_ids
            logprobs = self.shape.logprobs(event, offset, state.num_chars, as_ids=as_ids)
            if first and event.prompt_logprobs is not None:
                self._echo_logprobs(self.jobs[prompt], event.prompt_logprobs, logprobs)
        parts, reason = Parts(text), event.finish_reason
        if state.parser is not None:
            parts = state.parser.push(text, final=reason is not None)
            reason = None if reason is None else state.parser.finish_reason(reason)
        choice = {"index": index, **self.shape.chunk(parts, logprobs, first=first)}
        choice["finish_reason"] = reason
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
        num_top = self.request.prompt_logprobs
        if num_top is not None and event.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(event.prompt_logprobs, num_top)
        if self.request.return_token_ids:
            choice["token_ids"] = event.token_ids
            if first and isinstance(self.shape, CompletionShape):
                choice["prompt_token_ids"] = self.streams[prompt].prompt_token_ids
        return choice

    def _echo_logprobs(
        self, job: Job, entries: Sequence[Logprob | None], logprobs: dict[str, Any]
    ) -> None:
        """Put those of the prompt before those of the answer, where it is echoed."""
        if job.first_token is None:
            return
        num_top, as_ids = job.params.logprobs or 0, self.request.tokens_as_ids
        echoed = echoed_logprobs(
            job.first_token, entries[1:], job.echo, num_top=num_top, as_ids=as_ids
        )
        for name, values in echoed.items():
            logprobs[name] = values + logprobs[name]

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
            if event.finish_reason == "error" and event.text:  # held back until now
                yield writer.chunk(prompt, replace(event, finish_reason=None))
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
    for choice in choices:
        shape.end(choice)
    body = {**builder.envelope, "object": shape.plain_object, "choices": choices}
    if isinstance(shape, ChatShape) and "prompt_logprobs" in choices[0]:
        scores = [choice.pop("prompt_logprobs", None) for choice in choices]
        body["prompt_logprobs"] = scores[0]  # of the one prompt, whatever n is
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
    for name in ("finish_reason", "stop_reason", "prompt_token_ids", "prompt_logprobs"):
        if name in chunk:
            choice[name] = chunk[name]
    if "token_ids" in chunk:
        choice.setdefault("token_ids", []).extend(chunk["token_ids"])
