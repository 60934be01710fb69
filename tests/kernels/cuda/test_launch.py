"""Launches that become nodes of a graph say all that a kernel takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specc.kernels.cuda.launch import inlined, launcher


def kernel(x: Any, size: int, slopes: Any = None, CHUNK: int = 0) -> None:
    """As a jitted function has it."""


JITTED = SimpleNamespace(fn=kernel)


class Wrapped:
    """What `wrap_triton` makes of a kernel, as far as launching goes."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((grid, args, options))


def test_arguments_at_their_defaults_are_given() -> None:
    made: list[Wrapped] = []

    def wrap(kernel: Any) -> Wrapped:
        made.append(Wrapped(kernel))
        return made[-1]

    with inlined(wrap):
        launch = launcher(JITTED)
        launch[(4,)](1, 2, CHUNK=8, num_warps=4)
        launch[(4, 2)](1, size=2)
        launch[(1,)](1, 2, 3, 4)
    (wrapped,) = made
    assert wrapped.kernel is JITTED
    assert wrapped.launches == [
        ((4,), (1, 2), {"slopes": None, "CHUNK": 8, "num_warps": 4}),
        ((4, 2), (1,), {"size": 2, "slopes": None, "CHUNK": 0}),
        ((1,), (1, 2, 3, 4), {}),
    ]


def test_a_kernel_is_launched_at_once_otherwise() -> None:
    assert launcher(JITTED) is JITTED
