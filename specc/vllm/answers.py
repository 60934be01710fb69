"""Answers to names that vLLM or transformers has and specc has not.

A name that would change outputs is never ignored: it is refused, with specc's equivalent. Values
that ask for the default behavior are accepted; names that change no output are ignored, with a
warning.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from specc.close_name import close_name
from specc.errors import RequestError

Kind = TypeVar("Kind")


class Unsupported(NamedTuple):
    """A name that is refused.

    Args:
        needed: specc's alternative.
        idle: values that mean the default; the option is then dropped.
    """

    needed: str
    do: str
    idle: Collection[Any] = (None,)


class Ignored(NamedTuple):
    """A name that changes no output: any value is accepted, with a warning.

    Args:
        because: specc's alternative; empty: no warning.
        idle: values that give no warning.
    """

    because: str = ""
    idle: Collection[Any] = (None, False)


class Renamed(NamedTuple):
    """vLLM's name of an option that specc calls differently."""

    name: str


Answer = Unsupported | Ignored | Renamed


class IgnoredOptionWarning(UserWarning):
    """Warning: an option without effect was passed."""


def answer_names(
    given: Mapping[str, Any],
    known: Collection[str],
    answers: Mapping[str, Answer],
    error: Callable[[str, str, str], Exception],
) -> dict[str, Any]:
    """Translate options to specc's names.

    Args:
        given: name → value.
        known: parameter names of the class.
        answers: name → its answer.
        error: exception type, constructed from found, needed and do.
    Raises:
        Exception: `error`: an option is unknown, or given by two names.
    """
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
            continue
        found = f"{name}={_shown(value)}"
        answer = answers.get(name)
        if answer is None:
            close = close_name(name, sorted(known))
            do = f"pass {close}?" if close else "leave it out"
            raise error(found, f"one of {', '.join(sorted(known))}", do)
        if isinstance(answer, Renamed):
            if value is None:
                continue
            if given.get(answer.name) is not None:
                raise error(found, f"{answer.name} alone, which is the same", f"leave {name} out")
            kept[answer.name] = value
        elif any(_is_same(value, other) for other in answer.idle):
            continue
        elif isinstance(answer, Unsupported):
            raise error(found, answer.needed, answer.do)
        elif answer.because:
            text = f"{name} has no effect here: {answer.because}"
            warnings.warn(text, IgnoredOptionWarning, stacklevel=_level_of_caller())
    return kept


def answers_names(
    answers: Mapping[str, Answer],
    error: Callable[[str, str, str], Exception] = RequestError,
) -> Callable[[type[Kind]], type[Kind]]:
    """Decorate a dataclass: its constructor answers foreign names.

    Args:
        answers, error: see `answer_names`.
    """

    def decorate(kind: type[Kind]) -> type[Kind]:
        make: Callable[..., None] = kind.__init__
        names = frozenset(one.name for one in dataclasses.fields(kind) if one.init)  # type: ignore[arg-type]

        @functools.wraps(make)
        def __init__(self: Kind, *args: Any, **options: Any) -> None:
            if options.keys() <= names:
                make(self, *args, **options)
            else:
                make(self, *args, **answer_names(options, names, answers, error))

        kind.__init__ = __init__  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def refuses_calls(refused: Mapping[str, Unsupported]) -> Callable[[type[Kind]], type[Kind]]:
    """Decorate a class with methods that raise an answer.

    Args:
        refused: method name → its answer.
    """

    def method(name: str, answer: Unsupported) -> Callable[..., Any]:
        def refuse(self: object, *args: Any, **options: Any) -> Any:
            raise RequestError(f"{type(self).__name__}.{name}", answer.needed, answer.do)

        refuse.__name__ = name
        refuse.__doc__ = f"Raises RequestError: there is none; {answer.do}."
        return refuse

    def decorate(kind: type[Kind]) -> type[Kind]:
        for name, answer in refused.items():
            setattr(kind, name, method(name, answer))
        return kind

    return decorate


def _level_of_caller() -> int:
    """Stack level of a warning: the first caller outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("specc."):
        frame, level = frame.f_back, level + 1
    return level


def _is_same(value: Any, other: Any) -> bool:
    """Equality that tells bools from numbers; arrays equal nothing."""
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    return value is other or (isinstance(value, type(other)) and bool(value == other))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
