"""What schemas say of values, and what reading them costs."""

from __future__ import annotations

from typing import Any

import pytest

from specc.server.parsers.schema_part import SchemaPart


class Counted(dict[str, Any]):
    """A schema that knows how often anything of it was asked for."""

    num_asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.num_asked += 1
        return super().get(key, default)


def hostile(size: int, how: str) -> Counted:
    """A schema whose choices lead to all of them again, `size` of them, and to one of integers."""
    loop = Counted({"$ref": "#/$defs/loop"})
    same = Counted(anyOf=[loop] * size, oneOf=[loop] * size)
    choices = {
        "itself": [Counted({"$ref": "#"}) for _ in range(size)],
        "one part": [loop] * size,
        "two lists": [same] * size,
    }[how]
    choices.append(Counted(type="integer"))
    one_of = [Counted({"$ref": "#/$defs/loop"}) for _ in range(size)]
    return Counted(anyOf=choices, **{"$defs": Counted(loop=Counted(anyOf=choices, oneOf=one_of))})


@pytest.mark.parametrize("how", ["itself", "one part", "two lists"])
def test_schemas_that_refer_to_themselves_cost_by_their_size(how: str) -> None:
    size = 20
    schema = hostile(size, how)
    Counted.num_asked = 0
    part = SchemaPart(schema)
    assert part.types == {"integer"}
    # each of about 2 size parts, at most once for each of 8 levels, a few keys each
    assert 0 < Counted.num_asked < 8 * 6 * 3 * size
    # looked up for every text of an element
    asked = Counted.num_asked
    assert part.types == {"integer"}
    assert Counted.num_asked == asked


def test_a_part_is_read_again_where_more_levels_are_left() -> None:
    """First at the end of a long way, where what it refers to is out of reach; then by itself."""
    end = {"$ref": "#/$defs/number"}
    way: dict[str, Any] = end
    for _ in range(31):
        way = {"anyOf": [way]}
    numbers = {"number": {"type": "boolean"}}

    def types(*choices: dict[str, Any]) -> frozenset[str] | None:
        schema = {"$defs": numbers, "properties": {"x": {"oneOf": list(choices)}}}
        return SchemaPart(schema).property("x").types

    assert types(way) is None
    assert types(way, end) == types(end) == {"boolean"}


def test_a_schema_is_read_in_part_where_it_is_large() -> None:
    """An output names as many keys as it likes, and each is looked up."""
    schema = {"allOf": [Counted(properties={}) for _ in range(100_000)]}
    Counted.num_asked = 0
    assert SchemaPart(schema).property("x").types is None
    assert 0 < Counted.num_asked < 200_000


DEFS: dict[str, Any] = {
    "point": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "level": {"enum": [1, 2, 3]},
    "name": {"title": "Name", "type": "string"},
    "way": {"$ref": "#/$defs/level"},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
    "round": {"$ref": "#/$defs/round"},
    "tree": {"properties": {"below": {"items": {"$ref": "#/$defs/tree"}}}},
    "a/b~c": {"type": "boolean"},
}
# part of a schema → JSON's types of it, none where it is text
TYPES: list[tuple[Any, str]] = [
    ({"type": "integer"}, "integer"), ({"type": "number"}, "integer number"),
    ({"type": ["string", "null"]}, "null string"), ({"type": "string", "nullable": True},
                                                    "null string"),
    ({"allOf": [{"$ref": "#/$defs/point"}], "description": "where"}, "object"),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, "integer"),
    ({"allOf": [{"$ref": "#/$defs/name"}]}, ""),
    ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, "null object"),
    ({"oneOf": [{"const": 1}, {"const": "a"}, {"const": None}]}, "integer null string"),
    ({"anyOf": [{"allOf": [{"$ref": "#/$defs/way"}]}, {"items": {}}]}, "array integer"),
    ({"anyOf": [{}, {"type": "integer"}]}, "integer string"),
    ({"anyOf": [False, {"type": "integer"}]}, "integer"),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"description": "any"}]}, "object"),
    ({"enum": [1, 2, 3]}, "integer"), ({"enum": ["a", None]}, "null string"),
    ({"enum": [True, 1.5]}, "boolean number"), ({"enum": [{"a": 1}, [2]]}, "array object"),
    ({"const": 5}, "integer"), ({"const": {}}, "object"), ({"const": "a"}, ""),
    ({"const": None}, "null"), ({"type": "number", "enum": [1, 2]}, "integer"),
    ({"type": "string", "enum": [1, 2]}, "integer string"),
    ({"properties": {"x": {}}}, "object"), ({"additionalProperties": {"type": "null"}}, "object"),
    ({"required": ["a"]}, "object"), ({"patternProperties": {"a": {}}, "nullable": True},
                                      "null object"),
    ({"items": {"type": "integer"}}, "array"), ({"prefixItems": [{}]}, "array"),
    ({"minItems": 1}, "array"), ({"minimum": 0}, "integer number"), ({"pattern": "a"}, ""),
    ({"if": {}, "then": {"type": "integer"}, "else": {"type": "null"}}, "integer null"),
    ({"type": "int"}, "integer"), ({"type": "BOOLEAN"}, "boolean"), ({"type": "float"},
                                                                     "integer number"),
    ({"type": "dict"}, "object"), ({"type": "no such"}, ""), ({"type": 5}, ""), ({"type": []}, ""),
    ({"$ref": "#/$defs/a~1b~0c"}, "boolean"), ({"$ref": "#/$defs/loop"}, "integer"),
    ({"$ref": "#/$defs/round"}, ""), ({"$ref": "#/$defs/tree"}, "object"),
    ({"$ref": "#"}, "object"),
    ({"$ref": "#/no/such"}, ""), ({"$ref": "https://a.example/b"}, ""), ({"$ref": 5}, ""),
    ({"$ref": "#/properties/of/anyOf/1"}, ""),
    (True, ""), (False, ""), (None, ""), ({}, ""), ({"description": "anything"}, ""),
    ({"enum": []}, ""), ({"anyOf": []}, ""), ({"allOf": 5, "anyOf": {}}, ""),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(TYPES)))
def test_types(index: int) -> None:
    part, want = TYPES[index]
    schema = {"type": "object", "$defs": DEFS, "properties": {"x": part}}
    found = SchemaPart(schema).property("x").types
    assert found == (frozenset(want.split()) or None)


def test_parts_within() -> None:
    def types(part: SchemaPart) -> frozenset[str] | None:
        return part.types

    x = {"x": {"type": "integer"}}
    for schema in (
        {"properties": x}, {"additionalProperties": x["x"]},
        {"patternProperties": {"(a+)+$": x["x"]}},
        {"allOf": [{"properties": {"y": {}}}, {"properties": x}]},
        {"$ref": "#/$defs/of", "$defs": {"of": {"oneOf": [{"properties": x}, {"type": "null"}]}}},
        {"additionalProperties": {"type": "string"}, "anyOf": [{"properties": x}]},
    ):  # fmt: skip
        assert types(SchemaPart(schema).property("x")) == {"integer"}, schema
    either = {"anyOf": [{"properties": x}, {"properties": {"x": {"type": "boolean"}}}]}
    assert types(SchemaPart(either).property("x")) == {"boolean", "integer"}
    both = {"allOf": [{"properties": {"x": {"type": ["integer", "null"]}}}, {"properties": x}]}
    assert types(SchemaPart(both).property("x")) == {"integer"}
    assert SchemaPart(both | either | {"properties": {"a": {}}}).keys == {"a", "x"}
    assert types(SchemaPart({"properties": 5, "additionalProperties": False}).property("x")) is None
    row = SchemaPart({"prefixItems": [x["x"], {"type": "null"}], "items": {"type": "boolean"}})
    assert [types(row.item(i)) for i in range(3)] == [{"integer"}, {"null"}, {"boolean"}]
    assert types(SchemaPart({"items": [x["x"]], "additionalItems": {"type": "null"}}).item(1)) == {
        "null"
    }
