"""Structured output over HTTP: three dialects, one grammar; refused clearly, never dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from beds.fake_engine import FakeEngine, Piece, scripted
from beds.live_llm import LiveBed, live_bed
from beds.live_server import AppClient, strict_json
from octavo.grammar_spec import BOUNDED_WHITESPACE, GrammarSpec
from octavo.outputs import Logprob
from octavo.structural_tag import structural_tag

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 2, 3]}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<place>", "schema": SCHEMA, "end": "</place>"}],
    "triggers": ["<place"],
}
ANY_OBJECT = GrammarSpec.json({"type": "object"})


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture
def client() -> AppClient:
    return AppClient(FakeEngine())


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBed]:
    with live_bed() as bed:
        yield bed


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": response_format(SCHEMA)}, GrammarSpec.json(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec.json(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarSpec.json(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSpec.lark('start: "a"')),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
            GrammarSpec.json(SCHEMA, BOUNDED_WHITESPACE),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            GrammarSpec.json(SCHEMA, " ?"),
        ),
        ({"response_format": TAGS}, structural_tag(TAGS)),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, structural_tag(TAGS)),
        ({"guided_json": SCHEMA}, GrammarSpec.json(SCHEMA)),
        ({"guided_regex": "a+"}, GrammarSpec.regex("a+")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec.choice(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec.lark('start: "a"')),
    ],
)
def test_every_dialect_comes_to_a_grammar(
    client: AppClient, body: Any, wanted: GrammarSpec | None
) -> None:
    """response_format, structured_outputs and vLLM's older names, on both routes."""
    assert client.chat(**body).status_code == 200
    assert client.complete(**body).status_code == 200
    assert [job.params.grammar for job in client.engine.submitted] == [wanted, wanted]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": response_format([1])}, "response_format"),
        ({"response_format": response_format({"nullable": True})}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": [1]}}, "structured_outputs"),
        ({"response_format": {**TAGS, "triggers": ["<f"]}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "sprouts": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(client: AppClient, body: Any, param: str) -> None:
    """C71: 400 that names the field; nothing runs."""
    answer = client.chat(**body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert client.engine.submitted == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "word"),
    [({"type": "string", "pattern": "(?<=a)b"}, "look-around"), ({"not": {}}, '"not"')],
)
def test_a_schema_that_does_not_compile_is_a_400(
    live: LiveBed, schema: Any, word: str, stream: bool
) -> None:
    """C70, C71: found by another thread, and still an HTTP error, also for a stream."""
    body = {"prompt": "hi", "stream": stream, "response_format": response_format(schema)}
    answer = httpx.post(f"{live.server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_gets_what_its_schema_says(live: LiveBed, stream: bool) -> None:
    """response_format of openai-python, though the model would rather talk."""
    live.say("Sure! Here is some JSON for you: {}")
    arguments: Any = {
        "model": "tape",
        "messages": [{"role": "user", "content": "Where?"}],
        "response_format": response_format(SCHEMA),
        "seed": 4,
    }
    if stream:
        chunks = live.client.chat.completions.create(stream=True, **arguments)
        parts = [chunk.choices[0] for chunk in chunks]
        text = "".join(part.delta.content or "" for part in parts)
        reason = parts[-1].finish_reason
    else:
        choice = live.client.chat.completions.create(**arguments).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    jsonschema.validate(json.loads(text), SCHEMA)
    assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tag_holds_its_region_and_leaves_the_text_free(live: LiveBed, stream: bool) -> None:
    """vLLM's structural_tag: prose around it, and JSON of its schema between the tags."""
    live.say('It is <here> or so: <place>{"city": broken</place>')
    body: Any = {"messages": [{"role": "user", "content": "?"}], "seed": 2, "max_tokens": 200}
    text = live.chat(**body, response_format=TAGS, stream=stream)["content"]
    before, _, rest = text.partition("<place>")
    assert before == "It is <here> or so: "
    jsonschema.validate(json.loads(rest.partition("</place>")[0]), SCHEMA)


def test_a_fault_of_the_form_is_an_error_of_its_own_request(live: LiveBed) -> None:
    """C71: every token barred by another field: no text, and the next request is served."""
    with pytest.raises(openai.APIStatusError):
        live.client.completions.create(
            model="tape", prompt="hi", extra_body={"guided_regex": "a{400}", "max_tokens": 9000}
        )
    answer = live.client.completions.create(
        model="tape", prompt="hi", extra_body={"guided_regex": "a{4}"}
    )
    assert answer.choices[0].text == "aaaa"


def test_numbers_stay_finite_where_a_grammar_bars_the_rest() -> None:
    """C47: choice a or b with alternatives: the whole answer is strict JSON."""

    barred = Logprob(99, "c", b"c", float("-inf"), 2)
    entry = Logprob(97, "a", b"a", -0.5, 1, (Logprob(97, "a", b"a", -0.5, 1), barred))
    engine = FakeEngine(script=scripted(Piece("a", (97,), (entry,), "stop")))
    client = AppClient(engine)
    body: Any = {"structured_outputs": {"choice": ["a", "b"]}}
    plain = client.complete(logprobs=5, **body)
    chat = client.chat(logprobs=True, top_logprobs=5, **body)
    assert (plain.status_code, chat.status_code) == (200, 200)
    assert strict_json(plain.content)["choices"][0]["logprobs"]["top_logprobs"][0]["c"] == -9999.0
    strict_json(chat.content)
