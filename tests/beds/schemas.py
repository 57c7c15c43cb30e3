"""JSON schemas of varied kinds, made from a few seeds: the same list in every run."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

LEAVES: tuple[Schema, ...] = (
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[a-c]{1,4}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
    {"type": "integer", "minimum": -17, "exclusiveMaximum": 5},
    {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99},
    {"type": "number"},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"type": ["integer", "boolean"]},
    {"const": "fixed"},
    {"const": {"a": [1, None]}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, None, True, "x", ["y"]]},
    {"enum": ["é", "漢字", '"quoted"', "</tool_call>", "a\nb", "😀"]},
)

TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}

LINKED: Schema = {
    "definitions": {
        "link": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/definitions/link"}},
                    "required": ["next"],
                    "additionalProperties": False,
                },
            ]
        }
    },
    "$ref": "#/definitions/link",
}

WHOLE: tuple[Schema, ...] = (
    TREE,
    LINKED,
    {"type": "object", "maxProperties": 2},
    {"type": "array", "minItems": 1, "maxItems": 3},
    {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
        "items": False,
        "minItems": 2,
    },
    {
        "type": "object",
        "patternProperties": {"^n_[a-z]$": {"type": "integer", "maximum": 9, "minimum": 0}},
        "additionalProperties": False,
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"]},
        ]
    },
    {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "integer", "minimum": 1}]},
)


NAMES = ("id", "name", "tags", "größe", "a b", "x-y", "$v", "on")


def object_of(draw: random.Random, depth: int) -> Schema:
    """An object of a few properties, some required, closed or open."""
    names = draw.sample(NAMES, draw.randint(1, 5))
    properties = {name: schema_of(draw, depth - 1) for name in names}
    schema: Schema = {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if draw.random() < 0.7],
    }
    extra: list[Schema] = [{"additionalProperties": False}] * 3
    extra += [{"additionalProperties": {"type": "boolean"}}]
    return schema | draw.choice(extra)


def schema_of(draw: random.Random, depth: int) -> Schema:
    """A schema of any kind, at most `depth` levels deep."""
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        return draw.choice(LEAVES)
    if kind < 0.7:
        return object_of(draw, depth)
    if kind < 0.85:
        limits = draw.choice([{"maxItems": 3}, {"minItems": 1, "maxItems": 4}, {}])
        return {"type": "array", "items": schema_of(draw, depth - 1), **limits}
    return {"anyOf": [schema_of(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def all_schemas() -> list[Schema]:
    """At least 200: every leaf, the whole ones, and random ones of depth 1 to 4."""
    schemas = [*LEAVES, *WHOLE]
    schemas += [object_of(random.Random(seed), 1 + seed % 4) for seed in range(100)]
    schemas += [schema_of(random.Random(1000 + seed), 1 + seed % 4) for seed in range(80)]
    return schemas
