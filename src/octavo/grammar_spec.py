"""What an answer must look like, as a value: a schema, an expression, a grammar; not compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RequestError

MAX_SOURCE_CHARS = 2**18
"""Of a schema, expression or grammar as text."""

MAX_CHOICES = 4096
MAX_SCHEMA_DEPTH = 64
MAX_GBNF_RULES = 2000
"""To turn them into Lark takes time by their square."""
MAX_INTERSECTED = 16
"""Expressions that must hold together: the time to compile them grows by three with each."""

MAX_OPTIONAL = 1000
"""Parts of all expressions of a form that may be missing or repeat: to compile those that follow
each other takes time by the square of their number."""

BOUNDED_WHITESPACE = r"[ \n\t]{0,16}"
"""Between the parts of JSON where a caller frees it: endless blanks are valid JSON, too."""


LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\\n])++/?')
"""Text and expressions of a grammar, up to the end of the line where they have none: so each
character is looked at once."""


_OPTIONAL = re.compile(r"\\.|\(\?|([?*{]|[(|:]\||\|\)|\(\))", re.DOTALL)
"""What makes a part of an expression optional, but for escapes and the beginnings of groups."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Make one by json(), regex(), choice() or lark(). Each raises RequestError."""

    kind: str
    """json, regex, lark, or either (Lark or GBNF)."""

    source: str
    whitespace: str = ""
    """For json: an expression for the white space between its parts; empty: none, compact."""

    instead: GrammarSpec | None = None
    """Another form that the answer may have as well: the first token of a choice decides."""

    thinking: str = ""
    """What may come before: open (the rest of a reasoning, up to its </think>), may (a whole one,
    or none) or nothing at all."""

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool, whitespace: str = "") -> GrammarSpec:
        """JSON that a schema describes; {"type": "object"} is any object.

        A `format` is a form of text: a date may be 29 February in any year.
        """
        _refuse_extensions(schema, 0)
        _refuse_costly(schema)
        given = {} if schema is True else schema
        if not isinstance(given, Mapping):
            raise RequestError("the JSON schema must be an object", param="schema")
        return _checked(cls("json", json.dumps(given), whitespace))

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that the whole expression matches (syntax of the Rust crate regex)."""
        if isinstance(pattern, str):
            refuse_optional(num_optional(pattern))
        return _checked(cls("regex", pattern))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """One of these texts."""
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise RequestError("a choice needs a list of non-empty strings", param="choice")
        if len(choices) > MAX_CHOICES:
            text = f"a choice has {len(choices)} texts, but may have {MAX_CHOICES}"
            raise RequestError(text, param="choice")
        return _checked(cls("regex", "|".join(map(literal_regex, choices))))

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """A context-free grammar: Lark, or GBNF as llama.cpp writes it."""
        if isinstance(grammar, str) and LITERAL.sub("", grammar).count("&") > MAX_INTERSECTED:
            text = f"the grammar intersects more than {MAX_INTERSECTED} expressions"
            raise RequestError(text, param="grammar")
        if isinstance(grammar, str) and grammar.count("::=") > MAX_GBNF_RULES:
            text = f"the grammar has more than {MAX_GBNF_RULES} rules"
            raise RequestError(text, param="grammar")
        return _checked(cls("either", grammar))

    @classmethod
    def exact(cls, grammar: str) -> GrammarSpec:
        """Lark and nothing else, with llguidance's extensions: for grammars of our own making."""
        return _checked(cls("lark", grammar))


def literal_regex(text: str) -> str:
    """An expression that matches exactly this text."""
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text)


def _checked(spec: GrammarSpec) -> GrammarSpec:
    if not isinstance(spec.source, str) or not spec.source:
        raise RequestError(f"a grammar of kind {spec.kind} needs a non-empty text", param="grammar")
    size = len(spec.source) + len(spec.whitespace)
    if size > MAX_SOURCE_CHARS:
        text = f"the grammar has {size} characters, but may have {MAX_SOURCE_CHARS}"
        raise RequestError(text, param="grammar")
    return spec


def _refuse_extensions(schema: Any, depth: int) -> None:
    """Raises RequestError for keywords that would silently mean nothing, or too much."""
    if depth > MAX_SCHEMA_DEPTH:
        text = f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} levels deep"
        raise RequestError(text, param="schema")
    if not isinstance(schema, Mapping):
        return
    if schema.get("nullable") is True:
        text = 'unsupported keyword "nullable" in the JSON schema: write "type": ["...", "null"]'
        raise RequestError(text, param="schema")
    if "x-guidance" in schema:
        text = 'unsupported keyword "x-guidance" in the JSON schema'
        raise RequestError(text, param="schema")
    for part in _subschemas(schema):
        _refuse_extensions(part, depth + 1)


def num_optional(expression: str) -> int:
    """Parts that may be missing or repeat."""
    return sum(map(bool, _OPTIONAL.findall(expression)))


def refuse_optional(number: int) -> None:
    """Raises RequestError where there are too many."""
    if number > MAX_OPTIONAL:
        text = f"more than {MAX_OPTIONAL} parts of its expressions may be missing or repeat"
        raise RequestError(text, param="grammar")


def _refuse_costly(schema: Any) -> None:
    """Raises RequestError where allOf may join too many expressions (a $ref may hide which), or
    where they are too long."""
    num_members = num_expressions = 0
    patterns: list[Any] = []
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            members = part.get("allOf")
            num_members += len(members) if isinstance(members, list) else 0
            num_expressions += ("pattern" in part) + ("format" in part)
            names = part.get("patternProperties")
            patterns += [part.get("pattern"), *(names if isinstance(names, Mapping) else ())]
            left += _subschemas(part)
    refuse_optional(sum(num_optional(each) for each in patterns if isinstance(each, str)))
    if min(num_members, num_expressions) > MAX_INTERSECTED:
        text = f"the JSON schema has more than {MAX_INTERSECTED} patterns and members of allOf"
        raise RequestError(text, param="schema")


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(value := schema.get(name), Mapping):
            yield from value.values()
    for name in ("anyOf", "allOf", "oneOf", "prefixItems", "items"):
        if isinstance(value := schema.get(name), list):
            yield from value
    for name in ("items", "additionalProperties", "additionalItems"):
        yield schema.get(name)
