"""From token events to stream events: text, stop strings, log probabilities, times.

One Answer per request of the scheduler; the n answers to one prompt are n of them. A fault in the
text of one answer ends that answer alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..messages import NewRequest, TokenEvent
from ..outputs import Logprob, StreamEvent
from ..request import Request
from .metrics import Metrics
from .text_stream import Piece, TextStream, prompt_logprobs
from .tokenizer import Tokenizer

logger = logging.getLogger("octavo")


@dataclass(slots=True, eq=False)
class Answer:
    """One answer in the making: its request, its text so far, its times (seconds)."""

    request: Request
    parent_id: int
    index: int
    text: TextStream
    scored: bool = False
    """Whether its prompt logprobs were sent."""
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


class OutputProcessor:
    """Owns the answers that run; `finish` tells the scheduler that a stop string ended one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        finish: Callable[[int, str], bool],
        now: Callable[[], float],
    ) -> None:
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.finish = finish
        self.now = now
        self.answers: dict[int, Answer] = {}

    def add(self, requests: list[Request]) -> None:
        """Start the answers to one prompt."""
        parent_id = requests[0].request_id
        for index, request in enumerate(requests):
            text = TextStream(self.tokenizer, request.params)
            self.answers[request.request_id] = Answer(request, parent_id, index, text)
        self.metrics.prompt_tokens.inc(requests[0].num_prompt_tokens)

    def started(self, starts: Iterable[NewRequest]) -> None:
        """Note when requests leave the queue for the first time."""
        for start in starts:
            answer = self.answers.get(start.request_id)
            if answer is not None and answer.scheduled_time is None:
                answer.scheduled_time = self.now()

    def process(self, events: list[TokenEvent]) -> list[StreamEvent]:
        """Stream events for what a step produced."""
        now = self.now()
        return [
            self._process(self.answers[event.request_id], event, now)
            for event in events
            if event.request_id in self.answers
        ]

    def end(self, request_id: int, reason: str, error: str | None = None) -> StreamEvent | None:
        """End an answer from outside (abort, error): its held text is flushed."""
        answer = self.answers.get(request_id)
        if answer is None:
            return None
        event = TokenEvent(request_id, (), (), reason, None, error)
        return self._process(answer, event, self.now())

    def _process(self, answer: Answer, event: TokenEvent, now: float) -> StreamEvent:
        error = event.error
        if answer.request.params.max_tokens == 0:  # scoring: the step's one token is not wanted
            reason = "length" if event.finish_reason == "stop" else event.finish_reason
            event = event._replace(
                token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None
            )
        scores: tuple[Logprob | None, ...] | None = None
        num_before = answer.text.num_tokens
        try:
            scores = self._prompt_logprobs(answer, event)
            piece = answer.text.push(
                event.token_ids, event.logprobs, event.finish_reason, event.stop_reason
            )
        except Exception as fault:
            # Whatever one answer's text trips over must not end its neighbours (C106).
            logger.exception("text of request %d failed", event.request_id)
            error = f"internal error in the text of this answer: {type(fault).__name__}"
            piece = Piece("", (), (), "error", None)
        self._measure(answer, answer.text.num_tokens - num_before, now)
        if piece.finish_reason is not None:
            if event.finish_reason is None:
                self.finish(event.request_id, piece.finish_reason)
            del self.answers[event.request_id]
            self.metrics.finished(answer, piece.finish_reason, now)
        return StreamEvent(
            request_id=answer.parent_id,
            index=answer.index,
            text=piece.text,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            error=error,
            refused=event.refused,
            num_generated_tokens=answer.text.num_tokens,
            num_cached_tokens=answer.request.num_cached_tokens,
            prompt_logprobs=scores,
        )

    def _prompt_logprobs(
        self, answer: Answer, event: TokenEvent
    ) -> tuple[Logprob | None, ...] | None:
        """With the first event, since the prompt is done then, unless its time was over before;
        never with an error or abort."""
        request = answer.request
        num_top = request.params.prompt_logprobs
        is_whole = len(request.prompt_logprobs) == request.num_prompt_tokens - 1
        without = ("error", "abort") if is_whole else ("error", "abort", "timeout")
        if num_top is None or answer.scored or event.finish_reason in without:
            return None
        answer.scored = True
        token_ids = request.token_ids[: request.num_prompt_tokens]
        return prompt_logprobs(self.tokenizer, token_ids, request.prompt_logprobs, num_top)

    def _measure(self, answer: Answer, num_new_tokens: int, now: float) -> None:
        if not num_new_tokens:
            return
        if answer.first_token_time is None:
            answer.first_token_time = now
            self.metrics.time_to_first_token.observe(now - answer.request.arrival_time)
        elif answer.last_token_time is not None:
            self.metrics.inter_token_latency.observe(now - answer.last_token_time)
        answer.last_token_time = now
        self.metrics.generation_tokens.inc(num_new_tokens)
