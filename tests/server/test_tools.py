"""Tool calls over HTTP: what must be called is called, and streams say what plain answers say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from beds.fake_engine import FakeEngine, Piece, scripted
from beds.live_llm import LiveBed, live_bed
from beds.live_server import AppClient, sse_events
from octavo.engine.chat_template import ChatTemplate
from octavo.server.parts import AnswerForm, AnswerParser
from octavo.server.prompts import parse_messages
from octavo.server.tools import HEAD, MIDDLE, OPEN, TAIL, Tools, with_tools

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "at": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = PLACE) -> dict[str, Any]:
    described = {"name": name, "description": "of a place", "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS = [tool("get_weather"), tool("get_time")]
NAMED = {"type": "function", "function": {"name": "get_time"}}

ALLOWED: dict[str, Any] = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


def call_text(name: str, arguments: Any) -> str:
    return f"{OPEN}{HEAD}{name}{MIDDLE}{json.dumps(arguments, ensure_ascii=False)}{TAIL}"


NASTY = {"city": 'a </tool_call> "b" \\ } " {[ 😀 漢字', "at": {"x": 1, "deep": [{"y": [2, {}]}]}}
TWO_CALLS = f"Let me see.\n{call_text('get_weather', NASTY)}\n{call_text('get_time', {'a': []})}"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBed]:
    with live_bed() as bed:
        yield bed


def ask(live: LiveBed, *, stream: bool, **arguments: Any) -> tuple[Any, str | None]:
    """(the message, the finish reason), by OpenAI's client; a stream is put together."""
    body: Any = {
        "model": "tape",
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "seed": 3,
        **arguments,
    }
    if not stream:
        choice = live.client.chat.completions.create(**body).choices[0]
        return choice.message, choice.finish_reason
    chunks = list(live.client.chat.completions.create(stream=True, **body))
    calls: list[dict[str, Any]] = []
    content, reason = "", None
    for part in (chunk.choices[0] for chunk in chunks):
        content += part.delta.content or ""
        reason = part.finish_reason or reason
        for delta in part.delta.tool_calls or ():
            assert delta.function is not None
            if delta.id is not None:
                assert delta.index == len(calls), "id and name come once, in order"
                calls.append({"name": delta.function.name, "arguments": ""})
            assert delta.index == len(calls) - 1
            calls[-1]["arguments"] += delta.function.arguments or ""
    message = openai.types.chat.ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "content": content or None,
            "tool_calls": [{"id": "x", "type": "function", "function": c} for c in calls] or None,
        }
    )
    return message, reason


def check_calls(message: Any, names: set[str]) -> None:
    """Calls of these functions whose arguments keep their schema."""
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), PLACE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "arguments", "reason"),
    [
        (f"Yes.\n{OPEN}", {}, "tool_calls"),
        (f"Yes.\n{OPEN}", {"tool_choice": "auto"}, "tool_calls"),
        ("It is sunny.", {"tool_choice": "auto"}, "stop"),
        ("It is sunny.", {"tool_choice": "none"}, "stop"),
        ("It is sunny.", {"tool_choice": "required"}, "tool_calls"),
        ("It is sunny.", {"tool_choice": NAMED}, "stop"),
        ("It is sunny.", {"tool_choice": "required", "max_tokens": 45}, "length"),
        ("It is sunny.", {"tool_choice": "auto", "max_tokens": 5}, "length"),
    ],
)
def test_the_table_of_tool_choice_and_finish_reason(
    live: LiveBed, stream: bool, says: str, arguments: Any, reason: str
) -> None:
    """C76, C77: a model that prefers prose calls where it must; stream and plain agree."""
    live.say(says)
    message, finish_reason = ask(
        live, stream=stream, tools=TOOLS, parallel_tool_calls=False, **arguments
    )
    assert finish_reason == reason
    choice = arguments.get("tool_choice", "auto")
    if reason == "tool_calls":
        check_calls(message, {"get_weather", "get_time"})
        assert message.content == ("Yes." if says.startswith("Yes") else None)
    elif choice == NAMED:
        check_calls(message, {"get_time"})
        assert len(message.tool_calls) == 1
    elif reason == "stop":
        assert (message.content, message.tool_calls) == ("It is sunny.", None)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parallel_calls_come_one_after_the_other(live: LiveBed, choice: str) -> None:
    """C79: two calls asked for, two calls made, each with arguments that keep their schema."""
    good = {"city": "Oslo", "at": {"x": 1}}
    compact = json.dumps(good, separators=(",", ":"))
    calls = [f"{OPEN}{HEAD}{n}{MIDDLE}{compact}{TAIL}" for n in ("get_time", "get_weather")]
    live.say("\n".join(calls))
    for stream in (False, True):
        message, reason = ask(live, stream=stream, tools=TOOLS, tool_choice=choice)
        assert reason == "tool_calls"
        assert [call.function.name for call in message.tool_calls] == ["get_time", "get_weather"]
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [good] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "choice", "calls"),
    [
        ("It is sunny.", None, False),
        ('{"city": "Oslo"}', "auto", False),
        (OPEN, "auto", True),
        (f"{OPEN}{HEAD}get_time", None, True),
        ("It is sunny.", "required", True),
        ("{", NAMED, True),
    ],
)
def test_an_answer_has_its_form_or_is_a_call(
    live: LiveBed, stream: bool, says: str, choice: Any, calls: bool
) -> None:
    """response_format beside tools: what is no call keeps the form, and no prose stands between."""
    live.say(says)
    arguments: Any = {"tools": TOOLS, "response_format": FORM}
    arguments |= {} if choice is None else {"tool_choice": choice}
    message, reason = ask(live, stream=stream, **arguments)
    if calls:
        check_calls(message, {"get_weather", "get_time"})
        assert message.content is None
        assert reason == ("stop" if choice == NAMED else "tool_calls")
    else:
        assert message.tool_calls is None
        jsonschema.validate(json.loads(message.content), PLACE)
        assert reason == "stop"


def test_the_other_form_may_be_of_any_kind(live: LiveBed) -> None:
    """A label, an expression or a tag beside tools; and a form may follow a reasoning."""
    tags = {"structures": [{"begin": "<p>", "schema": PLACE, "end": "</p>"}], "triggers": ["<p"]}
    for form, says, wanted in (
        ({"choice": ["yes", "no"]}, "none of it", "no"),
        ({"regex": "[0-9]{3}"}, "123 or so", "123"),
        ({"structural_tag": tags}, "Free text", "Free text"),
    ):
        live.say(says)
        body: Any = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
        assert live.chat(**body, structured_outputs=form)["content"] == wanted
        live.say(f"<think>Hm.</think>{says}")
        with live.template(THINKER.replace("{{ start }}", "<tool_call>")):
            message = live.chat(**body, structured_outputs=form)
        assert (message["reasoning"], message["content"]) == ("Hm.", wanted)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("mode", "says"), [("required", "No."), ("auto", OPEN), ("auto", "No.")])
def test_only_allowed_tools_are_called(live: LiveBed, stream: bool, mode: str, says: str) -> None:
    """OpenAI's allowed_tools: all of them are in the prompt, some may be called."""
    live.say(says)
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    for seed in range(4):
        message, reason = ask(live, stream=stream, tools=TOOLS, tool_choice=choice, seed=seed)
        if says == OPEN or mode == "required":
            check_calls(message, {"get_time"})
            assert reason == "tool_calls"
        else:
            assert (message.content, reason) == ("No.", "stop")


def test_required_calls_come_to_an_end(live: LiveBed) -> None:
    """A model that goes on calling for ever is stopped by the grammar."""
    live.bed.model.prefers = lambda output: [4 + ord("\n")]
    tools = [tool("f", {"type": "object", "properties": {}, "additionalProperties": False})]
    message, reason = ask(live, stream=False, tools=tools, tool_choice="required")
    assert reason == "tool_calls"
    assert 1 <= len(message.tool_calls) <= 16
    assert {call.function.arguments for call in message.tool_calls} == {"{}"}


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"tools": [], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        {"tools": [tool("two words")]},
        {"tools": [tool("f"), tool("f")]},
        {"tools": [tool("f", {"type": "array"})]},
        {"tools": [tool("f", {"properties": {"a": {"nullable": True}}})]},
        {"tools": [tool("f", {"x-guidance": {"lenient": True}})]},
        {"tools": [tool(f"f{i}") for i in range(129)]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
        {"tools": TOOLS, "parallel_tool_calls": "no"},
        {"tools": TOOLS, "response_format": {"type": "xml"}},
        {"tools": TOOLS, "tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto"}}},
        {"tools": TOOLS, "tool_choice": ALLOWED | {"allowed_tools": {"mode": "all", "tools": []}}},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
        {"tools": TOOLS[:1], "tool_choice": ALLOWED},
        {"tool_choice": ALLOWED},
    ],
)
def test_impossible_tools_are_refused(body: Any) -> None:
    """C77: 400 that names the field, and nothing runs."""
    client = AppClient(FakeEngine())
    answer = client.chat(**body)
    assert answer.status_code == 400
    fields = ("tools", "tool_choice", "response_format", "parallel_tool_calls")
    assert answer.json()["error"]["param"] in [field for field in fields if field in body] + [
        "tools"
    ]
    assert client.engine.submitted == []


def test_a_keyword_in_a_tool_is_refused_by_its_name(live: LiveBed) -> None:
    """C70: in the parameters of a tool as anywhere."""
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        ask(live, stream=True, tools=[tool("f", {"properties": {"a": {"uniqueItems": True}}})])
    assert refused.value.param == "tools"
    assert "x-guidance" not in refused.value.message, "what is made of it is our own affair"


def parse(pieces: list[str], choice: str = "auto") -> tuple[str, list[Any], list[str], str]:
    """(content, calls, argument fragments of the first call, finish reason)."""
    parser = AnswerParser(AnswerForm(tools=choice))
    content, calls, fragments = "", [], []
    for number, piece in enumerate(pieces, 1):
        parts = parser.push(piece, final=number == len(pieces))
        content += parts.content
        for delta in parts.tool_calls:
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append([delta["function"]["name"], ""])
            else:
                calls[delta["index"]][1] += delta["function"]["arguments"]
                fragments += [delta["function"]["arguments"]] * (delta["index"] == 0)
    return content, calls, fragments, parser.finish_reason("stop")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_however_it_is_cut_the_calls_are_the_same(size: int) -> None:
    """C79: nested JSON, an emoji and </tool_call> inside a string."""
    pieces = [TWO_CALLS[i : i + size] for i in range(0, len(TWO_CALLS), size)]
    content, calls, _, reason = parse(pieces)
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert [name for name, _ in calls] == ["get_weather", "get_time"]
    assert [json.loads(arguments) for _, arguments in calls] == [NASTY, {"a": []}]


def test_arguments_come_as_they_are_made() -> None:
    """C79: not in one lump at the end."""
    text = call_text("f", {"text": "x" * 200})
    _, calls, fragments, _ = parse([text[i : i + 4] for i in range(0, len(text), 4)])
    assert len(fragments) >= 50
    assert json.loads(calls[0][1]) == {"text": "x" * 200}


@pytest.mark.parametrize("end", range(1, len(TWO_CALLS) + 1))
def test_a_cut_answer_promises_no_call_that_is_not_whole(end: int) -> None:
    """C76, C77: finish_reason tool_calls only after whole calls; no text is lost or doubled."""
    text = TWO_CALLS[:end]
    one = parse([text])
    assert parse(list(text))[:2] == one[:2]
    content, calls, _, reason = one
    if reason == "tool_calls":
        assert 0 < text.count(TAIL) == len(calls)
    if end == len(TWO_CALLS) or text.endswith(TAIL):
        assert reason == "tool_calls"
    assert TWO_CALLS.startswith(content)


@pytest.mark.parametrize("text", ["a < b", "  <tool", "<tool_call> hm", "x \n\n", "", " y"])
def test_text_that_only_looks_like_a_call_stays_text(text: str) -> None:
    assert parse([text])[0] == parse([*text, ""])[0] == text


def test_plain_is_the_fold_of_the_stream() -> None:
    """C76, C79: over the wire, event by event, also with two answers."""
    pieces = [Piece(TWO_CALLS[i : i + 3], (97,)) for i in range(0, len(TWO_CALLS), 3)]
    script = scripted(*pieces, Piece(finish_reason="stop"))
    client = AppClient(FakeEngine(script=script, max_model_len=4000))
    body: Any = {"tools": TOOLS, "n": 2}
    plain = client.chat(**body).json()["choices"]
    chunks = sse_events(client.chat(stream=True, **body).text)
    for choice in plain:
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "Let me see."
        deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert deltas[0]["delta"]["role"] == "assistant"
        assert deltas[-1]["finish_reason"] == "tool_calls"
        calls = [t for d in deltas for t in d["delta"].get("tool_calls", ())]
        for index, call in enumerate(message["tool_calls"]):
            own = [t for t in calls if t["index"] == index]
            assert ["id" in t for t in own] == [True] + [False] * (len(own) - 1)
            assert own[0]["function"]["name"] == call["function"]["name"]
            joined = "".join(t["function"]["arguments"] for t in own)
            assert joined == call["function"]["arguments"]


THINKING = "Hm, <b> is </ tricky.\n\nYes."


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("thinking", "text", "wanted"),
    [
        ("open", f"{THINKING}\n</think>\n\nIt is 4.", (THINKING, "It is 4.")),
        ("may", f"<think>\n{THINKING}\n</think>\n\nIt is 4.", (THINKING, "It is 4.")),
        ("may", "\n <think>a</think>b ", ("a", "b ")),
        ("may", " It is 4.", ("", " It is 4.")),
        ("may", "<thin", ("", "<thin")),
        ("open", "never ends", ("never ends", "")),
        ("", "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_reasoning_is_apart_from_the_answer(
    thinking: str, text: str, wanted: tuple[str, str], size: int
) -> None:
    """Wherever the pieces are cut."""
    parser = AnswerParser(AnswerForm(thinking))
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [parser.push(piece, final=False) for piece in cut] + [parser.push("", final=True)]
    assert "".join(p.reasoning for p in parts) == wanted[0]
    assert "".join(p.content for p in parts) == wanted[1]


THINKER = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {{ start }}{% endif %}"
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("start", ["", "<think>\n"])
def test_a_form_begins_after_the_reasoning(live: LiveBed, start: str, stream: bool) -> None:
    """A model that thinks may do so before JSON and before a call that is required."""
    live.say(f"{'' if start else '<think>'}So it is.</think>\n\nYes!")
    with live.template(THINKER.replace("{{ start }}", start)):
        body: Any = {"messages": [{"role": "user", "content": "?"}], "seed": 2, "stream": stream}
        for more in (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": PLACE}}},
            {"tools": TOOLS, "tool_choice": NAMED},
            {},
        ):
            message = live.chat(**body, **more)
            assert message["reasoning"] == message["reasoning_content"] == "So it is."
            if "tools" in more:
                arguments = message["tool_calls"][0]["function"]["arguments"]
                jsonschema.validate(json.loads(arguments), PLACE)
            elif more:
                jsonschema.validate(json.loads(message["content"]), PLACE)
            else:
                assert message["content"] == "Yes!"
        quiet = live.chat(**body, include_reasoning=False)
        assert "reasoning" not in quiet


HERMES = (
    "{% if tools %}system<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    "<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('no text') }}"
    "{% endif %}<{{ m.role }}>{{ m.content + '.' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments.items() | list | length }}"
    "{{ m.tool_calls | tojson }}{% endif %}{% endfor %}{% if tools is not none %}"
    "{{ tools | tojson }}<tool_call>{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [HERMES, PLAIN, STRICT])
@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
@pytest.mark.parametrize("content", [None, "", [], "Wait.", [{"type": "text", "text": "Wait."}]])
@pytest.mark.parametrize("result", ["9°", [{"type": "text", "text": "9°"}]])
def test_messages_with_calls_reach_any_template(
    template: str, arguments: Any, content: Any, result: Any
) -> None:
    """C80: calls as clients send them back; arguments as an object, tools listed once."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = parse_messages(
        [
            {"role": "user", "content": "?", "tool_calls": []},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": result},
        ]
    )
    offered = Tools([tool("unique_name")], "auto", [], True)
    ready, variables = with_tools(messages, offered, template)
    text, placeholders = ChatTemplate(template).render(ready, template_kwargs=variables)
    text = placeholders.restore(text)
    assert text.count("unique_name") == 1
    assert text.count("<assistant>") == 2
    assert text.endswith("<assistant>") or template is STRICT
    assert "9°" in text
    assert '\\"city' not in text
    assert "Oslo" in text
    assert ("Wait." in text) == bool(content)


def test_the_tools_go_into_the_system_message_where_there_is_one() -> None:
    """C80: with a template that knows no tools; the client's own words stay first."""
    offered = Tools(TOOLS, "auto", [], True)
    system = {"role": "system", "content": "Be brief."}
    (first, second), _ = with_tools([system, {"role": "user", "content": "?"}], offered, PLAIN)
    assert first["content"].startswith("Be brief.\n\n")
    assert first["content"].count('"get_weather"') == 1
    assert second == {"role": "user", "content": "?"}


def test_another_form_of_calls_is_refused() -> None:
    """A template that writes calls as this server can't read them: a clear no."""
    client = AppClient(FakeEngine())
    client.engine.tokenizer.chat_template = "{{ tools }} [TOOL_CALLS] {{ tool_calls }}"
    answer = client.chat(tools=TOOLS)
    assert answer.status_code == 400
    assert "form" in answer.json()["error"]["message"]
