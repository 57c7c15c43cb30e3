"""Reading a JSON object field by field: types strictly, and null means the default."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..errors import RequestError

logger = logging.getLogger("octavo.server")

HARMLESS_FIELDS = frozenset(
    {
        *("metadata", "store", "service_tier", "stream_interval"),
        *("kv_transfer_params", "vllm_xargs", "request_id", "session_id", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "verbosity"),
        *("reasoning_effort", "spaces_between_special_tokens"),
        *("length_penalty", "early_stopping", "mm_processor_kwargs"),
    }
)
"""Known, and without effect on an answer here."""

NOT_YET_FIELDS = frozenset(
    {
        *("suffix", "use_beam_search"),
        *("thinking_token_budget", "repetition_detection", "return_prompt_text", "documents"),
        *("chat_template", "prompt_embeds", "functions", "function_call", "audio"),
        "web_search_options",
    }
)
"""Known, but not built: refused unless the value asks for nothing (false, "", [], {})."""


class Fields:
    """Reads one JSON object field by field, and knows at the end which were never asked for."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.known: set[str] = {"model"}

    def take(self, name: str) -> Any:
        """The value as sent; None if it is null or missing."""
        self.known.add(name)
        return self.body.get(name)

    def _typed(self, name: str, wanted: str, is_right: Callable[[Any], bool]) -> Any:
        value = self.take(name)
        if value is not None and not is_right(value):
            raise RequestError(f"{name} is {value!r}, but must be {wanted}", param=name)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._typed(name, "true or false", lambda x: type(x) is bool)
        return default if value is None else bool(value)

    def integer(self, name: str) -> int | None:
        value: int | None = self._typed(name, "a whole number", lambda x: type(x) is int)
        return value

    def string(self, name: str) -> str | None:
        value: str | None = self._typed(name, "a string", lambda x: type(x) is str)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        return self._typed(name, "an object", lambda x: type(x) is dict) or {}

    def refuse_not_yet(self) -> None:
        """Raises RequestError for a field whose effect is not built and is asked for."""
        self.known |= NOT_YET_FIELDS | HARMLESS_FIELDS
        for name in sorted(NOT_YET_FIELDS & self.body.keys()):
            if not asks_for_nothing(self.body[name]):
                raise not_yet(name)

    def log_unknown(self) -> None:
        """One line for all fields that nobody read."""
        unknown = [name[:64] for name in self.body if name not in self.known]
        if unknown:
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            logger.info("ignored unknown request fields: %r%s", unknown[:10], more)


def asks_for_nothing(value: object) -> bool:
    """Whether a value is a way to say "no, thanks"."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def not_yet(what: str) -> RequestError:
    """The refusal of a field that is known but not built."""
    return RequestError(f"{what} is not supported yet", param=what)
