"""The part of a tool's JSON schema for one value: which types a text may be parsed as."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

# limits: nesting of references and choices, and subschemas in total
_MAX_LEVELS, _MAX_PARTS = 32, 4096
_NUMBER = frozenset(("integer", "number"))
# JSON schema type names, and the aliases that vLLM accepts
_NAMED = {
    "array": ("array", "arr", "list", "sequence", "tuple"),
    "boolean": ("boolean", "bool"),
    "integer": ("integer", "int", "int32", "int64", "uint", "uint32", "uint64", "long", "short"),
    "null": ("null", "none"),
    "object": ("object", "dict"),
    "string": ("string", "str", "text", "varchar", "char", "enum"),
}
_TYPES = {name: frozenset((kind,)) for kind, names in _NAMED.items() for name in names}
_TYPES |= dict.fromkeys(("number", "float", "float32", "float64", "double"), _NUMBER)
_TYPES["any"] = frozenset(_NAMED) | _NUMBER
# keywords that imply a type where none is named
_MEANT = {
    "object": (
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties",
        "required", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
        "dependentSchemas",
    ),
    "array": (
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minItems",
        "maxItems", "uniqueItems",
    ),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "format"),
}  # fmt: skip
_NOTHING: frozenset[str] = frozenset()

Found = TypeVar("Found")


class SchemaPart:
    """Subschema of one value; malformed schemas constrain nothing and raise nothing.

    Args:
        part: a schema; anything else constrains nothing.
        root: base of references; None is the part itself.
    """

    def __init__(self, part: Any, root: Any = None) -> None:
        self._part = part
        self._root = part if root is None else root

    @functools.cached_property
    def types(self) -> frozenset[str] | None:
        """Types that the value may have; None if it is text or unconstrained.

        `number` means non-integers, so JSON's `number` gives both.
        """
        found = _Reader(self._root).types(self._part)
        return None if found in (None, _NOTHING, _TYPES["string"]) else found

    def admits(self, value: Any) -> bool:
        """Whether a value has an allowed type and is in the enum, if there is one."""
        return _Reader(self._root).admits(self._part, value)

    def item(self, index: int) -> SchemaPart:
        """Subschema of list elements."""

        def pick(part: Mapping[str, Any]) -> Any:
            items = part.get("items")
            first = items if isinstance(items, list) else part.get("prefixItems")
            if isinstance(first, list) and index < len(first):
                return first[index]
            return items if isinstance(items, Mapping) else part.get("additionalItems")

        return self._below(pick)

    def property(self, key: str) -> SchemaPart:
        """Subschema of an object's property."""

        def known(part: Mapping[str, Any]) -> Any:
            return _mapping(part.get("properties")).get(key)

        def other(part: Mapping[str, Any]) -> Any:
            # patterns are not matched: they are untrusted regular expressions
            found = [*_mapping(part.get("patternProperties")).values()]
            found += [part.get(n) for n in ("additionalProperties", "unevaluatedProperties")]
            return _any_of([one for one in found if isinstance(one, Mapping)])

        return self._below(known, other)

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """Property names of an object."""
        names: set[str] = set()
        # pick nothing: just visit all subschemas
        _Reader(self._root).below(self._part, lambda p: names.update(_mapping(p.get("properties"))))
        return frozenset(names)

    def _below(self, *picks: Callable[[Mapping[str, Any]], Any]) -> SchemaPart:
        """The first subschema that is present."""
        for pick in picks:
            if (found := _Reader(self._root).below(self._part, pick)) is not None:
                return SchemaPart(found, self._root)
        return SchemaPart({}, self._root)


class _Reader:
    """Visits a schema and the subschemas that it combines or references.

    Each is visited once, up to a limit, so recursive schemas cost no more than their size.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        # id of a subschema → result; cycles add nothing
        self._seen: dict[int, Any] = {}
        self._num_parts = 0

    def types(self, part: Any, levels: int = _MAX_LEVELS) -> frozenset[str] | None:
        """Types of a subschema; None if unconstrained, empty for none or a cycle."""

        def read(part: Mapping[str, Any]) -> frozenset[str] | None:
            said = [_declared(part), _listed(part)]
            said += [self.types(one, levels - 1) for one in self._all_of(part)]
            for choices in _choices(part):
                found = [self.types(one, levels - 1) for one in choices]
                if any(one is not None for one in found):
                    # an unconstrained alternative allows text, too
                    said.append(_union(_TYPES["string"] if one is None else one for one in found))
            known = _meet(said)
            if known is None:
                meant = (_TYPES[name] for name, own in _MEANT.items() if part.keys() & own)
                known = _union(meant) or None
            return known | _TYPES["null"] if known and part.get("nullable") is True else known

        if part is False:
            return _NOTHING
        unknown: frozenset[str] | None = _NOTHING
        return self._once(part, levels, read, unknown) if isinstance(part, Mapping) else None

    def admits(self, part: Any, value: Any, levels: int = _MAX_LEVELS) -> bool:
        def read(part: Mapping[str, Any]) -> bool:
            if value is None and part.get("nullable") is True:
                return True
            declared = _declared(part)
            if declared is not None and not type_of(value) <= declared:
                return False
            if any(not any(_is_same(one, value) for one in own) for own in _lists(part)):
                return False
            if not all(self.admits(one, value, levels - 1) for one in self._all_of(part)):
                return False
            return all(
                any(self.admits(one, value, levels - 1) for one in choices)
                for choices in _choices(part)
            )

        return self._once(part, levels, read, True) if isinstance(part, Mapping) else bool(part)

    def below(
        self, part: Any, pick: Callable[[Mapping[str, Any]], Any], levels: int = _MAX_LEVELS
    ) -> Any:
        """The first subschema that `pick` finds, or None."""

        def read(part: Mapping[str, Any]) -> Any:
            own = [pick(part), *(self.below(one, pick, levels - 1) for one in self._all_of(part))]
            for choices in _choices(part):
                found = [self.below(one, pick, levels - 1) for one in choices]
                own.append(_any_of([one for one in found if one is not None]))
            own = [one for one in own if one is not None]
            return {"allOf": own} if len(own) > 1 else next(iter(own), None)

        return self._once(part, levels, read, None) if isinstance(part, Mapping) else None

    def _once(
        self,
        part: Mapping[str, Any],
        levels: int,
        read: Callable[[Mapping[str, Any]], Found],
        unknown: Found,
    ) -> Found:
        if id(part) in self._seen:
            found: Found = self._seen[id(part)]
            return found
        self._num_parts += 1
        if levels < 1 or self._num_parts > _MAX_PARTS:
            return unknown
        self._seen[id(part)] = unknown
        found = self._seen[id(part)] = read(part)
        return found

    def _all_of(self, part: Mapping[str, Any]) -> list[Any]:
        """Subschemas that apply in conjunction."""
        all_of, reference = part.get("allOf"), part.get("$ref")
        found = [*all_of] if isinstance(all_of, list) else []
        if isinstance(reference, str) and reference.startswith("#"):
            found.append(self._at(reference[1:]))
        return found

    def _at(self, pointer: str) -> Any:
        """Resolve a JSON pointer; None if it dangles."""
        found = self._root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key[:9]) < len(found):
                found = found[int(key[:9])]
            else:
                found = _mapping(found).get(key)
        return found


def _declared(part: Mapping[str, Any]) -> frozenset[str] | None:
    declared = part.get("type")
    names = declared if isinstance(declared, list) else [declared]
    found = [_TYPES.get(name.strip().lower()) for name in names if isinstance(name, str)]
    known = [one for one in found if one is not None]
    # an unknown type may be any
    return _union(known) if known and len(known) == len(found) else None


def _lists(part: Mapping[str, Any]) -> list[list[Any]]:
    """Values of enum and const."""
    enum = part.get("enum")
    found = [enum] if isinstance(enum, list) and enum else []
    return [*found, [part["const"]]] if "const" in part else found


def _listed(part: Mapping[str, Any]) -> frozenset[str] | None:
    return _meet([_union(map(type_of, own)) for own in _lists(part)])


def _choices(part: Mapping[str, Any]) -> list[list[Any]]:
    found = [part.get("anyOf"), part.get("oneOf")]
    if "then" in part or "else" in part:
        found.append([part.get("then", {}), part.get("else", {})])
    return [one for one in found if isinstance(one, list) and one]


def _meet(said: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """Intersection of types; their union if that is empty, as in vLLM."""
    heard = [one for one in said if one is not None]
    known = [one for one in heard if one]
    if not known:
        return _NOTHING if heard else None
    return frozenset.intersection(*known) or _union(known)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return _NOTHING.union(*sets)


def _any_of(found: list[Any]) -> Any:
    return {"anyOf": found} if len(found) > 1 else next(iter(found), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def type_of(value: Any) -> frozenset[str]:
    """JSON type of a parsed value; 1.0 is an integer, too."""
    if isinstance(value, float) and not value.is_integer():
        return frozenset(("number",))
    return _TYPES[_KINDS.get(type(value), "any")]


def _is_same(one: Any, other: Any) -> bool:
    # in Python, 1 == True
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


_KINDS = {
    bool: "boolean", dict: "object", float: "integer", int: "integer", list: "array",
    str: "string", type(None): "null",
}  # fmt: skip
