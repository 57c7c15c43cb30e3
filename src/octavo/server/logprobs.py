"""Log probabilities in the two forms of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ..outputs import Logprob

LOGPROB_FLOOR = -9999.0
"""What -inf becomes: JSON has no infinities (C47)."""


def finite(logprob: float) -> float:
    """A number that JSON can carry. NaN compares false, and so becomes the floor as well."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def chat_logprobs(logprobs: Sequence[Logprob], *, as_ids: bool) -> dict[str, Any]:
    """{content: [{token, logprob, bytes, top_logprobs}]} of these tokens."""
    return {
        "content": [
            {
                **_chat_token(entry, as_ids),
                "top_logprobs": [_chat_token(other, as_ids) for other in entry.top],
            }
            for entry in logprobs
        ]
    }


def _chat_token(entry: Logprob, as_ids: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{entry.token_id}" if as_ids else entry.token,
        "logprob": finite(entry.logprob),
        "bytes": list(entry.token_bytes),
    }


def completion_logprobs(
    logprobs: Sequence[Logprob], *, as_ids: bool, offset: int, end: int
) -> dict[str, Any]:
    """{tokens, token_logprobs, top_logprobs, text_offset} of tokens whose text is [offset, end).

    Offsets count characters of the whole answer. A token that begins inside a character stands
    at that character. Each of top_logprobs holds the sampled token too, with the same bits, so
    that a client can tell a greedy choice by comparing (lm-eval does).
    """
    tokens: list[str] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    prefix = b""
    for entry in logprobs:
        name = _name(entry, as_ids)
        top: dict[str, float] = {}
        for other in entry.top:
            top.setdefault(_name(other, as_ids), finite(other.logprob))
        top.setdefault(name, finite(entry.logprob))
        tokens.append(name)
        tops.append(top)
        offsets.append(min(end, offset + len(prefix.decode("utf-8", "ignore"))))
        prefix += entry.token_bytes
    return {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def echoed_logprobs(
    first: Logprob, rest: Sequence[Logprob | None], text: str, *, num_top: int, as_ids: bool
) -> dict[str, Any]:
    """completion_logprobs of an echoed prompt: its first token has null where the rest have
    numbers, and the offsets are those of `text`, the prompt as it is echoed.

    What the tokens say beyond that text (a BOS or a space that encoding put in front) stands
    before its start.
    """
    entries = [first, *(replace(entry, top=entry.top[:num_top]) for entry in rest if entry)]
    said, shown = b"".join(entry.token_bytes for entry in entries), text.encode()
    found = completion_logprobs(entries, as_ids=as_ids, offset=0, end=len(text))
    if len(said) != len(shown) and said.endswith(shown):
        start = len(said) - len(shown)
        ends = accumulate((len(entry.token_bytes) for entry in entries), initial=-start)
        offsets = [len(shown[: max(0, end)].decode("utf-8", "ignore")) for end in ends]
        found["text_offset"] = offsets[:-1]
    found["token_logprobs"][0] = found["top_logprobs"][0] = None
    return found


def prompt_logprobs(entries: Sequence[Logprob | None], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token null (the first), or entries by token id."""
    return [None if entry is None else _by_token_id(entry, num_top) for entry in entries]


def _by_token_id(entry: Logprob, num_top: int) -> dict[str, Any]:
    return {
        str(each.token_id): {
            "logprob": finite(each.logprob),
            "rank": each.rank,
            "decoded_token": each.token,
        }
        for each in (entry, *entry.top[:num_top])
    }


def _name(entry: Logprob, as_ids: bool) -> str:
    """A key that tells tokens apart: parts of characters by their bytes, as OpenAI names them."""
    if as_ids:
        return f"token_id:{entry.token_id}"
    if "\ufffd" in entry.token:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)
    return entry.token
