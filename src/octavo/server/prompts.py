"""Prompts and messages as clients really send them, brought into one shape."""

from __future__ import annotations

from typing import Any

from ..engine.chat_messages import ROLES, parse_tool_calls
from ..errors import RequestError

MAX_PROMPTS = 1024
"""Prompts in one request."""

MAX_TOKEN_ID = 2**31 - 1

PROMPT_SHAPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _bad_prompt(message: str) -> RequestError:
    return RequestError(message, param="prompt")


def parse_prompt(value: Any) -> list[str] | list[list[int]]:
    """All prompts of a completions request, in one of two shapes.

    Raises RequestError for an empty list in any place (C53). An empty string passes: with a model
    that puts a BOS token in front it is a prompt of one token.
    """
    if value is None:
        raise _bad_prompt(f"prompt is missing; it must be {PROMPT_SHAPES}")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _bad_prompt(f"prompt must be {PROMPT_SHAPES}")
    if not value:
        raise _bad_prompt("prompt is an empty list; it must hold at least one token")
    if all(type(item) is int for item in value):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        text = f"prompt has {len(value)} prompts, but one request may have {MAX_PROMPTS}"
        raise _bad_prompt(text)
    if all(type(item) is str for item in value):
        return value
    if all(type(item) is list for item in value):
        return [_token_ids(item) for item in value]
    raise _bad_prompt(f"prompt must be {PROMPT_SHAPES}, not a mixture")


def _token_ids(ids: list[Any]) -> list[int]:
    if not ids:
        raise _bad_prompt("prompt is empty; it must hold at least one token")
    for token_id in ids:
        if type(token_id) is not int:
            raise _bad_prompt(f"prompt must be {PROMPT_SHAPES}")
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise _bad_prompt(f"prompt has the token id {token_id}, which no model knows")
    return ids


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages of a chat, each as {"role", "content": str} plus the name, the tool calls (with
    arguments as an object), the id of the answered call and the reasoning that it has.

    Parts of type text are joined with newlines. Raises RequestError that says which message is
    at fault.
    """
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object", param="messages")
    role = value.get("role")
    if role not in ROLES:
        text = f"{where}.role is {str(role)[:64]!r}, but must be one of {', '.join(ROLES)}"
        raise RequestError(text, param="messages")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise RequestError(f"{where}.{name} is not supported yet", param="messages")
    calls = value.get("tool_calls")
    if calls and role != "assistant":
        raise RequestError(f"{where}.tool_calls: only an assistant calls", param="messages")
    content = value.get("content")
    message = {
        "role": role,
        "content": "" if calls and content in (None, []) else _content(content, where),
    }
    if calls:
        message["tool_calls"] = parse_tool_calls(calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    reasoning = value.get("reasoning") or value.get("reasoning_content")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    return message


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return "\n".join(_text_part(part, where) for part in value)
    text = f"{where}.content must be a string, or a list of at least one text part"
    raise RequestError(text, param="messages")


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    wanted = 'must be {"type": "text", "text": "..."}: this model reads text only'
    raise RequestError(f"{where}.content has a part that {wanted}", param="messages")
