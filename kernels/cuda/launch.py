"""What a thread says of the kernels that it launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")
_is_even: ContextVar[bool] = ContextVar("specc_is_even", default=False)
_is_unfiltered: ContextVar[bool] = ContextVar("specc_is_unfiltered", default=False)
_is_dependent: ContextVar[bool] = ContextVar("specc_is_dependent", default=False)


@contextlib.contextmanager
def set_in_context(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Let a variable of this thread have a value, until the end of the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def is_even() -> bool:
    """Whether every sequence of a launch has as many tokens as the others."""
    return _is_even.get()


def even_tokens(is_even: bool = True) -> AbstractContextManager[None]:
    """Say of launches of this thread that sequences have equally many tokens.

    Kernels then know where the tokens of a sequence begin without reading it: `q_start` is
    [0, n, 2 · n, …].
    """
    return set_in_context(_is_even, is_even)


def is_unfiltered() -> bool:
    """Whether no row of a launch has anything that `row_filters` finds out."""
    return _is_unfiltered.get()


def unfiltered(is_unfiltered: bool = True) -> AbstractContextManager[None]:
    """Say of launches of this thread that no row is filtered or tries its proposals one by one.

    See `specc.kernels.reference.processing.are_unfiltered`. What would find that out by itself, row
    by row, is not launched.
    """
    return set_in_context(_is_unfiltered, is_unfiltered)


def is_dependent() -> bool:
    """Whether kernels may start before the one before them has ended."""
    return _is_dependent.get()


def dependent_launches(is_dependent: bool = True) -> AbstractContextManager[None]:
    """Let launches of this thread start before the kernel before them has ended, where they can.

    For launches into one stream of a device that has them, while nothing writes to weights: see
    `specc.kernels.cuda.dependent`.
    """
    return set_in_context(_is_dependent, is_dependent)
