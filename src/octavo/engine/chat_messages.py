"""Chat messages made ready for a template: one shape whatever the client wrote, and no way for
their text to become a control token."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROLES = ("system", "developer", "user", "assistant", "tool")

PROTOCOL_WORDS = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "text")
)
"""Roles and types that a client names and a template knows."""


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, no null fields, arguments an object.

    Content may come as null (from an assistant), as a string, or as a list of text parts,
    which are joined by line breaks. Raises RequestError that names the message at fault.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalise(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object with role and content", param="messages")
    role = message.get("role")
    if role not in ROLES:
        text = f"{where}.role is {str(role)[:64]!r}, but must be one of {', '.join(ROLES)}"
        raise RequestError(text, param="messages")
    result = {key: value for key, value in message.items() if value is not None}
    if not result.get("tool_calls", True):
        del result["tool_calls"]
    if "tool_calls" in result:
        result["tool_calls"] = parse_tool_calls(result["tool_calls"], f"{where}.tool_calls")
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestError(f"{where} ({role}) has no content", param="messages")
    result["content"] = _text_of(content, f"{where}.content")
    return result


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} must be text or a list of text parts", param="messages")
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            wanted = f"{where}[{i}] is a part of type {kind!r}; this model takes text alone"
            raise RequestError(wanted, param="messages")
        texts.append(text)
    return "\n".join(texts)


def parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: a template writes them out as JSON again."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(f"{where} must be a list of objects", param="messages")
    result = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}] must have function.name", param="messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                message = f"{where}[{i}].function.arguments is not JSON: {error}"
                raise RequestError(message, param="messages") from error
        function = {**function, "arguments": {} if arguments is None else arguments}
        result.append({**call, "function": function})
    return result


class Placeholders:
    """Stand-ins for characters of user text that could be part of a control token.

    The text goes through the template in disguise, so that control tokens found in what
    comes out are the template's own; afterwards each stand-in turns back into what it stood
    for. One character for one, so lengths and slices in a template still mean the same.
    """

    def __init__(self, control_tokens: Sequence[str], taken: set[str]) -> None:
        """Stand-ins are private-use characters that are not in `taken`."""
        self._tokens = tuple(sorted(control_tokens, key=len, reverse=True))
        cuts = [(token, cut) for token in self._tokens for cut in range(1, len(token))]
        self._heads = {token[:cut] for token, cut in cuts}
        self._tails = {token[cut:] for token, cut in cuts}
        self._longest = max(map(len, self._tokens), default=0)
        candidates = chain(range(0x10FFFD, 0xFFFFF, -1), range(0xFFFFD, 0xEFFFF, -1))
        self._unused = (chr(code) for code in candidates if chr(code) not in taken)
        self._stand_ins: dict[str, str] = {}
        self._originals: dict[int, str] = {}

    def new(self, original: str) -> str:
        """A character of no other use that `restore` turns into `original`."""
        try:
            stand_in = next(self._unused)
        except StopIteration:
            message = "the messages use every private-use character there is"
            raise RequestError(message, param="messages") from None
        self._originals[ord(stand_in)] = original
        return stand_in

    def __contains__(self, character: str) -> bool:
        return ord(character) in self._originals

    def restore(self, text: str) -> str:
        """The text as the user wrote it."""
        return text.translate(self._originals) if self._originals else text

    def protect(self, value: Any) -> Any:
        """The same value with every string in it (and every odd key) disguised.

        Words of the protocol stay, since templates compare with them.
        """
        if isinstance(value, str):
            return value if value in PROTOCOL_WORDS else self._protect_text(value)
        if isinstance(value, dict):
            return {
                key if key in PROTOCOL_WORDS or str(key).isidentifier() else self.protect(key): (
                    self.protect(item)
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def _protect_text(self, text: str) -> str:
        """Disguise each control token, and what could become one together with a neighbour."""
        for token in self._tokens:
            while token in text:  # more than once, since tokens may overlap
                text = text.replace(token, self._stand_in(token[0]) + token[1:])
        lengths = range(1, min(len(text), self._longest - 1) + 1)
        spots = {len(text) - k for k in lengths if text[len(text) - k :] in self._heads}
        if any(text[:k] in self._tails for k in lengths):
            spots.add(0)
        if spots:
            text = "".join(
                self._stand_in(character) if i in spots else character
                for i, character in enumerate(text)
            )
        return text

    def _stand_in(self, character: str) -> str:
        if character in self:
            return character
        if character not in self._stand_ins:
            self._stand_ins[character] = self.new(character)
        return self._stand_ins[character]


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)
