"""What a tool's JSON schema says of one value: enough to tell what a text stands for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

# levels of references and choices, each of which may lead to the next
_MAX_REFERENCES = 8


class SchemaPart:
    """The part of a schema for one value; whatever it is, nothing of it is an error.

    Args:
        part: a schema; what is none says nothing.
        root: that references in it are of; None is the part itself.
    """

    def __init__(self, part: Any, root: Any = None) -> None:
        self._part = part
        self._root = part if root is None else root

    @functools.cached_property
    def types(self) -> tuple[str, ...] | None:
        """Types that the value may have, in the schema's order; None where it is text."""
        found = tuple(dict.fromkeys(_types(self._choices())))
        return None if found in ((), ("string",)) else found

    @property
    def items(self) -> SchemaPart:
        """Of each element, where the value is a list."""
        found = (part.get("items") for part in self._choices())
        return SchemaPart(next((one for one in found if isinstance(one, Mapping)), {}), self._root)

    def property(self, key: str) -> SchemaPart:
        """Of what is under a key, where the value is an object."""
        for part in self._choices():
            known, others = part.get("properties"), part.get("additionalProperties")
            if isinstance(known, Mapping) and key in known:
                return SchemaPart(known[key], self._root)
            if isinstance(others, Mapping):
                return SchemaPart(others, self._root)
        return SchemaPart({}, self._root)

    def _choices(self) -> Iterator[Mapping[str, Any]]:
        """The part, and all that it may stand for."""
        return _choices(self._part, self._root, _MAX_REFERENCES, {})


def types_of(schema: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """Types that an argument may have, in the schema's order; None where it is text."""
    return SchemaPart(schema).property(key).types


def _choices(part: Any, root: Any, depth: int, seen: dict[int, int]) -> Iterator[Mapping[str, Any]]:
    """The part, those that it lets a value choose from, and the one that it refers to.

    Args:
        part: of a schema.
        root: that references are of.
        depth: levels that are left.
        seen: id of a part → levels that were left there. No part is read again with as few, so that
            schemas that refer to themselves cost by their size, whatever they look like.
    """
    if not isinstance(part, Mapping) or depth <= seen.get(id(part), 0):
        return
    seen[id(part)] = depth
    yield part
    for name in ("anyOf", "oneOf"):
        choices = part.get(name)
        for choice in choices if isinstance(choices, list) else ():
            yield from _choices(choice, root, depth - 1, seen)
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        yield from _choices(found, root, depth - 1, seen)


def _types(choices: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    for choice in choices:
        declared = choice.get("type")
        names = declared if isinstance(declared, list) else [declared]
        yield from (name for name in names if isinstance(name, str))
