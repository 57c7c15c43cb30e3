"""A form in llguidance's own words, and compiled."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING

from .deep_stack import in_deep_stack
from .errors import RequestError
from .grammar_spec import LITERAL, GrammarSpec, num_optional, refuse_optional

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_LEXER_STATES = 50_000
"""Of all answers in one grammar."""

_THINKING = r"""
rest[lazy]: /(.|\n)*/ "</think>"
blank: /[ \n]*/
"""
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
"""What only Lark has: as the library says it, but that it looks at each line once."""

_RULE = re.compile(r"^[^\S\n]*[?!]?(\w+)[^\n:]*:", re.MULTILINE)
_NAME = re.compile(r"\w+")
_LARK_OPTIONAL = re.compile(r"[?*{~\[]")

_STARTS = {"": "", "open": "rest blank", "may": '(/[ \\n]*/ "<think>" rest blank)?'}


def matcher_of(spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
    """At the beginning of an answer. Raises RequestError that says what is wrong."""
    from llguidance import LLMatcher, LLParserLimits

    # The library's own bounds on work and memory; a step of a mask ends within milliseconds.
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    # It calls itself along a chain of rules or $refs.
    matcher = in_deep_stack(
        lambda: LLMatcher(vocabulary, source_of(spec), log_level=0, limits=limits)
    )
    if matcher.is_error():
        # Of the lines around the place only some are the user's own.
        reason = re.split(r"<non-verbose|\n +\d+ \|", matcher.get_error())[0].strip()
        text = reason.replace("Unimplemented keys:", "unsupported keywords in the JSON schema:")
        raise RequestError(f"the grammar can't be used: {text}", param="grammar")
    return matcher


def source_of(spec: GrammarSpec) -> str:
    """What LLMatcher takes. Raises RequestError."""
    try:
        forms = {"form": _form_of(spec)}
        if spec.instead is not None:
            forms["instead"] = _form_of(spec.instead)
        elif not spec.thinking:
            return forms["form"]
        start = f"start: {_STARTS[spec.thinking]} ({' | '.join(f'@{name}' for name in forms)})"
        grammars = [{"lark_grammar": start + (_THINKING if spec.thinking else "")}]
        for name, form in forms.items():
            is_json = form.startswith("{")
            parts = json.loads(form)["grammars"] if is_json else [{"lark_grammar": form}]
            grammars += [{**parts[0], "name": name}, *parts[1:]]
        return json.dumps({"grammars": grammars})
    except Exception as error:
        raise RequestError(f"the grammar can't be read: {error}", param="grammar") from error


def _form_of(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if spec.kind == "json":
        # Never lenient: a keyword that is not built is refused, not ignored.
        blank = spec.whitespace or None
        return LLMatcher.grammar_from_json_schema(
            spec.source,
            overrides={
                "lenient": False,
                "whitespace_flexible": blank is not None,
                "whitespace_pattern": blank,
            },
        )
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.source)
    lark = spec.source
    if spec.kind == "either":
        lark = lark if _LARK.search(lark) else gbnf_to_lark(lark)
        refuse_optional(_num_optional(lark))
    return LLMatcher.grammar_from_lark(lark)


def _num_optional(lark: str) -> int:
    """Of all terminals of a grammar: each is one expression, with those that it is made of, so a
    few lines that double one another come to thousands."""
    marked = LITERAL.sub(lambda found: " ? " * num_optional(found[0]), lark)
    _, *parts = _RULE.split(marked)
    rules = zip(parts[::2], parts[1::2], strict=True)
    bodies = {name: body for name, body in rules if name.isupper()}

    @cache
    def number(name: str) -> int:
        own, used = _LARK_OPTIONAL.findall(bodies[name]), _NAME.findall(bodies[name])
        return min(len(own) + sum(number(each) for each in used if each in bodies), 1 << 20)

    return sum(map(number, bodies))
