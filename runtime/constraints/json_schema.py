"""JSON schemas as the library for grammars is given them: nothing in them is rounded or endless."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from decimal import Decimal, InvalidOperation
from typing import Any

from specc.errors import RequestError

_DO = "use a number with fewer digits, or leave it out"
# the library computes with float64: whole numbers above, and longer fractions, come out rounded
_MAX_WHOLE = 1 << 53
_MAX_DIGITS, _MAX_PLACES = 15, 30
# and with uint32 where several multiples hold
_MAX_MULTIPLE, _MAX_COMMON = 10**8, 1 << 32
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# keywords whose values are instances, schemas for the same value, and schemas by names
_INSTANCES = ("const", "enum", "default", "examples", "example")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_OBJECT = ("properties", "patternProperties")
_SAYS = ("additionalProperties", "unevaluatedProperties")


class _Written(float):
    """A number that is not whole, as it is written."""

    text: str

    def __new__(cls, text: str) -> _Written:
        made = super().__new__(cls, text)
        made.text = text
        return made


def prepared(text: str, closes: bool) -> tuple[str, Set[str]]:
    """The text of a schema that the library reads as it is meant.

    Args:
        text: of a schema, JSON.
        closes: objects have no properties but those that it names, where it does not say.
    Returns:
        it, and the options that it sets itself ("x-guidance").
    Raises:
        RequestError: a number that the library would round.
        ValueError, RecursionError: no JSON that can be read.
    """
    schema = json.loads(text, parse_float=_Written)
    _check_numbers(schema)
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    said = own.keys() if isinstance(own, dict) else frozenset[str]()
    if not closes:
        return text, said
    return json.dumps(_Closed(schema).of(schema), ensure_ascii=False), said


def _check_numbers(schema: Any) -> None:
    """Raises RequestError: a bound, a multiple or a constant of a schema would be rounded."""
    multiples: set[Decimal] = set()
    is_combined = False
    for part, path in _schemas(schema, ()):
        is_combined = is_combined or "$ref" in part or any(name in part for name in _BRANCHES)
        for name in (*_BOUNDS, "multipleOf"):
            if (number := _number(part.get(name))) is None:
                continue
            if name == "multipleOf":
                multiples.add(abs(number))
                is_exact = abs(number.scaleb(_places(number))) <= _MAX_MULTIPLE
            else:
                is_exact = _is_exact(number, name.startswith("exclusive"))
            if not is_exact:
                raise _rounded(number, (*path, name))
        for name in ("const", "enum"):
            for number in _numbers(part.get(name)):
                if not _is_exact(number, False):
                    raise _rounded(number, (*path, name))
    if is_combined and len(multiples) > 1:
        scale = max(map(_places, multiples))
        whole = [int(number.scaleb(scale)) for number in multiples]
        least = math.lcm(*whole)
        if least > _MAX_MULTIPLE or least * max(whole) >= _MAX_COMMON:
            raise RequestError(
                f"several multipleOf in a schema: {', '.join(map(str, sorted(multiples)))}",
                f"multiples whose least common one times the largest is below {_MAX_COMMON}",
                _DO,
            )


def _rounded(number: Decimal, path: Iterable[str]) -> RequestError:
    return RequestError(
        f"{number} at {'.'.join(path)} of a JSON schema, which the library for grammars rounds",
        f"a whole number of at most 2^53, a fraction of at most {_MAX_DIGITS} digits, or a multiple"
        f" of at most {_MAX_MULTIPLE:,} units of its last place",
        _DO,
    )


def _is_exact(number: Decimal, is_exclusive: bool) -> bool:
    if number == number.to_integral_value():
        # the bound next to an exclusive one has to exist, too
        return abs(number) <= _MAX_WHOLE - is_exclusive
    digits = len(number.normalize().as_tuple().digits)
    return digits <= _MAX_DIGITS and _places(number) <= _MAX_PLACES


def _places(number: Decimal) -> int:
    """Digits after the point."""
    exponent = number.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _number(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return Decimal(value.text if isinstance(value, _Written) else value)
    except InvalidOperation as error:
        raise ValueError(f"a number {value!r}") from error


def _numbers(value: Any) -> Iterator[Decimal]:
    if (number := _number(value)) is not None:
        yield number
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _schemas(part: Any, path: tuple[str, ...]) -> Iterator[tuple[Mapping[str, Any], Iterable[str]]]:
    if not isinstance(part, dict):
        return
    yield part, path
    for name, value in part.items():
        if name in _BY_NAME and isinstance(value, dict):
            for key, item in value.items():
                yield from _schemas(item, (*path, name, key))
        elif isinstance(value, list) and name not in _INSTANCES:
            for i, item in enumerate(value):
                yield from _schemas(item, (*path, name, str(i)))
        elif name not in _INSTANCES:
            yield from _schemas(value, (*path, name))


class _Closed:
    """Closes the objects of a schema.

    Schemas that hold for one value together (`allOf`, a `$ref` with others beside it, branches and
    what they have in common) each allow what any of them names: closed alone, each would refuse
    the others' properties.

    Args:
        root: that references lead into.
    """

    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, part: Any) -> Any:
        """A schema that holds for a value alone, closed; what says itself is left as it is."""
        if not isinstance(part, dict):
            return part
        if not any(name in part for name in (*_BRANCHES, *_OBJECT)) and (
            "$ref" not in part or not any(name in part for name in _SAYS)
        ):
            # nothing to close here: a definition is closed where it stands
            return self._with(part, {}, False, follows=False)
        return self._with(part, {}, not self._is_open(part))

    def _with(self, part: Any, others: dict[str, None], closes: bool, follows: bool = True) -> Any:
        """A schema with all in it closed, beside others that hold for the same value.

        Args:
            others: properties that those name.
            closes: this value's objects, too.
            follows: what it refers to holds beside others.
        """
        if not isinstance(part, dict):
            return part
        own = _names(part)
        target = self._target(part) if follows else None
        branches = {name: part[name] for name in _BRANCHES if isinstance(part.get(name), list)}
        inside = {name: [self._names(item) for item in branches[name]] for name in branches}
        if target is not None:
            inside["$ref"] = [self._names(target)]
        made: dict[str, Any] = {}
        for name, value in part.items():
            if name in _INSTANCES:
                made[name] = value
            elif name in branches:
                made[name] = [
                    self._with(item, others | own | _beside(inside, name, i), closes)
                    for i, item in enumerate(value)
                ]
            elif name in _BY_NAME and isinstance(value, dict):
                made[name] = {key: self.of(item) for key, item in value.items()}
            elif isinstance(value, list):
                made[name] = [self.of(item) for item in value]
            else:
                made[name] = self.of(value)
        if target is not None:
            beside = others | own | _beside(inside, "$ref", 0)
            if beside.keys() - inside["$ref"][0] if closes else not self._is_open(target):
                # the definition is closed by itself, and would refuse these
                del made["$ref"]
                made["allOf"] = [self._with(target, beside, closes), *made.get("allOf", ())]
        if closes and any(name in part for name in _OBJECT):
            more = others | own | _beside(inside)
            listed = made.get("properties", {})
            made["properties"] = listed | {name: True for name in more if name not in listed}
            made["additionalProperties"] = False
        return made

    def _is_open(self, part: Any) -> bool:
        """Whether objects of a value stay as their schemas say."""
        together = self._together(part)
        objects = [one for one in together if any(name in one for name in _OBJECT)]
        says = any(name in one for one in together for name in _SAYS)
        return says or (len(objects) > 1 and any("patternProperties" in one for one in objects))

    def _names(self, part: Any) -> dict[str, None]:
        """Properties that the schemas of a value name, in order."""
        return {name: None for one in self._together(part) for name in _names(one)}

    def _together(self, part: Any) -> list[dict[str, Any]]:
        """The schemas that hold for one value, or may."""
        found: list[dict[str, Any]] = []
        seen: set[int] = set()
        open_ = deque([part])
        while open_:
            one = open_.popleft()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            found.append(one)
            for name in _BRANCHES:
                open_ += one[name] if isinstance(one.get(name), list) else []
            open_.append(self._target(one))
        return found

    def _target(self, part: Mapping[str, Any]) -> Any:
        """What its `$ref` leads to; None where that is elsewhere, or nothing."""
        place, ref = self._root, part.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        for key in ref[1:].split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdigit() and int(key) < len(place):
                place = place[int(key)]
            else:
                return None
        return place


def _names(part: Mapping[str, Any]) -> dict[str, None]:
    """Properties that a schema itself names."""
    found: dict[str, None] = {}
    for names in (part.get("properties"), part.get("required")):
        if isinstance(names, (dict, list)):
            found |= dict.fromkeys(name for name in names if isinstance(name, str))
    return found


def _beside(
    inside: Mapping[str, list[dict[str, None]]], name: str | None = None, place: int = 0
) -> dict[str, None]:
    """Names of all branches that may hold together with one; with all, where it is None."""
    return {
        key: None
        for other, branches in inside.items()
        for i, names in enumerate(branches)
        if other != name or (name == "allOf" and i != place)
        for key in names
    }
