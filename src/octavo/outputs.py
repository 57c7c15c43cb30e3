"""What callers get: one event stream per request, and the fold of it."""

from __future__ import annotations

from dataclasses import dataclass, field

SHUTTING_DOWN = "the server is shutting down"
"""The error of an answer that a shutdown cut: no fault, and worth another try elsewhere."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability, with enough to rebuild the text (C46)."""

    token_id: int
    token: str
    """Text of this token alone; U+FFFD where it holds part of a character."""
    token_bytes: bytes
    """Its exact bytes; concatenated over a text they give the text's UTF-8."""
    logprob: float
    rank: int = 0
    top: tuple[Logprob, ...] = ()
    """Alternatives, best first; then those that were named in the request, with rank 0."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of one answer. Joined over a stream, the pieces are the whole answer, exactly.

    `text` may be empty (part of a character, or text held back while it may become a stop
    string). The entries of token_ids and logprobs are those whose text is in this event.
    """

    request_id: int
    index: int
    """Which of the n answers."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    """One for each of token_ids, if asked for."""
    finish_reason: str | None = None
    """stop, length, timeout, abort or error, in the last event of each index."""
    stop_reason: int | str | None = None
    error: str | None = None
    num_generated_tokens: int = 0
    """Tokens generated so far for this index, those not shown (a stop id) included."""
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    """In the first event of each index, if asked for: one for each prompt token, None for the
    first, which nothing stands before."""
    refused: bool = False
    """With an error: the request itself was at fault."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """What went wrong, when finish_reason is error."""
    num_generated_tokens: int = 0

    def add(self, event: StreamEvent) -> None:
        """Fold one event of the stream into this answer."""
        self.text += event.text
        self.token_ids.extend(event.token_ids)
        if event.logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(event.logprobs)
            total = (self.cumulative_logprob or 0.0) + sum(x.logprob for x in event.logprobs)
            self.cumulative_logprob = total
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stop_reason = self.stop_reason if event.stop_reason is None else event.stop_reason
        self.error = event.error or self.error
        self.num_generated_tokens = event.num_generated_tokens


@dataclass(slots=True)
class RequestOutput:
    """A whole answer: the fold of its stream."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    seed: int = 0
    """The seed used: the request's own, or what the engine derived."""
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    """If asked for: one for each prompt token, None for the first."""

    def add(self, event: StreamEvent) -> None:
        """Fold one event of the stream into this output."""
        self.outputs[event.index].add(event)
        if event.index == 0:
            self.num_cached_tokens = event.num_cached_tokens
            self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
