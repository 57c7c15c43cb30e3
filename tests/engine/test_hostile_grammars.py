"""Grammars made to hurt before they are compiled, or while they are: C98, at the door."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from beds.engine_bed import EngineBed
from beds.tiny_tokenizer import EOS, FIRST_BYTE
from octavo.engine.grammar import Matcher
from octavo.errors import RequestError
from octavo.grammar_source import source_of
from octavo.grammar_spec import MAX_OPTIONAL, MAX_SOURCE_CHARS, GrammarSpec
from octavo.structural_tag import structural_tag

HANG = 60.0
"""Seconds for what takes one, or, looked at again and again, several minutes."""

IN_ITS_OWN_PROCESS = """
import sys
from engine.test_hostile_grammars import {table}, EngineBed, EOS, RequestError, source_of
for make in {table}[sys.argv[1]]:
    try:
        {act}
    except RequestError as error:
        print(error)
print("alive")
"""


def apart(table: str, name: str, act: str) -> str:
    """What a process of its own says about an entry of a table: it may crash, or hang."""
    code = IN_ITS_OWN_PROCESS.format(table=table, act=act)
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def chain(step: str, end: str, joint: str, size: int) -> str:
    return joint.join([*(step.format(i, i + 1) for i in range(size)), end.format(size)])


def linked(step: dict[str, Any], size: int) -> dict[str, Any]:
    defs = {str(i): {**step, "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(size)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(size): {"type": "null"}}}


CHAINS: dict[str, list[Callable[[], GrammarSpec]]] = {
    "rules": [
        lambda: GrammarSpec.lark("start: r0\n" + chain("r{}: r{}", 'r{}: "a"', "\n", 15_000)),
        lambda: GrammarSpec.lark("root ::= r0\n" + chain("r{} ::= r{}", 'r{} ::= "a"', "\n", 1900)),
    ],
    "terminals": [
        lambda: GrammarSpec.lark("start: T0\n" + chain("T{}: T{}", 'T{}: "a"', "\n", 15_000)),
    ],
    "references": [
        lambda: GrammarSpec.json(linked({"type": "array"}, 3800)),
        lambda: GrammarSpec.json(linked({}, 5000)),
    ],
}


@pytest.mark.parametrize("name", CHAINS)
def test_no_chain_overruns_the_stack(name: str) -> None:
    """C98: each link is a call inside the last one; one too many would be the end of the server."""
    act = "EngineBed(eos_token_ids=(EOS,)).core.grammars.compile(make())"
    assert apart("CHAINS", name, act).endswith("alive\n")


HALF = MAX_SOURCE_CHARS // 2 - 50
ENDLESS: dict[str, list[Callable[[], GrammarSpec]]] = {
    "literals": [
        lambda: GrammarSpec.lark('start: "' + '\\"' * HALF),
        lambda: GrammarSpec.lark("start: /" + "\\/" * HALF),
    ],
    "blank lines": [
        lambda: GrammarSpec.lark("\n" * 2 * HALF + 'root ::= "a"'),
        lambda: GrammarSpec.lark(" \n" * HALF + "start: missing"),
    ],
    "rules": [lambda: GrammarSpec.lark(chain("r{} ::= r{}", 'r{} ::= "a"', "\n", 15_000))],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_text_is_looked_at_once(name: str) -> None:
    """C98: Python's lock is held meanwhile; looking again and again would stop everybody."""
    assert apart("ENDLESS", name, "source_of(make())").endswith("alive\n")


def doubled(levels: int, end: str) -> str:
    return "start: X0\n" + chain("X{0}: X{1} X{1}", "X{}: " + end, "\n", levels)


def many(number: int) -> str:
    return "a?b*" * (number // 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.regex(many(MAX_OPTIONAL + 2)),
        lambda: GrammarSpec.regex(r"\\?" * (MAX_OPTIONAL + 1)),
        lambda: GrammarSpec.regex("(a|)" * (MAX_OPTIONAL + 1)),
        lambda: GrammarSpec.regex("(?:|a)" * (MAX_OPTIONAL + 1)),
        lambda: GrammarSpec.json({"items": {"pattern": many(MAX_OPTIONAL + 2)}}),
        lambda: GrammarSpec.json({"anyOf": [{"pattern": many(300)}, {"pattern": many(800)}]}),
        lambda: GrammarSpec.json({"patternProperties": {many(MAX_OPTIONAL + 2): {}}}),
        lambda: structural_tag({"format": {"type": "regex", "pattern": many(MAX_OPTIONAL + 2)}}),
        lambda: GrammarSpec.lark(doubled(14, '"a"?')),
        lambda: GrammarSpec.lark(doubled(11, "/a?/")),
        lambda: GrammarSpec.lark(doubled(40, '["a"]')),
        lambda: GrammarSpec.lark(doubled(12, '"a"~0..3').replace("start", "%llguidance {}\nstart")),
        lambda: GrammarSpec.lark("start: X\nX: " + '"a"? ' * (MAX_OPTIONAL + 1)),
        lambda: GrammarSpec.lark("root ::= x\nx ::= " + '"a"? ' * (MAX_OPTIONAL + 1)),
    ],
)
def test_thousands_of_optional_parts_are_refused(make: Callable[[], GrammarSpec]) -> None:
    """C98: to compile them takes time by the square of their number, and a few lines hold many."""
    with pytest.raises(RequestError, match="parts of its expressions may be missing"):
        source_of(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.regex("(" + r"\?|\*|\{" * MAX_OPTIONAL + ")"),
        lambda: GrammarSpec.regex("(?:ab|cd)" * MAX_OPTIONAL),
        lambda: GrammarSpec.choice([f"really? {i} * {i}" for i in range(4096)]),
        lambda: GrammarSpec.json({"enum": ["?" * i for i in range(200)]}),
        lambda: GrammarSpec.lark("start: (" + '"a"? ' * (MAX_OPTIONAL + 1) + ")"),
        lambda: GrammarSpec.lark("start: x*\nx: A? B\nA: /a?/ B\ny: " + "x? " * 2000 + "\nB: /b*/"),
    ],
)
def test_what_only_looks_optional_is_not_counted(make: Callable[[], GrammarSpec]) -> None:
    """Letters, groups and alternatives, and the rules around terminals."""
    EngineBed(eos_token_ids=(EOS,)).core.grammars.compile(make())


def test_the_first_mask_is_made_once_for_all_answers() -> None:
    """C98: it may take 60 ms, and they all begin between two steps; each ends in its form."""
    engine = EngineBed(eos_token_ids=(EOS,), num_blocks=400)
    spec = GrammarSpec.regex("[ab]{3}c")
    engine.core.grammars.compile(spec)
    with mock.patch.object(Matcher, "_fill") as fill:
        engine.add([9, 8, 7], grammar=spec, n=16)
    assert fill.call_count == 0
    texts = ["".join(event.text for event in events) for events in engine.run().values()]
    assert len(texts) == 16
    assert all(re.fullmatch("[ab]{3}c", text) for text in texts)


def test_one_that_uses_up_its_grammar_leaves_the_next_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C98: states of the lexer are counted for all answers together, and never fewer."""
    monkeypatch.setattr("octavo.grammar_source.MAX_LEXER_STATES", 500)
    engine = EngineBed(eos_token_ids=(EOS,), num_blocks=400, max_model_len=1000)
    spec = GrammarSpec.regex("[ab]*a[ab]{30}c?")
    reasons = []
    for wanted in ("a" * 40, "".join(random.Random(0).choices("ab", k=900)), "a" * 40):
        engine.model.prefers = lambda output, text=wanted: [FIRST_BYTE + ord(text[len(output)])]
        number = engine.add([9, 8, 7], grammar=spec, max_tokens=len(wanted))
        reasons.append(engine.run()[number, 0][-1].finish_reason)
    assert reasons == ["length", "error", "length"]


def test_what_is_kept_of_grammars_is_bounded() -> None:
    """C98: by number and by size, the newest ones; and what was dropped is compiled again."""
    grammars = EngineBed(eos_token_ids=(EOS,)).core.grammars
    small = [GrammarSpec.regex(f"a{{{i}}}") for i in range(1, 41)]
    for spec in small:
        grammars.compile(spec)
    assert [grammars.is_compiled(spec) for spec in small] == [False] * 8 + [True] * 32
    large = [GrammarSpec.choice([f"{i} {'x' * 200} {j}" for j in range(1000)]) for i in range(7)]
    for spec in large:
        grammars.compile(spec)
    num_kept = sum(map(grammars.is_compiled, large))
    assert 1 < num_kept < 7
    assert all(map(grammars.is_compiled, large[-num_kept:]))
    assert not any(map(grammars.is_compiled, small))
    grammars.compile(large[0])
    assert grammars.is_compiled(large[0])
