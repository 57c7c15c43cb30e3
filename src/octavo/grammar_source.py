"""A form in llguidance's own words: text from text, nothing is compiled."""

from __future__ import annotations

import json

from .errors import RequestError
from .grammar_spec import GrammarSpec

_THINKING = r"""
rest[lazy]: /(.|\n)*/ "</think>"
blank: /[ \n]*/
"""
_STARTS = {"": "", "open": "rest blank", "may": '(/[ \\n]*/ "<think>" rest blank)?'}


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
    from llguidance.gbnf_to_lark import any_to_lark

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
    is_lark = spec.kind == "lark"
    return LLMatcher.grammar_from_lark(spec.source if is_lark else any_to_lark(spec.source))
