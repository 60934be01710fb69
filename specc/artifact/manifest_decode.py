"""Typed decoding of a manifest's JSON: every wrong value is named by its path."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any

from specc.errors import EngineError


def invalid(found: str, needed: str) -> EngineError:
    """The error of a manifest with a wrong value."""
    return EngineError(
        f"the manifest is invalid: {found}", needed, "compile or copy the engine again"
    )


def decode(kind: Any, value: Any, where: str) -> Any:
    """Decode JSON data to an annotated type; `where` is the path of the value for messages."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(arg for arg in args if arg is not type(None))
        return None if value is None else decode(inner, value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    # bool is an int in Python; a manifest keeps them apart
    if kind is Any or type(value) is kind:
        return value
    names = {tuple: "a list", dict: "an object"}
    raise invalid(f"{where} is {value!r}", names.get(origin) or f"a value of type {kind.__name__}")


def _decode_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise invalid(f"{where} is {value!r}", "an object")
    fields = {field.name for field in dataclasses.fields(kind)}
    for name in sorted(fields ^ value.keys()):
        state = "is missing" if name in fields else "is unknown"
        raise invalid(f"{_join(where, name)} {state}", _listed(fields))
    hints = typing.get_type_hints(kind)
    return kind(**{n: decode(hints[n], item, _join(where, n)) for n, item in value.items()})


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _listed(fields: Iterable[str]) -> str:
    return f"the fields {', '.join(sorted(fields))}"
