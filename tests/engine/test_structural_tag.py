"""Structural tags: free text, and regions between tags that keep their schema."""

from __future__ import annotations

from typing import Any

import pytest

from beds.tiny_tokenizer import EOS, gguf_spec
from octavo.engine.grammar import Grammars
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import RequestError
from octavo.structural_tag import structural_tag

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"begin": "<t>", "content": CONTENT, "end": "</t>"}
TOKENIZER = Tokenizer(gguf_spec())
GRAMMARS = Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS])


def older(*structures: tuple[str, str], triggers: list[str]) -> dict[str, Any]:
    tags = [{"begin": begin, "schema": SCHEMA, "end": end} for begin, end in structures]
    return {"type": "structural_tag", "structures": tags, "triggers": triggers}


def newer(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


def accepts(given: dict[str, Any], text: str) -> bool:
    """Whether this is a whole answer, given token by token."""
    matcher = GRAMMARS.compile(structural_tag(given))._matcher.deep_copy()
    token_ids = TOKENIZER.encode(text, add_special_tokens=False, parse_special=False)
    return all(matcher.consume_token(i) for i in token_ids) and matcher.is_accepting()


CALLS = older(('<f=é/x "y">', "</f>"), ("<f=g>", ""), ("[", "]\n"), triggers=["<f=", "["])
NEAR = older(("<f>", "</f>"), ("<f=g>", "</f>"), triggers=["<f", "<f="])
TRIGGERED = newer("triggered_tags", triggers=["<t"], tags=[TAG])
ONE = newer("triggered_tags", triggers=["<t"], tags=[TAG], at_least_one=True, stop_after_first=True)
SOME = newer("triggered_tags", triggers=["<t"], tags=[TAG], at_least_one=True)
FIRST = newer("triggered_tags", triggers=["<t"], tags=[TAG], stop_after_first=True)
LISTED = newer("tags_with_separator", tags=[TAG], separator="\n")
THOUGHT = newer(
    "sequence",
    elements=[
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
        {
            "type": "or",
            "elements": [
                {"type": "regex", "pattern": r"[a/b]{2}\\/\d"},
                {"type": "const_string", "value": 'no\n"x"'},
                {"type": "const_string", "value": ""},
            ],
        },
        {"type": "any_text"},
    ],
)


@pytest.mark.parametrize(
    ("given", "text", "wanted"),
    [
        (CALLS, "", True),
        (CALLS, "no tag here, <f or so", True),
        (CALLS, 'a <f=é/x "y">{"a":1}</f> b\n<f=g>{"a":2} [{"a":2}]\n<', True),
        (CALLS, "<f=h>", False),
        (CALLS, '<f=g>{"a":3}', False),
        (CALLS, '<f=g>{"a": 1}', False),
        (CALLS, '<f=g>{"a":1', False),
        (CALLS, "as in [1]", False),
        (NEAR, '<f=g>{"a":1}</f><f>{"a":2}</f>', True),
        (NEAR, "<f ", False),
        (TRIGGERED, 'x<t>{"a":1}</t>y<t>{"a":1}</t>', True),
        (TRIGGERED, "x<t y", False),
        (ONE, 'x<t>{"a":1}</t>', True),
        (ONE, "x", False),
        (ONE, 'x<t>{"a":1}</t> ', False),
        (SOME, "x", False),
        (SOME, 'x<t>{"a":1}</t> <t>{"a":2}</t>!', True),
        (FIRST, "x", True),
        (FIRST, '<t>{"a":1}</t>x', False),
        (LISTED, "", True),
        (LISTED, '<t>{"a":1}</t>\n<t>{"a":2}</t>', True),
        (LISTED, '<t>{"a":1}</t><t>{"a":2}</t>', False),
        (THOUGHT, "<think>a </think b</think>a/\\/7 and so on", True),
        (THOUGHT, '<think></think>no\n"x"', True),
        (THOUGHT, "<think>x</think>", True),
        (THOUGHT, "<think>x", False),
    ],
)
def test_an_answer_is_free_but_for_its_tags(given: Any, text: str, wanted: bool) -> None:
    assert accepts(given, text) is wanted


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "structures"),
        (older(triggers=["<"]), "structures"),
        (older(("<f>", ""), triggers=[]), "triggers"),
        (older(("<f>", ""), triggers=[""]), "triggers"),
        (older(("<f>", ""), triggers=["<g"]), r"structures\[0\].begin"),
        (older(("<f>", ""), triggers=["<f", "<g"]), "triggers: no tag begins with '<g'"),
        (older(("", ""), triggers=["<"]), r"structures\[0\].begin"),
        ({**older(("<f>", ""), triggers=["<"]), "sprouts": 1}, "sprouts"),
        ({"structures": [1], "triggers": ["<"]}, r"structures\[0\]"),
        ({"structures": [{"begin": "<", "end": 1}], "triggers": ["<"]}, r"structures\[0\].end"),
        (newer("xml"), "format.type must be one of any_text"),
        ({"format": 1}, "format.type"),
        ({"format": {"type": ["tag"]}}, "format.type"),
        ({"format": {"type": {}}}, "format.type"),
        (newer("triggered_tags", triggers="<", tags=[TAG]), "format.triggers"),
        (newer("triggered_tags", triggers=["<"], tags=[{**TAG, "x": 1}]), r"format.tags\[0\]: 'x'"),
        (newer("triggered_tags", triggers=["<"], tags=[TAG], at_least_one=1), "at_least_one"),
        (newer("tag", begin="<", content=1, end=""), "format.content"),
        (newer("tag", begin="<", content={"type": "any_text"}, end=""), "format.end"),
        (newer("regex", pattern=""), "format.pattern"),
        (newer("regex", pattern=1), "format.pattern"),
        (newer("const_string"), "format.value"),
        (newer("json_schema", json_schema=[1]), "format.json_schema"),
        (newer("json_schema", json_schema={"nullable": True}), "format.json_schema: .*nullable"),
        (newer("json_schema", json_schema={"x-guidance": {}}), "x-guidance"),
        (
            newer("sequence", elements=[{"type": "any_text"}, {"type": "const_string"}]),
            r"format.elements\[0\]: any_text",
        ),
        (
            newer("sequence", elements=[TRIGGERED["format"], {"type": "any_text"}]),
            r"format.elements\[0\]: triggered_tags",
        ),
        (newer("or", elements=[{"type": "any_text"}] * 300), "256 parts"),
    ],
)
def test_what_is_no_structural_tag_is_refused_by_its_place(given: Any, where: str) -> None:
    """C71: never dropped, never guessed."""
    with pytest.raises(RequestError, match=where):
        structural_tag(given)


def test_a_deep_one_is_refused() -> None:
    part: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(100):
        part = {"type": "sequence", "elements": [part]}
    with pytest.raises(RequestError, match="deep"):
        structural_tag({"format": part})


def test_a_keyword_in_a_tag_is_refused_by_its_name() -> None:
    """C70: in the schema of a region as anywhere."""
    given = newer("json_schema", json_schema={"not": {}})
    with pytest.raises(RequestError, match='"not"'):
        GRAMMARS.compile(structural_tag(given))


@pytest.mark.parametrize("pattern", ["a/ | b", "(", 'x"\ny: "z', r"a\/b/i"])
def test_an_expression_can_not_leave_its_place(pattern: str) -> None:
    """What a client writes between slashes stays there."""
    spec = structural_tag(newer("regex", pattern=pattern))
    if pattern == "(":
        with pytest.raises(RequestError):
            GRAMMARS.compile(spec)
        return
    wanted = {"a/ | b": "a/ ", 'x"\ny: "z': 'x"\ny: "z', r"a\/b/i": "a/b/i"}[pattern]
    assert accepts(newer("regex", pattern=pattern), wanted)
    assert not accepts(newer("regex", pattern=pattern), "b")
