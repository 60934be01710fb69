"""The shapes of requests: those of the package `anthropic`, which is imported when needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import typing_extensions
from pydantic import TypeAdapter, ValidationError

from specc.server.errors import ApiError, bad_request, shorten
from specc.server.fields import UnknownFields, problem_error, without_nulls
from specc.system.extras import install_command


@functools.cache
def _types() -> Any:
    """Raises ApiError: the package is not there."""
    try:
        from anthropic import types
    except ImportError as error:
        do = install_command("serve")
        text = f"This server has no package anthropic. Please {do} there."
        raise ApiError(501, text, code="not_installed") from error
    return types


@functools.cache
def _hints(kind: str) -> dict[str, Any]:
    module, _, name = kind.rpartition(".")
    home = getattr(_types(), module) if module else _types()
    return typing_extensions.get_type_hints(getattr(home, name))


@functools.cache
def _adapter(kind: str, field: str = "", choice: str = "") -> TypeAdapter[Any]:
    """Of an object; or of one of its fields, which may be one of several by its `type`."""
    if not field:
        return TypeAdapter(getattr(_types(), kind))
    return TypeAdapter(_choices(kind, field)[choice] if choice else _hints(kind)[field])


@functools.cache
def _choices(kind: str, field: str) -> dict[str, Any]:
    """`type` → the object, where a field is one of several."""
    options = [
        one
        for one in typing_extensions.get_args(_hints(kind)[field])
        if typing_extensions.is_typeddict(one)
    ]
    kinds = {one: typing_extensions.get_type_hints(one).get("type") for one in options}
    found = {name: one for one in options for name in typing_extensions.get_args(kinds[one])}
    return found if len(options) > 1 else {}


def names(kind: str) -> frozenset[str]:
    """Fields of an object, by its name in the package."""
    return frozenset(_hints(kind))


def check_field(kind: str, field: str, value: Any) -> None:
    """Raises ApiError: a field of a request has another type."""
    choice = ""
    if choices := _choices(kind, field):
        value = object_at(value, field)
        choice = value.get("type", "")
        if not isinstance(choice, str) or choice not in choices:
            raise bad_request(
                f"{field}.type of another value", " or ".join(choices), "choose one of them",
                f"{field}.type",
            )  # fmt: skip
    _check(_adapter(kind, field, choice), value, field)


def check(kind: str, fields: Mapping[str, Any], place: str, unknown: UnknownFields) -> None:
    """An object, its nulls left out.

    The package's types say `Iterable` for lists, whose elements pydantic would only look at when
    they are read: those are checked one by one, by whoever reads them.

    Args:
        kind: its name in the package.
        place: in the request.
        unknown: what becomes of fields that the package does not know.
    Raises:
        ApiError: a field is missing, or of another type.
    """
    for name in fields.keys() - names(kind):
        note(unknown, name, place)
    _check(_adapter(kind), fields, place)


def object_at(value: Any, place: str) -> dict[str, Any]:
    """An object without its nulls.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(value, Mapping):
        raise bad_request(f"{place} is no object", "an object", "correct it", place)
    return without_nulls(value)


def note(unknown: UnknownFields, name: str, place: str = "") -> None:
    """Raises ApiError: unknown fields are refused."""
    if not unknown.are_refused:
        unknown.note(name)
        return
    param = f"{place}.{name}" if place else name
    text = f"Unknown parameter: {shorten(param)!r}. Please leave it out."
    raise ApiError(400, text, param=param, code="unknown_parameter")


def missing(param: str) -> ApiError:
    """The error of a field that is not there."""
    return problem_error(param, {"type": "missing"})


def _check(adapter: TypeAdapter[Any], value: Any, place: str) -> None:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        # of several that a field may be, the plainest; and no name of a type in its place
        problem = next((p for p in problems if p["type"].endswith("_type")), problems[0])
        parts = [str(part) for part in problem["loc"]]
        where = [p for p in parts if p.isdigit() or (p.isidentifier() and p.islower())]
        raise problem_error(".".join(p for p in [place, *where] if p != "str"), problem) from error
