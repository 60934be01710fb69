"""Numbers of files that anybody may have written: what they may be is said beside each field."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

_BOUNDS = "bounds"
# in metadata of a field: files that were written before it was there do not have it
MAY_BE_ABSENT = "may_be_absent"

# what no model, machine or disk comes near, and products of which fit 64 bits
MOST_LAYERS = MOST_COLUMNS = 1 << 16
MOST_IDS = 1 << 24
MOST_POSITIONS = 1 << 31
MOST_BYTES = 1 << 50


class Bounds(NamedTuple):
    """The least and the largest value of a number, or of each number of a list."""

    least: float
    most: float

    def holds(self, value: float) -> bool:
        """Written so that NaN does not."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least} … {self.most}"


def within(least: float, most: float) -> dict[str, Bounds]:
    """Metadata of a field without a default whose numbers lie between these; see `number`."""
    return {_BOUNDS: Bounds(least, most)}


def number(least: float, most: float, **options: Any) -> Any:
    """A field with a default whose numbers, also those of lists in it, lie between these.

    Args:
        least: smallest value.
        most: largest value.
        options: of `dataclasses.field`; metadata is added to.
    """
    metadata = options.pop("metadata", {}) | within(least, most)
    return dataclasses.field(metadata=metadata, **options)


def bounds_of(field: dataclasses.Field[Any]) -> Bounds | None:
    """What `number` was told; None of other fields."""
    found = field.metadata.get(_BOUNDS)
    assert found is None or isinstance(found, Bounds)
    return found


def is_bounded(entry: Any) -> bool:
    """Whether all numbers of a dataclass of numbers and lists of them are within their bounds."""
    for field in dataclasses.fields(entry):
        bounds, value = bounds_of(field), getattr(entry, field.name)
        values = value if isinstance(value, tuple) else (value,)
        if bounds is not None and not all(map(bounds.holds, values)):
            return False
    return True
