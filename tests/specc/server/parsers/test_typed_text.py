"""Texts between tags as JSON of what the tool's schema allows, in every format that has such."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from specc.server.parsers.schema_part import SchemaPart
from specc.server.parsers.typed_text import as_json
from specc.server.parsers.whole_message import read_message
from tests.specc.server.parsers.writers import WRITERS

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
# schema, text, value
CASES: list[tuple[Any, str, Any]] = [
    ({"type": ["string", "integer"]}, "5", 5), ({"type": ["string", "integer"]}, "5x", "5x"),
    ({"type": ["string", "integer"]}, "1.5", "1.5"), ({"type": ["string", "number"]}, "1.5", 1.5),
    ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "True", True),
    ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "1", "1"),
    ({"anyOf": [{"type": "string"}, POINT]}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [{"type": "string"}, POINT]}, "[1]", "[1]"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "none", "none"),
    ({"enum": ["1", 2]}, "1", "1"), ({"enum": ["1", 2]}, "2", 2), ({"enum": [1, "1"]}, "1", 1),
    ({"enum": ["true", False]}, "true", "true"), ({"enum": ["true", False]}, "false", False),
    ({"type": ["string", "integer"], "enum": ["7", "8"]}, "7", "7"),
    ({"anyOf": [{"const": "5"}, {"type": "boolean"}, {"const": 6}]}, "5", "5"),
    ({"type": "boolean"}, "1", True), ({"type": "boolean"}, "0", False),
    ({"enum": [True, 1]}, "1", 1), ({"type": "integer"}, "1e2", 100.0),
    ({"type": "number"}, "1e999", "1e999"), ({"type": "array"}, "[1e999]", "[1e999]"),
    ({"type": "any"}, "[5]", [5]), ({"type": "any"}, "a", "a"), ({}, "5", "5"), (True, "5", "5"),
    ({"type": "string", "enum": ["5"]}, "5", "5"), ({"const": 5.0}, "5", 5),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(CASES)))
def test_values(index: int) -> None:
    schema, text, want = CASES[index]
    part = SchemaPart(schema)
    written = as_json(text, part.types, part)
    found = json.loads(written if part.types else f'"{written}')
    assert (type(found), found) == (type(want), want)


PROPERTIES: dict[str, Any] = {
    "at": {"allOf": [{"$ref": "#/$defs/P"}], "description": "where"},
    "level": {"enum": [1, 2, 3]},
    "v": {"const": 5},
    "deep": {"type": "object", "properties": {}},
    "implied": {"properties": {"x": {"type": "integer"}}},
    "list": {"items": {"type": "integer"}},
    "pair": {"prefixItems": [{"type": "integer"}, {"type": "string"}]},
    "maybe": {"type": "integer", "nullable": True},
    "tree": {"oneOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]},
    "any": True,
    "text": {"allOf": [{"type": "string"}, {"minLength": 1}]},
    "code": {"enum": ["1", "2"]},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"P": POINT, "T": {"properties": {"below": {"items": {"$ref": "#/$defs/T"}}}}},
}
ARGUMENTS = {
    "at": {"x": 3}, "level": 2, "v": 5, "deep": {"x": "3"}, "implied": {"x": 3}, "list": [1, 2],
    "pair": [1, "2"], "maybe": 7, "tree": {"below": [{"below": []}]}, "any": "5", "text": "8",
    "code": "1",
}  # fmt: skip
TAGGED = [
    "deepseek_v32", "deepseek_v4", "glm45", "glm47", "hy_v3", "mimo", "minimax_m2", "minimax_m3",
    "poolside_v1", "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5",
]  # fmt: skip


@pytest.mark.parametrize("form", TAGGED)
def test_arguments_satisfy_the_schema(form: str) -> None:
    """However it says of which types they are."""
    tool = {"type": "function", "function": {"name": "put", "parameters": SCHEMA}}
    text = WRITERS[form]([("put", ARGUMENTS)])
    message = read_message(text, [tool], tool_call_parser=form)
    (call,) = message.tool_calls
    found = json.loads(call.function.arguments)
    assert (message.is_whole, found) == (True, ARGUMENTS)
    jsonschema.validate(found, SCHEMA)
