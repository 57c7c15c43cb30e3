"""Tools: what a request offers and demands, as a grammar for the answer and text for the prompt.

Calls have one form, that of Hermes and Qwen, which most small models were trained on:

    <tool_call>
    {"name": "get_weather", "arguments": {"city":"Oslo"}}
    </tool_call>

A grammar holds every answer to it, also where the model may choose (auto): once a call begins, its
name is one of the tools' and its arguments keep their schema. So the stream needs no guessing.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import RequestError
from ..grammar_spec import GrammarSpec
from ..structural_tag import compact_schema
from .fields import Fields, asks_for_nothing

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = '\n{"name": "'
MIDDLE = '", "arguments": '
TAIL = "}\n" + CLOSE

MAX_TOOLS = 128
MAX_CALLS = 16
"""Calls in one answer where a call is required: a small model may not know when to stop."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

_PREAMBLE = """\
You may call functions to help with the user's request. These are their signatures:
<tools>
{tools}
</tools>

To call one, write its name and arguments as JSON, like this:
<tool_call>
{{"name": "function name", "arguments": {{...}}}}
</tool_call>"""


class Tools(NamedTuple):
    """What a request offers; `choice` is auto, required or named."""

    tools: list[dict[str, Any]]
    """As the client sent them: the template writes them into the prompt."""

    choice: str
    callable: list[dict[str, Any]]
    """The functions that may be called: name and parameters."""

    parallel: bool

    def grammar(self, form: GrammarSpec | None = None) -> GrammarSpec:
        """What the answer must look like; `form` is that of an answer without a call, where the
        model may choose. Raises RequestError for schemas that are too large."""
        calls = self._calls(free=self.choice == "auto" and form is None)
        return replace(calls, instead=form) if self.choice == "auto" else calls

    def _calls(self, *, free: bool) -> GrammarSpec:
        bodies = []
        for i, function in enumerate(self.callable):
            start = json.dumps(function["name"] + MIDDLE)
            schema = compact_schema({**function["parameters"], "type": "object"})
            bodies.append(f"f{i}: {start} {schema}")
        many = self.parallel and self.choice != "named"
        lines = [
            "%llguidance {}",
            _start(free=free, many=many),
            f"call: open {json.dumps(HEAD)} body {json.dumps(TAIL)}",
            f"body: {' | '.join(f'f{i}' for i in range(len(bodies)))}",
            *bodies,
            f"open[lazy]: TEXT {json.dumps(OPEN)}" if free else f"open: {json.dumps(OPEN)}",
        ]
        if free:
            lines.append(r"TEXT: /(.|\n)*/")
        return GrammarSpec.exact("\n".join(lines))


def _start(*, free: bool, many: bool) -> str:
    if free:
        return "start: call* TEXT" if many else "start: call | TEXT"
    return f'start: call ("\\n" call){{0,{MAX_CALLS - 1}}}' if many else "start: call"


def parse_tools(fields: Fields) -> Tools | None:
    """What a chat offers; None if nothing may be called. Raises RequestError."""
    tools, choice = fields.take("tools"), fields.take("tool_choice")
    parallel = fields.flag("parallel_tool_calls", default=True)
    if choice == "none" or (choice in (None, "auto") and asks_for_nothing(tools)):
        return None
    functions = _functions(tools)
    if choice in (None, "auto", "required"):
        return Tools(tools, choice or "auto", functions, parallel)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode, allowed = _allowed(choice.get("allowed_tools"), functions)
        return Tools(tools, mode, allowed, parallel)
    return Tools(tools, "named", [_named(choice, functions)], parallel)


def _bad(message: str, param: str = "tools") -> RequestError:
    return RequestError(message, param=param)


def _functions(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not tools:
        raise _bad("tools must be a list of at least one function")
    if len(tools) > MAX_TOOLS:
        raise _bad(f"tools has {len(tools)} functions, but may have {MAX_TOOLS}")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise _bad(f"tools has the function {name!r} twice")
    return functions


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _bad(f'{where} must be {{"type": "function", "function": {{...}}}}')
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(f"{where}.function.name must be 1 to 64 letters, digits, _, - and dots")
    assert isinstance(function, dict)
    for key, kind, wanted in (("strict", bool, "true or false"), ("description", str, "a string")):
        if not isinstance(function.get(key), kind | None):
            raise _bad(f"{where}.function.{key} must be {wanted}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _bad(f"{where}.function.parameters must be a JSON schema of an object")
    try:
        GrammarSpec.json(parameters)
    except RequestError as error:
        raise _bad(f"{where}.function.parameters: {error}") from None
    return {"name": name, "parameters": parameters}


def _allowed(given: Any, functions: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """(auto or required, the functions that may be called) of OpenAI's allowed_tools."""
    mode = given.get("mode") if isinstance(given, dict) else None
    names = given.get("tools") if isinstance(given, dict) else None
    if mode not in ("auto", "required") or not isinstance(names, list) or not names:
        text = "tool_choice.allowed_tools needs a mode, auto or required, and a list of tools"
        raise _bad(text, "tool_choice")
    allowed = [_named(name, functions) for name in names]
    return mode, [function for function in functions if function in allowed]


def _named(choice: Any, functions: list[dict[str, Any]]) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    wanted = choice.get("function") if isinstance(choice, dict) else None
    name = wanted.get("name") if isinstance(wanted, dict) else None
    if kind != "function" or not isinstance(name, str):
        text = "tool_choice must be none, auto, required, allowed_tools, or name a function"
        raise _bad(text, "tool_choice")
    for function in functions:
        if function["name"] == name:
            return function
    raise _bad(f"tool_choice names {name[:64]!r}, which is not among the tools", "tool_choice")


def check_template(source: str) -> None:
    """Raises RequestError for a model that was trained on another form of calls."""
    if "tools" in source and OPEN not in source:
        text = "the chat template of this model writes tool calls in a form that is not supported"
        raise _bad(f"{text} yet")


def with_tools(
    messages: list[dict[str, Any]], tools: Tools | None, source: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for the chat template `source`, which may know tools or not.

    For one that does not, the tools go into the system message and calls into the content.
    """
    if "tool_calls" not in source:
        messages = [_as_text(message) for message in messages]
    if tools is None:
        return messages, {}
    check_template(source)
    if "tools" in source:
        return messages, {"tools": tools.tools}
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.tools)
    preamble = _PREAMBLE.format(tools=listed)
    first = messages[0]
    if first["role"] in ("system", "developer"):
        system = {**first, "content": f"{first['content']}\n\n{preamble}"}
        return [system, *messages[1:]], {}
    return [{"role": "system", "content": preamble}, *messages], {}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls stand in its content, in the form in which they were made."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False, separators=(",", ":"))
        texts.append(f"{OPEN}{HEAD}{function['name']}{MIDDLE}{arguments}{TAIL}")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}
