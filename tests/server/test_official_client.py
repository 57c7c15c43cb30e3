"""The official client's own helpers: parse and stream, with pydantic models, forms and tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from beds.live_llm import LiveBed, live_bed


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBed]:
    with live_bed() as bed:
        yield bed


class Where(pydantic.BaseModel):
    """What OpenAI's client makes a schema of, and reads answers into."""

    x: int = pydantic.Field(ge=1, le=2)


class Place(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    at: Where
    note: str | None = None


def test_the_official_client_parses_what_it_asked_for(live: LiveBed) -> None:
    """client.chat.completions.parse: a pydantic model as response_format, and as a tool."""
    live.say("It is sunny.")
    question: Any = {"model": "tape", "messages": [{"role": "user", "content": "Where?"}]}
    answer = live.client.chat.completions.parse(**question, response_format=Place, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Place)
    strict = openai.pydantic_function_tool(Place)
    assert strict["function"]["strict"] is True
    answer = live.client.chat.completions.parse(**question, tools=[strict], tool_choice="required")
    for call in answer.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, Place)
    assert answer.choices[0].message.tool_calls


@pytest.mark.parametrize("tool", [False, True])
def test_the_official_client_follows_a_stream(live: LiveBed, tool: bool) -> None:
    """client.chat.completions.stream: its own state machine puts the same answer together."""
    live.say("It is sunny.")
    extra: Any = {"tools": [openai.pydantic_function_tool(Place)], "tool_choice": "required"}
    extra = extra if tool else {"response_format": Place}
    question: Any = {"model": "tape", "messages": [{"role": "user", "content": "?"}], "seed": 5}
    with live.client.chat.completions.stream(**question, **extra) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    if tool:
        assert "tool_calls.function.arguments.delta" in kinds
        assert "tool_calls.function.arguments.done" in kinds
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls or ():
            assert isinstance(call.function.parsed_arguments, Place)
    else:
        assert {"content.delta", "content.done"} <= kinds
        assert isinstance(choice.message.parsed, Place)
