"""One streamed answer in a terminal, and how quick it was: shared by generate and chat."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import EngineFault, OctavoError
from .options import sampling_of

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..outputs import StreamEvent
    from ..sampling_params import SamplingParams


@dataclass(slots=True)
class Timing:
    """Counts and seconds of one answer; the first token ends the prompt's share of the time."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0

    def __str__(self) -> str:
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        # The first token is the prompt's; the rate is that of the tokens after it.
        after_first = self.num_generated_tokens - 1
        return (
            f"prompt: {self.num_prompt_tokens} tokens{cached}, "
            f"{_rate(self.num_prompt_tokens, self.prompt_seconds)} | "
            f"generation: {self.num_generated_tokens} tokens, "
            f"{_rate(after_first, self.generation_seconds)}"
        )


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f} tok/s" if num_tokens > 0 and seconds > 0 else "- tok/s"


def load(args: argparse.Namespace) -> LLM:
    """The engine that the arguments describe."""
    from ..engine.llm import LLM
    from .options import model_of, settings_of

    return LLM(model_of(args), **settings_of(args))


def params_of(llm: LLM, args: argparse.Namespace, num_prompt_tokens: int) -> SamplingParams:
    """What the command line gives, over the model's own defaults. Raises RequestError."""
    sampling = sampling_of(args, llm.max_output_tokens(num_prompt_tokens))
    return replace(llm.default_params(), **sampling)


def stream_answer(
    llm: LLM, prompt_ids: list[int], params: SamplingParams, pieces: list[str]
) -> Timing:
    """Write the answer to stdout as it comes, and append its pieces to `pieces`.

    Raises EngineFault if a fault ended it, and KeyboardInterrupt after Ctrl-C, between steps:
    the engine is whole in both cases, and `pieces` holds what was written.
    """
    timing = Timing(len(prompt_ids))
    start = first = time.perf_counter()
    with interrupts() as interrupted, closing(_stream(llm, prompt_ids, params)) as events:
        for event in events:
            if timing.num_generated_tokens == 0:
                first = time.perf_counter()
            timing.num_generated_tokens = event.num_generated_tokens
            timing.num_cached_tokens = event.num_cached_tokens
            if event.text:
                pieces.append(event.text)
                sys.stdout.write(event.text)
                sys.stdout.flush()
            if event.finish_reason == "error":
                raise EngineFault(event.error or "the engine ended this answer by a fault")
            if event.finish_reason == "timeout":
                raise OctavoError("the request waited longer than max_queue_seconds")
            if interrupted:
                raise KeyboardInterrupt
    timing.prompt_seconds = first - start
    timing.generation_seconds = time.perf_counter() - first
    return timing


def _stream(
    llm: LLM, prompt_ids: list[int], params: SamplingParams
) -> Generator[StreamEvent, None, None]:
    yield from llm.stream(prompt_ids, params)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of breaking into a step; a second one breaks in."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def read_prompt(text: str) -> str:
    """The prompt as given; a lone - stands for stdin. Bytes that are no UTF-8 become U+FFFD."""
    if text == "-":
        if sys.stdin is None:
            raise OctavoError("stdin is closed: give the prompt itself")
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    return whole_text(text)


def whole_text(text: str) -> str:
    """An argument as Unicode: bytes that are no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
