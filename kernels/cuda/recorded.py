"""Launches noted instead of run: what a GPU would be given, found out without one.

Operators on tensors without data decide grids, splits and tiles from shapes as they always do;
only the launch itself is replaced. Whatever else a thread launches meanwhile is noted, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.runtime.jit import KernelInterface

from specc.kernels.cuda import attend, few_rows


@dataclass(frozen=True)
class Machine:
    """What launches depend on besides shapes: 10 · major + minor, and multiprocessors."""

    capability: int
    num_sms: int


# of the data sheet
H200 = Machine(90, 132)


# name of a kernel, and its tensors by the names of its arguments
Note = Callable[[str, Mapping[str, Tensor]], object]


@contextlib.contextmanager
def recorded(note: Note, machine: Machine = H200, tile: int | None = 0) -> Iterator[None]:
    """Note launches of this process instead of running them.

    Args:
        note: called at each launch.
        machine: that operators believe to launch on.
        tile: number of the tile that products of few rows take; None is the library's product.
    """

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        del grid

        def noted(*args: Any, **options: Any) -> None:
            given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
            tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            note(kernel.__name__, tensors)

        return noted

    def known(device: object) -> tuple[int, int]:
        del device
        return machine.capability, machine.num_sms

    with (
        few_rows.forced(tile),
        _replaced(KernelInterface, "__getitem__", launch),
        _replaced(attend, "machine", known),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
