"""What the server needs of an engine, and nothing more: the seam between engine/ and server/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..checkpoint import GenerationDefaults
from ..config import EngineConfig
from ..outputs import StreamEvent
from ..sampling_params import SamplingParams


class Metrics(Protocol):
    """Counters of the engine."""

    def render(self) -> bytes:
        """All metrics in Prometheus' text form."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. Safe to call from several threads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def chat_template(self) -> Any:
        """The model's chat template, or None."""
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] = ...,
    ) -> list[int]:
        """Ids of a rendered conversation. Raises RequestError if the messages are malformed."""
        ...


class AnswerStream(Protocol):
    """Events of one request, its n answers interleaved.

    Ends after each index had an event with a finish_reason.
    """

    @property
    def request_id(self) -> int: ...

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def seed(self) -> int: ...

    def __aiter__(self) -> AnswerStream: ...

    async def __anext__(self) -> StreamEvent: ...

    def abort(self) -> None:
        """End the request now and free its blocks within a step. May be called twice."""
        ...


class Engine(Protocol):
    """A running engine, as AsyncLLM is."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Output tokens that the engine's limits leave to a prompt; below 1: none."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def generation(self) -> GenerationDefaults: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def created(self) -> int:
        """Unix time of the start, in seconds."""
        ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def metrics(self) -> Metrics: ...

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_scope: str = "",
        tenant: str = "",
    ) -> AnswerStream:
        """Queue a request. Raises RequestError, QueueFull or EngineDead at once."""
        ...

    def shutdown(self, timeout: float | None = None) -> None:
        """Take no more requests, let running ones finish for `timeout` seconds, then end them."""
        ...
