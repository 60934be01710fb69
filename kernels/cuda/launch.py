"""What a thread says of the kernels that it launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_is_even: ContextVar[bool] = ContextVar("specc_is_even", default=False)


def is_even() -> bool:
    """Whether every sequence of a launch has as many tokens as the others."""
    return _is_even.get()


@contextlib.contextmanager
def even_tokens(is_even: bool = True) -> Iterator[None]:
    """Say of launches of this thread that sequences have equally many tokens.

    Kernels then know where the tokens of a sequence begin without reading it: `q_start` is
    [0, n, 2 · n, …].
    """
    token = _is_even.set(is_even)
    try:
        yield
    finally:
        _is_even.reset(token)


_is_unfiltered: ContextVar[bool] = ContextVar("specc_is_unfiltered", default=False)


def is_unfiltered() -> bool:
    """Whether no row of a launch has anything that `row_filters` finds out."""
    return _is_unfiltered.get()


@contextlib.contextmanager
def unfiltered(is_unfiltered: bool = True) -> Iterator[None]:
    """Say of launches of this thread that no row is filtered or tries its proposals one by one.

    See `specc.kernels.reference.processing.are_unfiltered`. What would find that out by itself, row
    by row, is not launched.
    """
    token = _is_unfiltered.set(is_unfiltered)
    try:
        yield
    finally:
        _is_unfiltered.reset(token)


_is_dependent: ContextVar[bool] = ContextVar("specc_is_dependent", default=False)


def is_dependent() -> bool:
    """Whether kernels may start before the one before them has ended."""
    return _is_dependent.get()


@contextlib.contextmanager
def dependent_launches(is_dependent: bool = True) -> Iterator[None]:
    """Let launches of this thread start before the kernel before them has ended, where they can.

    For launches into one stream of a device that has them, while nothing writes to weights: see
    `specc.kernels.cuda.dependent`.
    """
    token = _is_dependent.set(is_dependent)
    try:
        yield
    finally:
        _is_dependent.reset(token)
