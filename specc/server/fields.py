"""What all objects of a request have in common: nulls, whole numbers, and unknown names."""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from specc.server.errors import ApiError, shorten

# unknown names that are remembered: clients choose them
_MAX_NAMES = 256
_log = logging.getLogger("specc.serve")


class UnknownFields:
    """Names in requests that nobody reads; each is logged once.

    Args:
        are_refused: requests with one get 400 instead.
    """

    def __init__(self, are_refused: bool = False) -> None:
        self.are_refused = are_refused
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def note(self, name: str) -> None:
        name = shorten(name)
        with self._lock:
            if name in self._names or len(self._names) == _MAX_NAMES:
                return
            self._names.add(name)
            is_last = len(self._names) == _MAX_NAMES
        more = "; no further names are logged" if is_last else ""
        _log.warning("requests have the field %r, which has no effect here%s", name, more)


class Fields(BaseModel):
    """An object of a request: null is as if a field were not there, and types are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = without_nulls(data)
        unknown = info.context
        if cls.model_config["extra"] == "allow" or unknown is None or unknown.are_refused:
            return given
        names = cls.names()
        for name in given.keys() - names:
            unknown.note(name)
        return {name: value for name, value in given.items() if name in names}

    @classmethod
    def names(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items()}


AnyFields = TypeVar("AnyFields", bound=Fields)


class OpenFields(Fields):
    """Such an object whose further fields are somebody else's, such as the chat template's."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def known_fields(
    data: Mapping[str, Any],
    neutral: Mapping[str, Sequence[Any]],
    idle: Collection[str],
    own: Collection[str] = (),
) -> dict[str, Any]:
    """Leave out what asks for nothing.

    Args:
        data: field → value of a request.
        neutral: field that this server has not got → values of it that change no output.
        idle: fields that never change an output.
        own: fields that this kind of request has, whatever the others say.
    Raises:
        ApiError: a field that would change the output.
    """
    known = {}
    for name, value in without_nulls(data).items():
        if name in own or not (name in neutral or name in idle):
            known[name] = value
        elif name in neutral and not any(_same(value, other) for other in neutral[name]):
            raise ApiError(
                400,
                f"Unsupported parameter: {name!r}. Please leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    return known


def parse_fields(
    kind: type[AnyFields], data: Mapping[str, Any], unknown: UnknownFields | None = None
) -> AnyFields:
    """Check a request's fields and their types.

    Args:
        unknown: what becomes of fields that this server does not know.
    Raises:
        ApiError: a value of another type, or an unknown field where they are refused.
    """
    try:
        return kind.model_validate(data, context=unknown or UnknownFields())
    except ValidationError as error:
        raise error_of(kind, error) from error


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def whole(value: Any) -> Any:
    """5 for 5.0, which is the same number in JSON; anything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def whole_numbers(values: Any) -> Any:
    """The same of each of a list, which may be long."""
    if isinstance(values, list) and any(type(value) is float for value in values):
        return [whole(value) for value in values]
    return values


Int = Annotated[int, BeforeValidator(whole)]
Ints = Annotated[list[int], BeforeValidator(whole_numbers)]


def error_of(kind: type[Fields], error: ValidationError) -> ApiError:
    """The first thing that is wrong; an unknown field before any of its consequences."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    param = ".".join(str(part)[:80] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(param[:80], sorted(kind.names()), n=1)
        do = f"Did you mean {close[0]}?" if close else "Please leave it out."
        text = f"Unknown parameter: {shorten(param)!r}. {do}"
        return ApiError(400, text, param=param, code="unknown_parameter")
    return problem_error(param, first)


def problem_error(param: str, problem: Mapping[str, Any]) -> ApiError:
    """What pydantic says of one field."""
    if problem["type"] == "missing":
        text = f"Missing required parameter: {param!r}. Please add it."
        return ApiError(400, text, param=param, code="missing_required_parameter")
    is_type = problem["type"].endswith("_type") or problem["type"] == "int_from_float"
    what = "type" if is_type else "value"
    reason = problem["msg"][:1].lower() + problem["msg"][1:]
    text = f"Invalid {what} for {param!r}: {reason}. Please correct it."
    return ApiError(400, text, param=param, code=f"invalid_{what}")
