"""Launches noted instead of run: what a GPU would be given, found out without one.

Operators on tensors without data decide grids, splits and tiles from shapes as they always do;
only the launch itself is replaced. Whatever else a thread launches meanwhile is noted, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import KernelInterface

from specc.kernels.cuda import attend


@dataclass(frozen=True)
class Machine:
    """What launches depend on besides shapes: 10 · major + minor, and multiprocessors."""

    capability: int
    num_sms: int


# of the data sheet
H200 = Machine(90, 132)


@contextlib.contextmanager
def recorded(machine: Machine = H200) -> Iterator[list[str]]:
    """Note launches of this process instead of running them.

    Args:
        machine: that operators believe to launch on.
    Yields:
        names of the launched kernels, in order, as they come.
    """
    names: list[str] = []

    def note(kernel: Any, grid: Any) -> Callable[..., None]:
        del grid
        return lambda *args, **options: names.append(kernel.__name__)

    def known(device: object) -> tuple[int, int]:
        del device
        return machine.capability, machine.num_sms

    with _replaced(KernelInterface, "__getitem__", note), _replaced(attend, "machine", known):
        yield names


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
