"""The form that an answer must have, in the three dialects in which clients ask for one."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ..errors import RequestError
from ..grammar_spec import BOUNDED_WHITESPACE, GrammarSpec
from ..structural_tag import structural_tag
from .fields import Fields

logger = logging.getLogger("octavo.server")

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
ALIASES = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


def parse_structured(fields: Fields) -> tuple[str, GrammarSpec] | None:
    """The grammar that a request asks for, and the field that does. Raises RequestError for a bad
    one, and for two."""
    found: dict[str, GrammarSpec] = {}
    if (spec := _response_format(fields.mapping("response_format"))) is not None:
        found["response_format"] = spec
    wanted = fields.mapping("structured_outputs")
    if wanted:
        found["structured_outputs"] = _structured_outputs(wanted)
    for alias, kind in ALIASES.items():
        value = fields.take(alias)
        if value is not None:
            logger.warning("%s is an old name: send structured_outputs", alias)
            found[alias] = _grammar(kind, value, alias)
    if len(found) > 1:
        names = " and ".join(found)
        raise RequestError(f"{names} exclude each other: send one", param=list(found)[1])
    return next(iter(found.items()), None)


def _response_format(given: dict[str, Any]) -> GrammarSpec | None:
    """OpenAI's field: {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}."""
    kind = given.get("type")
    if not given or kind == "text":
        return None
    if kind == "json_object":
        return _grammar("json_object", True, "response_format")
    if kind == "json_schema":
        wrapper = given.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if schema is None:
            text = "response_format.json_schema.schema is missing"
            raise RequestError(text, param="response_format")
        return _grammar("json", schema, "response_format")
    if kind == "structural_tag":
        return _grammar("structural_tag", given, "response_format")
    text = "response_format.type must be text, json_object, json_schema or structural_tag"
    raise RequestError(text, param="response_format")


def _structured_outputs(given: dict[str, Any]) -> GrammarSpec:
    """vLLM's field: one of KINDS, and how free white space is inside JSON."""
    name = "structured_outputs"
    options = Fields(given)
    wanted = [kind for kind in KINDS if options.take(kind) not in (None, False)]
    blank = options.string("whitespace_pattern") or ""
    if not options.flag("disable_any_whitespace", default=True):
        blank = blank or BOUNDED_WHITESPACE
    unknown = sorted(given.keys() - options.known)
    if unknown or len(wanted) != 1:
        text = f"{name} takes exactly one of {', '.join(KINDS)}"
        text += f"; {unknown[0][:64]!r} is not supported" if unknown else ""
        raise RequestError(text, param=name)
    return _grammar(wanted[0], given[wanted[0]], name, blank)


def _grammar(kind: str, value: Any, param: str, whitespace: str = "") -> GrammarSpec:
    try:
        return _spec(kind, value, whitespace)
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from None


def _spec(kind: str, value: Any, whitespace: str) -> GrammarSpec:
    if kind == "json_object":
        if value is not True:
            raise RequestError("json_object must be true")
        return GrammarSpec.json({"type": "object"}, whitespace)
    if kind in ("json", "structural_tag"):
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                raise RequestError(f"the {kind} is not JSON: {error}") from None
        if kind == "json":
            return GrammarSpec.json(value, whitespace)
        if not isinstance(value, dict):
            raise RequestError("a structural_tag must be an object")
        return structural_tag(value)
    if kind == "choice":
        if not isinstance(value, list):
            raise RequestError("a choice needs a list of non-empty strings")
        return GrammarSpec.choice(value)
    if not isinstance(value, str):
        raise RequestError(f"{kind} must be a string")
    return GrammarSpec.regex(value) if kind == "regex" else GrammarSpec.lark(value)
