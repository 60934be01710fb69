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
    assert part.types == ("integer",)
    # each of about 2 size parts, at most once for each of 8 levels, a few keys each
    assert 0 < Counted.num_asked < 8 * 6 * 3 * size
    # looked up for every text of an element
    asked = Counted.num_asked
    assert part.types == ("integer",)
    assert Counted.num_asked == asked


def test_a_part_is_read_again_where_more_levels_are_left() -> None:
    """First at the end of a long way, where what it refers to is out of reach; then by itself."""
    end = {"$ref": "#/$defs/number"}
    way: dict[str, Any] = end
    for _ in range(6):
        way = {"anyOf": [way]}
    numbers = {"number": {"type": "number"}}

    def types(*choices: dict[str, Any]) -> tuple[str, ...] | None:
        schema = {"$defs": numbers, "properties": {"x": {"oneOf": list(choices)}}}
        return SchemaPart(schema).property("x").types

    assert types(way) is None
    assert types(way, end) == types(end) == ("number",)
