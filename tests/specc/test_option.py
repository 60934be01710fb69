"""Fields that are options, and their ranges."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from specc.errors import ConfigError
from specc.option import check_ranges, object_of, option, option_of


@dataclass(frozen=True)
class Load:
    must: int = option(..., "Has no default.")
    count: int = option(4, "From 1 to 8.", least=1, most=8)
    seconds: float | None = option(None, "Above 0.", "--time", above=0)
    sizes: tuple[int, ...] = option((), "Each 2 or more.", least=2)
    other: int = -1

    def __post_init__(self) -> None:
        check_ranges(self)


def test_a_field_says_what_it_means():
    fields = {field.name: field for field in dataclasses.fields(Load)}
    assert option_of(fields["other"]) is None
    assert option_of(fields["seconds"]).names == ("--time",)
    assert fields["must"].default is dataclasses.MISSING
    assert (Load(1).count, Load(1).seconds) == (4, None)


@pytest.mark.parametrize("values", [{"count": 1}, {"count": 8}, {"seconds": 0.1}, {"sizes": (2,)}])
def test_values_at_the_ends_are_taken(values):
    assert dataclasses.asdict(Load(1, **values)).items() >= values.items()


@pytest.mark.parametrize(
    ("values", "found", "needed", "do"),
    [
        ({"count": 0}, "count=0", "1 or more", "raise count"),
        ({"count": 9}, "count=9", "8 or less", "lower count"),
        ({"seconds": 0.0}, "seconds=0.0", "above 0", "raise seconds"),
        ({"seconds": float("nan")}, "seconds=nan", "above 0", "raise seconds"),
        ({"sizes": (3, 1)}, "sizes=1", "2 or more", "raise sizes"),
    ],
)
def test_values_outside_are_refused(values, found, needed, do):
    with pytest.raises(ConfigError) as caught:
        Load(1, **values)
    assert (caught.value.found, caught.value.needed, caught.value.do) == (found, needed, do)


def test_objects_and_their_json():
    assert object_of('{"a": 1}', "x", "{}") == object_of({"a": 1}, "x", "{}") == {"a": 1}
    assert object_of(None, "x", "{}") is object_of("null", "x", "{}") is None
    for given in ("[1]", "{", "1", 1, [1]):
        with pytest.raises(ConfigError) as caught:
            object_of(given, "x", '{"a": 1}')
        assert caught.value.found.startswith("x=")
        assert caught.value.needed == """an object, such as '{"a": 1}'"""
