"""Structural tags: free text with regions between tags that keep a schema, as a grammar.

Two dialects in which clients of vLLM write them:

    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}
    {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
        {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}}

Text is free up to a trigger; where one stands, a tag that begins with it must follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import RequestError
from .grammar_spec import GrammarSpec

MAX_PARTS = 256
"""Tags and other parts of one structural tag."""

COMPACT = {"whitespace_flexible": False, "lenient": False}
"""For llguidance, inside a grammar: JSON without white space, and no keyword that is ignored."""

EMPTY = '""'
_HEAD = ["%llguidance {}", r"TEXT: /(.|\n)*/"]


def structural_tag(given: Mapping[str, Any]) -> GrammarSpec:
    """The grammar of a structural tag. Raises RequestError that names the part."""
    known = {"type", "format"} if "format" in given else {"type", "structures", "triggers"}
    _known_only(given, known, "the structural tag")
    writer = _Writer()
    if "format" in given:
        start = writer.part(given["format"], "format", last=True)
    else:
        tags = [
            _as_tag(tag, f"structures[{i}]") for i, tag in enumerate(_list(given, "structures"))
        ]
        start = writer.triggered({"triggers": given.get("triggers"), "tags": tags}, "")
    return GrammarSpec.exact("\n".join([*_HEAD, f"start: {start}", *writer.rules]))


def compact_schema(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a part of a grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})


def literal(text: str) -> str:
    """Text as a part of a grammar; nothing for the empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


class _Tag(NamedTuple):
    begin: str
    content: Mapping[str, Any]
    end: str
    where: str


class _Writer:
    """Writes rules, each under a name of its own; a part is what can stand inside a rule."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._num_parts = 0

    def part(self, given: Any, where: str, *, last: bool) -> str:
        """Any format. `last`: nothing follows it, so free text may stand there."""
        kind = given.get("type") if isinstance(given, Mapping) else None
        writers: dict[str, Callable[[], str]] = {
            "any_text": lambda: self._any_text(where, last=last),
            "const_string": lambda: literal(_text(given, "value", where)),
            "json_schema": lambda: self._schema(given, where),
            "regex": lambda: self._regex(given, where),
            "sequence": lambda: self._sequence(given, where, last=last),
            "or": lambda: self._either(given, where, last=last),
            "tag": lambda: self._tag(_tag_of(given, where)),
            "triggered_tags": lambda: self.triggered(given, where, last=last),
            "tags_with_separator": lambda: self._separated(given, where),
        }
        if not isinstance(kind, str) or kind not in writers:
            raise RequestError(f"{where}.type must be one of {', '.join(writers)}")
        _known_only(given, _FIELDS[kind], where)
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or where.count(".") > 32:
            raise RequestError(f"{where}: a structural tag may have {MAX_PARTS} parts, 32 deep")
        return self._rule(writers[kind]())

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body or EMPTY}")
        return name

    def _any_text(self, where: str, *, last: bool) -> str:
        if not last:
            raise RequestError(f"{where}: any_text may stand in a tag, or where nothing follows")
        return "TEXT"

    def _schema(self, given: Mapping[str, Any], where: str) -> str:
        schema = given.get("json_schema")
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where}.json_schema must be a JSON schema")
        try:
            GrammarSpec.json(schema)
        except RequestError as error:
            raise RequestError(f"{where}.json_schema: {error}") from None
        return compact_schema(schema)

    def _regex(self, given: Mapping[str, Any], where: str) -> str:
        pattern = _text(given, "pattern", where)
        if not pattern:
            raise RequestError(f"{where}.pattern must not be empty")
        GrammarSpec.regex(pattern)
        return f"/{_without_slashes(pattern)}/"

    def _sequence(self, given: Mapping[str, Any], where: str, *, last: bool) -> str:
        elements = _list(given, "elements", where)
        end = len(elements) - 1
        return " ".join(
            self.part(element, f"{where}.elements[{i}]", last=last and i == end)
            for i, element in enumerate(elements)
        )

    def _either(self, given: Mapping[str, Any], where: str, *, last: bool) -> str:
        elements = enumerate(_list(given, "elements", where))
        parts = [self.part(element, f"{where}.elements[{i}]", last=last) for i, element in elements]
        return " | ".join(parts)

    def _tag(self, tag: _Tag, skip: str = "") -> str:
        """A tag, without the trigger `skip` that was read already."""
        begin = literal(tag.begin.removeprefix(skip))
        if tag.content.get("type") == "any_text":
            if not tag.end:
                raise RequestError(f"{tag.where}.end must say where any_text ends")
            return f"{begin} {self._rule(f'TEXT {literal(tag.end)}', lazy=True)}"
        content = self.part(tag.content, f"{tag.where}.content", last=False)
        return f"{begin} {content} {literal(tag.end)}"

    def triggered(self, given: Mapping[str, Any], where: str, *, last: bool = True) -> str:
        """Free text, with tags where a trigger stands."""
        prefix = f"{where}." if where else ""
        if not last:
            raise RequestError(f"{where}: triggered_tags may stand only where nothing follows")
        triggers = _list(given, "triggers", where)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise RequestError(f"{prefix}triggers must be non-empty strings")
        groups: dict[str, list[str]] = {}
        for i, one in enumerate(_list(given, "tags", where)):
            tag = one if isinstance(one, _Tag) else _tag_of(one, f"{prefix}tags[{i}]")
            fitting = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
            if not fitting:
                raise RequestError(f"{tag.where}.begin must start with one of the triggers")
            # Of two triggers the shorter one is seen first.
            trigger = min(fitting, key=len)
            groups.setdefault(trigger, []).append(self._rule(self._tag(tag, trigger)))
        unused = [t for t in triggers if not any(t.startswith(trigger) for trigger in groups)]
        if unused:
            raise RequestError(f"{prefix}triggers: no tag begins with {unused[0][:64]!r}")
        parts = []
        for trigger, bodies in groups.items():
            seen = self._rule(f"TEXT {literal(trigger)}", lazy=True)
            parts.append(f"{seen} ({' | '.join(bodies)})")
        tags = self._rule(" | ".join(parts))
        required, first = (
            _flag(given, "at_least_one", where),
            _flag(given, "stop_after_first", where),
        )
        if first:
            return tags if required else f"{tags} | TEXT"
        return f"{tags}{'+' if required else '*'} TEXT"

    def _separated(self, given: Mapping[str, Any], where: str) -> str:
        """Tags and nothing else, with a text between two of them."""
        tags = [
            _tag_of(tag, f"{where}.tags[{i}]") for i, tag in enumerate(_list(given, "tags", where))
        ]
        tag = self._rule(" | ".join(self._rule(self._tag(tag)) for tag in tags))
        separator = literal(_text(given, "separator", where))
        first = _flag(given, "stop_after_first", where)
        some = tag if first else f"{tag} ({separator} {tag})*"
        return some if _flag(given, "at_least_one", where) else f"({some})?"


_TAGS = {"type", "tags", "at_least_one", "stop_after_first"}
_FIELDS: dict[str, set[str]] = {
    "any_text": {"type"},
    "const_string": {"type", "value"},
    "json_schema": {"type", "json_schema"},
    "regex": {"type", "pattern"},
    "sequence": {"type", "elements"},
    "or": {"type", "elements"},
    "tag": {"type", "begin", "content", "end"},
    "triggered_tags": {*_TAGS, "triggers"},
    "tags_with_separator": {*_TAGS, "separator"},
}


def _known_only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(str(name) for name in given.keys() - known)
    if unknown:
        raise RequestError(f"{where}: {unknown[0][:64]!r} is not supported")


def _named(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _list(given: Mapping[str, Any], name: str, where: str = "") -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise RequestError(f"{_named(where, name)} must be a list that is not empty")
    return value


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{_named(where, name)} must be a string")
    return value


def _flag(given: Mapping[str, Any], name: str, where: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{_named(where, name)} must be true or false")
    return value


def _tag_of(given: Any, where: str) -> _Tag:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object with begin, content and end")
    _known_only(given, _FIELDS["tag"], where)
    begin, end = _text(given, "begin", where), _text(given, "end", where)
    content = given.get("content")
    if not begin or not isinstance(content, Mapping):
        name = "content must be an object" if begin else "begin must not be empty"
        raise RequestError(f"{where}.{name}")
    return _Tag(begin, content, end, where)


def _as_tag(given: Any, where: str) -> _Tag:
    """A structure of the older dialect."""
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object with begin, schema and end")
    _known_only(given, {"begin", "schema", "end"}, where)
    content = {"type": "json_schema", "json_schema": given.get("schema", True)}
    tag = {"begin": given.get("begin"), "content": content, "end": given.get("end")}
    return _tag_of(tag, where)


def _without_slashes(pattern: str) -> str:
    """The same expression, so written that it can stand between slashes on one line."""
    return re.sub(r"\\?[/\n]|\\.", _as_code, pattern)


def _as_code(found: re.Match[str]) -> str:
    text = found.group()
    return f"\\x{ord(text[-1]):02x}" if text[-1] in "/\n" else text
