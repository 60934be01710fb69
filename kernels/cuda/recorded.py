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

from specc.kernels.cuda import attend, dependent, few_rows
from specc.kernels.cuda.launch import dependent_launches


@dataclass(frozen=True)
class Machine:
    """What launches depend on besides shapes: 10 · major + minor, and multiprocessors."""

    capability: int
    num_sms: int


# of the data sheet
H200 = Machine(90, 132)


# name of a kernel, its tensors by the names of its arguments, and whether it may start early
Note = Callable[[str, Mapping[str, Tensor], bool], object]


@contextlib.contextmanager
def recorded(note: Note, machine: Machine = H200, tile: int | None = 0) -> Iterator[None]:
    """Note launches of this process instead of running them; those that can are dependent.

    Args:
        machine: that operators believe to launch on.
        tile: number of the tile that products of few rows take; None is the library's product.
    """

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        del grid

        def noted(*args: Any, **options: Any) -> None:
            given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
            tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            note(kernel.__name__, tensors, bool(given.get("launch_pdl")))

        return noted

    def known(device: object) -> tuple[int, int]:
        del device
        return machine.capability, machine.num_sms

    with (
        few_rows.forced(tile),
        dependent_launches(),
        _replaced(dependent, "INTERPRETED", False),
        _replaced(KernelInterface, "__getitem__", launch),
        _replaced(attend, "machine", known),
        _replaced(few_rows, "machine", known),
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
