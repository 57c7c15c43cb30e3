"""Structured output: an answer has its form whatever happens to it, or ends with an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import jsonschema
import pytest

from beds.engine_bed import EngineBed, tokens, with_async_engine
from beds.schemas import LINKED, TREE, all_schemas
from beds.tiny_tokenizer import EOS, FIRST_BYTE
from octavo.core.event_log import Reason
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.grammar import Matcher
from octavo.errors import RequestError
from octavo.grammar_spec import GrammarSpec, literal_regex
from octavo.outputs import StreamEvent
from octavo.sampling_params import SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

Answer = tuple[str, str | None]


def bed(**settings: Any) -> EngineBed:
    settings = {"eos_token_ids": (EOS,), "num_blocks": 400, "max_model_len": 1500, **settings}
    return EngineBed(**settings)


def text_of(events: list[StreamEvent]) -> str:
    return "".join(event.text for event in events)


def answer(engine: EngineBed, spec: GrammarSpec, **params: Any) -> Answer:
    """Text and finish reason of one request, alone."""
    request_id = engine.add([9, 8, 7], grammar=spec, **{"max_tokens": 400, **params})
    events = engine.run()[request_id, 0]
    return text_of(events), events[-1].finish_reason


def prefer(text: str) -> Callable[[list[int]], list[int]]:
    """A model that would like to say this, byte by byte."""
    wanted = [FIRST_BYTE + byte for byte in text.encode()]
    return lambda output: wanted[len(output) : len(output) + 1]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "string", "pattern": "^[0-9]{3}$"},
        {"anyOf": [{"type": "integer"}, {"const": "none"}]},
        PERSON,
        TREE,
        LINKED,
        {"type": ["string", "null"], "nullable": False},
    ],
)
def test_rare_keywords_are_kept(schema: dict[str, Any]) -> None:
    """C70: large numbers, lengths, patterns, unions, closed objects, recursion."""
    for seed in range(8):
        text, reason = answer(bed(), GrammarSpec.json(schema), seed=seed)
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
    assert reason == "stop"


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "if": {}, "then": {}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {}}, "propertyNames"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({"properties": {"a": {"items": {"nullable": True}}}}, "nullable"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
    ],
)
def test_an_unsupported_keyword_is_refused_by_its_name(schema: Any, keyword: str) -> None:
    """C70: never ignored."""
    engine = bed()
    with pytest.raises(RequestError, match=keyword):
        engine.add([5], grammar=GrammarSpec.json(schema))
    assert not engine.core.has_unfinished()
    assert not engine.core.grammars.live


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.json({"type": "string", "pattern": "(?<=a)b"}),
        lambda: GrammarSpec.json({"type": "strin"}),
        lambda: GrammarSpec.json({"type": "integer", "minimum": 5, "maximum": 3}),
        lambda: GrammarSpec.json({"$ref": "http://example.com/schema.json"}),
        lambda: GrammarSpec.json([1]),
        lambda: GrammarSpec.json(False),
        lambda: GrammarSpec.regex("(a"),
        lambda: GrammarSpec.regex(""),
        lambda: GrammarSpec.regex("a" * 300_000),
        lambda: GrammarSpec.lark("start: missing"),
        lambda: GrammarSpec.lark("start ::= ("),
        lambda: GrammarSpec.choice([]),
        lambda: GrammarSpec.choice(["a", ""]),
        lambda: GrammarSpec.choice(["a", 1]),
    ],
)
def test_a_bad_grammar_is_refused_and_never_dropped(make: Callable[[], GrammarSpec]) -> None:
    """C71: what can't be compiled is an error, not an answer without its form."""
    engine = bed()
    with pytest.raises(RequestError):
        engine.add([5], grammar=make(), n=2)
    assert engine.run() == {}


def test_a_schema_may_have_properties_named_like_keywords() -> None:
    schema = {"type": "object", "properties": {"nullable": {"type": "null"}, "not": {"const": 1}}}
    text, reason = answer(bed(), GrammarSpec.json(schema | {"additionalProperties": False}))
    assert reason == "stop"
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_fault_of_the_mask_ends_its_request_alone(at: int) -> None:
    """C71: text without its form never reaches anybody, and neighbours go on."""
    engine = bed()
    fill, calls = Matcher._fill, []

    def failing(matcher: Matcher, forced: Any) -> None:
        if matcher is engine.core.grammars.live.get(victim):
            calls.append(1)
            if len(calls) > at:
                raise ZeroDivisionError
        fill(matcher, forced)

    spec = GrammarSpec.regex("[ab]{20}c")
    victim = engine.add([9, 8, 7], grammar=spec, max_tokens=60, seed=5)
    other = engine.add([9, 8, 7], grammar=spec, max_tokens=60, seed=5)
    with mock.patch.object(Matcher, "_fill", failing):
        events = engine.run()
    assert events[victim, 0][-1].finish_reason == "error"
    assert "ZeroDivisionError" in str(events[victim, 0][-1].error)
    assert len(text_of(events[victim, 0])) == at
    assert (text_of(events[other, 0]), "stop") == answer(bed(), spec, seed=5)
    assert engine.scheduler.stats().num_running == 0


def test_a_row_without_its_mask_samples_nothing() -> None:
    """C71: should a mask be lost on the way, the row fails in the sampler."""
    import numpy as np

    from octavo.messages import NewRequest, RowFault
    from octavo.sampling.sampler import Sampler
    from octavo.sampling.state import RowState

    params = SamplingParams(grammar=GrammarSpec.regex("a"))
    state = RowState(NewRequest(0, 0, (1,), 1, params, 0, ()))
    logits = np.zeros((1, 32), np.float32)
    (lost,) = Sampler(32).sample(logits.copy(), [state])
    assert isinstance(lost, RowFault)
    state.mask = bytes([0, 4, 0, 0])
    (kept,) = Sampler(32).sample(logits.copy(), [state])
    assert kept.token_id == 10  # type: ignore[union-attr]
    (used_up,) = Sampler(32).sample(logits.copy(), [state])
    assert isinstance(used_up, RowFault), "a mask is for one step"
    state.mask = bytes(4)
    (nothing,) = Sampler(32).sample(logits.copy(), [state])
    assert isinstance(nothing, RowFault)
    assert "grammar" in nothing.message


def test_preempted_anywhere_the_answer_is_the_same() -> None:
    """C73: at every position of an answer; the matcher takes each token once."""
    spec = GrammarSpec.json(PERSON)
    undisturbed = bed()
    undisturbed.add([9, 8, 7], grammar=spec, max_tokens=100, seed=3)
    whole = undisturbed.run()[0, 0]
    assert len(tokens(whole)) >= 25
    for position in range(1, len(tokens(whole))):
        engine = bed(num_blocks=40)
        engine.add([9, 8, 7], grammar=spec, max_tokens=100, seed=3)
        events: list[StreamEvent] = []
        matcher = engine.core.grammars.live[0]
        while engine.core.has_unfinished():
            if len(tokens(events)) == position:
                engine.scheduler.preempt(0)
            events += engine.core.step()
        assert tokens(events) == tokens(whole)
        assert events[-1].finish_reason == "stop"
        assert matcher.num_tokens == len(tokens(whole))


def test_a_token_that_the_grammar_refuses_ends_the_request() -> None:
    """C73: an error within the step, nothing of the token shown, blocks free."""
    engine = bed(scheduling={"jump_forward": False})
    engine.add([9, 8, 7], grammar=GrammarSpec.regex("a{9}"), max_tokens=60)
    (first,) = engine.core.step()
    with mock.patch.object(engine.model, "_next_token", return_value=FIRST_BYTE + ord("z")):
        (last,) = engine.core.step()
    assert (first.text, last.text, last.finish_reason) == ("a", "", "error")
    assert "refused" in str(last.error)
    assert not engine.core.has_unfinished()
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_a_finished_grammar_lets_nothing_follow() -> None:
    """C74: after "no" the answer is over; "yes" may end or go on."""
    spec = GrammarSpec.choice(["yes", "yes!", "no"])
    engine = bed()
    for wanted in ("no", "no and more", "yes!", "yes!!"):
        engine.model.prefers = prefer(wanted)
        text, reason = answer(engine, spec)
        assert (text, reason) == (wanted[:4] if wanted[0] == "y" else "no", "stop")
    engine.model.prefers = lambda output: [*prefer("yes")(output), EOS]
    assert answer(engine, spec) == ("yes", "stop")


@pytest.mark.parametrize("eos_token_ids", [(), (EOS,)])
def test_an_expression_ends_without_an_end_token(eos_token_ids: tuple[int, ...]) -> None:
    """C74: a{3} is complete after three; a model without an end-of-sequence token knows, too."""
    engine = bed(eos_token_ids=eos_token_ids)
    request_id = engine.add([5], grammar=GrammarSpec.regex("a{3}"), logprobs=None)
    events = engine.run()[request_id, 0]
    assert text_of(events) == "aaa"
    assert (events[-1].finish_reason, events[-1].num_generated_tokens) == ("stop", 3)


def test_each_of_n_answers_has_a_matcher_of_its_own() -> None:
    engine = bed()
    request_id = engine.add([9, 8, 7], grammar=GrammarSpec.json(PERSON), n=4, max_tokens=100)
    events = engine.run()
    texts = [text_of(events[request_id, index]) for index in range(4)]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


def test_max_tokens_cuts_and_says_so() -> None:
    assert answer(bed(), GrammarSpec.regex("a{30}"), max_tokens=7) == ("a" * 7, "length")


def test_a_stop_string_ends_a_grammar_too() -> None:
    """The matcher goes with the request."""
    engine = bed()
    engine.model.prefers = prefer("abcdef")
    assert answer(engine, GrammarSpec.regex("[a-z]{30}"), stop="de") == ("abc", "stop")


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (GrammarSpec.lark('start: "x" NUMBER\nNUMBER: /[0-9]{2}/'), "x42"),
        (GrammarSpec.lark('root ::= "x" digit digit\ndigit ::= [0-9]'), "x42"),
        (GrammarSpec.regex("x[0-9]{2}"), "x42"),
        (GrammarSpec.choice(['a"b', "é\n(漢)", "x42"]), "é\n(漢)"),
    ],
)
def test_every_kind_of_grammar(spec: GrammarSpec, wanted: str) -> None:
    """R70: JSON schema, labels, expressions, Lark and GBNF."""
    engine = bed()
    engine.model.prefers = prefer(wanted)
    assert answer(engine, spec) == (wanted, "stop")


@pytest.mark.parametrize("text", ["a.b*c", "[x]{2}", "^$|\\d", "tab\there", "漢字 é", "a-b_c"])
def test_a_choice_means_its_letters(text: str) -> None:
    engine = bed()
    assert answer(engine, GrammarSpec.regex(literal_regex(text))) == (text, "stop")


def test_json_is_compact_unless_blanks_are_asked_for() -> None:
    """Free white space could go on for ever; where a caller frees it, it is bounded."""
    blank = FIRST_BYTE + ord(" ")
    engine = bed()
    engine.model.prefers = lambda output: [blank]
    compact, reason = answer(engine, GrammarSpec.json(PERSON))
    assert reason == "stop"
    assert ": " not in compact
    assert compact.startswith('{"name":"')
    spaced, reason = answer(engine, GrammarSpec.json(PERSON, r"[ ]{0,3}"))
    assert reason == "stop"
    assert spaced.startswith("{   ")
    jsonschema.validate(json.loads(spaced), PERSON)


def test_control_tokens_are_no_text() -> None:
    """C100's kind: a string in JSON can't hold the tokens that templates are made of."""
    engine = bed()
    engine.model.prefers = lambda output: [0, 1, EOS, 3]
    text, reason = answer(engine, GrammarSpec.regex("(.|\n){40}"))
    assert (len(text), reason) == (40, "stop")


def test_rows_without_a_grammar_are_as_without_neighbours() -> None:
    engine = bed()
    free = engine.add([3, 4, 5], max_tokens=20)
    engine.add([9, 8, 7], grammar=GrammarSpec.json(PERSON), max_tokens=100)
    alone = bed()
    alone.add([3, 4, 5], max_tokens=20)
    assert tokens(engine.run()[free, 0]) == tokens(alone.run()[0, 0])


@pytest.mark.parametrize("share", [0, 1])
def test_outputs_validate_against_their_schemas(share: int) -> None:
    """JSON-schema conformance, a fixed twentieth of it; the whole is `make conformance`."""
    engine = bed()
    specs = all_schemas()
    assert len(specs) >= 200
    finished = total = 0
    for schema in specs[share * 10 :: 20]:
        for seed in range(10):
            total += 1
            text, reason = answer(engine, GrammarSpec.json(schema), seed=seed, max_tokens=600)
            if reason == "stop":
                finished += 1
                check_formats = jsonschema.FormatChecker({"uuid", "ipv4"})
                jsonschema.validate(json.loads(text), schema, format_checker=check_formats)
    assert finished >= 0.95 * total


ATTACKS: dict[str, Callable[[], GrammarSpec]] = {
    "deep": lambda: GrammarSpec.json(nested(12, 6)),
    "wide": lambda: GrammarSpec.json(full(3, 6)),
    "repeats": lambda: GrammarSpec.regex("(a{1,500}){1,500}"),
    "overlaps": lambda: GrammarSpec.regex("(.{0,100}a){100}"),
    "enum": lambda: GrammarSpec.json({"enum": [f"value{i * 7919}" for i in range(2000)]}),
    "cycle": lambda: GrammarSpec.json({"$ref": "#"}),
    "ambiguous": lambda: GrammarSpec.lark("start: s\ns: s s s | s s | /[a-z]/ | /[a-f]+/"),
}


MANY = {f"d{i}": {"type": "string", "pattern": f"^(.*a){{{i}}}.*$"} for i in range(3, 40)}
REFERENCES = [{"$ref": f"#/$defs/{name}"} for name in MANY]
EXPRESSIONS = " & ".join(f"/(.*a){{{i}}}.*/" for i in range(3, 40))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.json({"allOf": list(MANY.values())}),
        lambda: GrammarSpec.json({"$defs": MANY, "allOf": REFERENCES}),
        lambda: GrammarSpec.json({"$defs": MANY, "items": {"anyOf": [{"allOf": REFERENCES}]}}),
        lambda: GrammarSpec.lark(f"start: X\nX: {EXPRESSIONS}"),
    ],
)
def test_expressions_that_must_hold_together_are_few(make: Callable[[], GrammarSpec]) -> None:
    """C98: to see whether anything matches all of them takes hours, and no limit ends it."""
    with pytest.raises(RequestError, match="more than 16"):
        make()


def test_many_patterns_side_by_side_are_no_intersection() -> None:
    GrammarSpec.json({"type": "object", "properties": MANY})
    GrammarSpec.json({"allOf": [{"type": "object"}] * 40, "properties": {"a": {"format": "date"}}})
    GrammarSpec.lark('start: ("a&b&c" | /&&&&&&&&&&&&&&&&&&&&&/)\n')


LONG: dict[str, str] = {
    "letters": "a{5000}",
    "nested": "(ab{9}){1000}",
    "constant": literal_regex("x y" * 4000),
}


@pytest.mark.parametrize("form", LONG)
def test_thousands_of_tokens_without_a_choice_are_refused(form: str) -> None:
    """C98: each step would look at all of them, and hold up everybody."""
    engine = bed()
    with pytest.raises(RequestError, match="no choice"):
        engine.add([5], grammar=GrammarSpec.regex(LONG[form]))
    victim = engine.add([9, 8, 7], grammar=GrammarSpec.regex(f"[ab]+;{LONG[form]}"), max_tokens=900)
    other = engine.add([9, 8, 7], max_tokens=40)
    engine.model.prefers = lambda output: [FIRST_BYTE + b for b in b";" if len(output) > 3]
    events = engine.run()
    assert events[victim, 0][-1].finish_reason == "error"
    assert "no choice" in str(events[victim, 0][-1].error)
    assert events[other, 0][-1].finish_reason == "length"


def nested(depth: int, width: int) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": "string"}
    first = nested(depth - 1, width) if depth else leaf
    names = [f"p{i}" for i in range(width)]
    properties = {name: leaf if i else first for i, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names}


def full(depth: int, width: int) -> dict[str, Any]:
    leaf = full(depth - 1, width) if depth else {"type": "string"}
    return {"type": "object", "properties": {f"p{i}": leaf for i in range(width)}}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_grammar_made_to_hurt_is_refused_or_runs(attack: str) -> None:
    """C98: the library's limits end the work, and an answer that meets one ends with an error."""
    engine = bed()
    try:
        text, reason = answer(engine, ATTACKS[attack](), max_tokens=60)
    except RequestError:
        text, reason = "", "refused"
    assert reason in ("stop", "length", "error", "refused")
    assert bool(text) or reason != "stop"
    assert not engine.core.grammars.live


def test_a_compilation_holds_up_nobody_and_is_done_once() -> None:
    """C98: four streams run from beginning to end while it takes its time."""
    engine = bed()
    may_compile, compile_ = threading.Event(), engine.core.grammars.compile
    slow = mock.Mock(side_effect=lambda spec: (may_compile.wait(20), compile_(spec))[1])
    spec = GrammarSpec.regex("a{5}")

    async def body(llm: AsyncLLM) -> list[list[StreamEvent]]:
        with mock.patch.object(engine.core.grammars, "compile", slow):
            held = llm.submit([9, 8, 7], SamplingParams(grammar=spec, n=2))
            streams = [llm.submit([5 + i, 6], SamplingParams(max_tokens=40)) for i in range(4)]
            answers = [[event async for event in stream] for stream in streams]
            may_compile.set()
            return [*answers, [event async for event in held]]

    *others, last = with_async_engine(engine, body)
    assert all(tokens(events)[39:] for events in others)
    assert sorted(text_of([e for e in last if e.index == i]) for i in (0, 1)) == ["aaaaa"] * 2
    log = engine.scheduler.event_log
    assert log.of_request(last[0].request_id)[0].reason is Reason.GRAMMAR_PENDING

    async def again(llm: AsyncLLM) -> str:
        with mock.patch.object(engine.core.grammars, "compile", wraps=compile_) as compiled:
            events = [e async for e in llm.submit([9, 8], SamplingParams(grammar=spec))]
            assert compiled.call_count == 1, "only to fetch it"
        return text_of(events)

    pending = log.counts[Reason.GRAMMAR_PENDING]
    assert with_async_engine(engine, again) == "aaaaa"
    assert log.counts[Reason.GRAMMAR_PENDING] == pending, "the second use comes from the cache"


@pytest.mark.parametrize("how", ["abort", "too long", "bad", "shutdown"])
def test_a_request_can_end_while_its_grammar_compiles(how: str) -> None:
    """C64, C98: by its client, by the clock, by the compiler, by the end of the server."""
    engine = bed()
    may_compile, compile_ = threading.Event(), engine.core.grammars.compile
    slow = mock.Mock(side_effect=lambda spec: (may_compile.wait(20), compile_(spec))[1])
    spec = GrammarSpec.regex("(a" if how == "bad" else "a{5}")

    async def body(llm: AsyncLLM) -> list[StreamEvent]:
        with mock.patch.object(engine.core.grammars, "compile", slow):
            stream = llm.submit([9, 8, 7], SamplingParams(grammar=spec))
            if how == "abort":
                stream.abort()
            elif how == "too long":
                llm._expire(stream.request_id)
            elif how == "bad":
                may_compile.set()
            else:
                threading.Timer(0.2, may_compile.set).start()
                llm.shutdown(timeout=0.1)
            events = [event async for event in stream]
            may_compile.set()
            return events

    (event,) = with_async_engine(engine, body)
    wanted = {"abort": ("abort", False), "shutdown": ("error", False)}
    assert (event.finish_reason, event.refused) == wanted.get(how, ("error", True))
    assert not engine.core.grammars.live
    assert not engine.core.queue._num_tokens, "it leaves the queue that it entered"
