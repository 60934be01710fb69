"""How the operators of model programs launch their kernels: at once, or as nodes of a graph.

An exported graph that calls an operator leaves its Python behind: only launches that tracing sees
become part of the code that AOTInductor generates.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

# kernel → what `[grid](*args)` is called on
Wrap = Callable[[Any], Any]
_wrap: ContextVar[Wrap | None] = ContextVar("specc_wrap", default=None)


def launcher(kernel: Any) -> Any:
    """What launches a kernel with `[grid](*args)`: the kernel itself, except while `inlined`."""
    wrap = _wrap.get()
    return kernel if wrap is None else _WithDefaults(kernel, wrap(kernel))


class _WithDefaults:
    """Launches with every argument of a kernel, those too that a call leaves at their defaults.

    torch reads from a kernel's code which tensors it writes only where all arguments are given.
    Otherwise it takes all of them for written, and Inductor copies caches onto themselves. It is
    for kernels without autotuning, whose configurations would set defaults a second time.
    """

    def __init__(self, kernel: Any, wrapped: Any) -> None:
        self._arguments = inspect.signature(kernel.fn).parameters.values()
        self._wrapped = wrapped

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            left = [x for x in list(self._arguments)[len(args) :] if x.name not in options]
            defaults = {x.name: x.default for x in left if x.default is not x.empty}
            return self._wrapped[grid](*args, **defaults, **options)

        return launch


def is_inlined() -> bool:
    """Whether launches of this thread become nodes of a graph."""
    return _wrap.get() is not None


@contextlib.contextmanager
def inlined(wrap: Wrap = torch.library.wrap_triton) -> Iterator[None]:
    """Let launches of this thread become nodes of the graph that is being traced.

    Args:
        wrap: makes of a kernel what tracing sees. Triton's interpreter has kernels of another
            kind, which torch would call at once.
    """
    token = _wrap.set(wrap)
    try:
        yield
    finally:
        _wrap.reset(token)


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
