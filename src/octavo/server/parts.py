"""An answer's text taken apart as it comes: reasoning, content, tool calls.

Text is held back only while it may be part of a mark. However the pieces are cut, joined they are
the same parts: the plain answer is the fold of the stream.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from .tools import HEAD, MIDDLE, OPEN, TAIL

THINK, END_THINK = "<think>", "</think>"


class Parts(NamedTuple):
    """What a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """In the form of a streamed delta."""


class AnswerForm(NamedTuple):
    """Which parts an answer may have."""

    thinking: str = ""
    """open: the prompt ends inside the reasoning; may: it may begin with it; empty: none."""

    tools: str = ""
    """auto, required or named; empty: none."""

    show_reasoning: bool = True


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be white space and the beginning of `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    size = next((k for k in sizes if text.endswith(mark[:k])), 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())


class _Reasoning:
    """Takes the text between <think> and </think> out; white space around the marks goes."""

    def __init__(self, thinking: str) -> None:
        self._state = {"open": "think", "may": "start", "": "done"}[thinking]
        self._held = ""
        self._strip = bool(thinking)

    def push(self, text: str, *, final: bool) -> tuple[str, str]:
        """(reasoning, what is left) of a piece."""
        if self._state == "done":
            return "", self._left(text)
        self._held += text
        if self._state == "start":
            begun = self._held.lstrip()
            if THINK.startswith(begun[: len(THINK)]) and len(begun) < len(THINK) and not final:
                return "", ""
            if not begun.startswith(THINK):
                self._state, self._strip = "done", False
                return "", self._held
            self._state, self._held = "think", begun[len(THINK) :]
        return self._think(final=final)

    def _think(self, *, final: bool) -> tuple[str, str]:
        if self._strip:
            self._held = self._held.lstrip()
            self._strip = not self._held
        at = self._held.find(END_THINK)
        if at >= 0:
            reasoning, rest = self._held[:at].rstrip(), self._held[at + len(END_THINK) :]
            self._state, self._strip = "done", True
            return reasoning, self._left(rest)
        keep = 0 if final else held_back(self._held, END_THINK)
        cut = len(self._held) - keep
        reasoning, self._held = self._held[:cut], self._held[cut:]
        return reasoning, ""

    def _left(self, text: str) -> str:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text


class _Calls:
    """Takes tool calls out of a text that a grammar holds to their form (tools.py)."""

    def __init__(self) -> None:
        self._state = "text"
        self._held = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self.num_calls = 0

    @property
    def is_whole(self) -> bool:
        """Whether no call is under way."""
        return self._state == "text"

    def push(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """(content, deltas of calls) of a piece."""
        self._held += text
        content: list[str] = []
        deltas: list[dict[str, Any]] = []
        while self._advance(content, deltas, final=final):
            pass
        return "".join(content), deltas

    def _advance(self, content: list[str], deltas: list[dict[str, Any]], *, final: bool) -> bool:
        """One step of the state machine; whether there may be another."""
        if self._state == "text":
            return self._text(content, final=final)
        if self._state == "name":
            end = self._held.find('"')
            if end < 0 or len(self._held) < end + len(MIDDLE):
                return False
            deltas.append(self._new_call(self._held[:end]))
            self._held = self._held[end + len(MIDDLE) :]
            self._state = "arguments"
            return True
        if self._state == "arguments":
            return self._arguments(deltas)
        if len(self._held) < len(TAIL):
            return False
        self._held = self._held[len(TAIL) :]
        self._state = "text"
        return True

    def _text(self, content: list[str], *, final: bool) -> bool:
        mark = OPEN + HEAD
        at = self._held.find(mark)
        if at >= 0:
            content.append(self._held[:at].rstrip())
            self._held = self._held[at + len(mark) :]
            self._state = "name"
            return True
        if final:
            # A cut may leave the beginning of a call, or the blank between two: that is no text.
            cut = len(self._held) - held_back(self._held, mark)
            is_call = self.num_calls or OPEN in self._held[cut:]
            content.append(self._held[:cut] if is_call else self._held)
            self._held = ""
            return False
        cut = len(self._held) - held_back(self._held, mark)
        content.append(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _new_call(self, name: str) -> dict[str, Any]:
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }

    def _arguments(self, deltas: list[dict[str, Any]]) -> bool:
        end = self._end_of_object()
        fragment, self._held = self._held[:end], self._held[end:]
        if fragment:
            index = self.num_calls - 1
            deltas.append({"index": index, "function": {"arguments": fragment}})
        if self._depth == 0 and fragment:
            self._state = "tail"
            return True
        return False

    def _end_of_object(self) -> int:
        """Length of what belongs to the object that is open; it is closed if depth is 0."""
        for at, character in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return len(self._held)


class AnswerParser:
    """One per answer."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._reasoning = _Reasoning(form.thinking)
        self._calls = _Calls() if form.tools else None

    def push(self, text: str, *, final: bool) -> Parts:
        """Take a piece of text, the last one if `final`."""
        reasoning, content = self._reasoning.push(text, final=final)
        deltas: list[dict[str, Any]] = []
        if self._calls is not None:
            content, deltas = self._calls.push(content, final=final)
        return Parts(content, reasoning if self._form.show_reasoning else "", tuple(deltas))

    def finish_reason(self, reason: str) -> str:
        """OpenAI's: tool_calls after whole calls, but stop where the call was named (C76)."""
        calls = self._calls
        if reason != "stop" or calls is None or not calls.num_calls or not calls.is_whole:
            return reason
        return "stop" if self._form.tools == "named" else "tool_calls"
