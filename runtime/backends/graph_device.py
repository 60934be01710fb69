"""What capturing a step needs of a device; CUDA's is in `runtime/backends/cuda/graphs.py`.

Tests have one that records operators on the CPU and replays them at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """Captured work; `replay` repeats it on the tensors that it was captured with."""

    def replay(self) -> None: ...


class Event(Protocol):
    """A point in the device's work; `synchronize` waits until it is reached."""

    def synchronize(self) -> None: ...


class ReplayedEvent(Event, Protocol):
    """An event of a captured graph: `synchronize` waits for that point of the last replay."""

    def record(self) -> None:
        """Mark this point, of a capture or of what is queued now."""
        ...


class Point(Protocol):
    """A point in the work of one stream, which other streams can wait for."""


class CopyStream(Protocol):
    """A second stream, which copies while the stream of this thread computes.

    Inside of a capture both are captured: a copy has to wait for a point of the same capture, and
    the capturing stream for the copy, before it ends.
    """

    def point(self) -> Point:
        """The point after all that was queued on the stream of this thread."""
        ...

    def copy(self, to: Tensor, source: Tensor, after: Point) -> Point:
        """Copy on the second stream, after that point and the copies before; returns its end.

        Args:
            source: of `GraphDevice.host_buffer`.
        """
        ...

    def wait(self, point: Point) -> None:
        """What is queued from now on, on the stream of this thread, runs after that point."""
        ...


class SideStream(Protocol):
    """A second stream, whose operators run beside those of the stream of this thread.

    Inside of a capture they are a branch of the graph, which has to be joined before it ends.
    """

    def forked(self) -> AbstractContextManager[object]:
        """What is queued within runs after all that was queued before, and beside what follows."""
        ...

    def join(self) -> None:
        """What is queued from now on runs after all that was queued within `forked`."""
        ...


class GraphDevice(Protocol):
    """A device that runs work in order and can capture it."""

    device: torch.device

    def active(self) -> AbstractContextManager[object]:
        """Make this the device that kernels of this thread launch on, for a while.

        Operators follow the device of their tensors; a Triton kernel launches on the current one.
        """
        ...

    def capture(self, run: Callable[[], object]) -> Graph:
        """Capture `run`, which has run before: nothing in it may compile, allocate anew or wait.

        A graph reads what `run` read at the addresses where it lay, and keeps none of it: whatever
        holds the graph has to hold these tensors, too. What it makes holds anything at all until it
        is replayed. A device may run `run` once more before, so what that reads of other graphs
        has to be replayed by then.

        Raises:
            RuntimeError: an operator cannot be captured.
        """
        ...

    def stream_handle(self) -> int:
        """The stream that work of this thread is queued on now, as other libraries take it."""
        ...

    def record_event(self) -> Event:
        """An event after everything that has been queued."""
        ...

    def replayed_event(self) -> ReplayedEvent:
        """An event that can be recorded inside of a capture."""
        ...

    def copy_stream(self) -> CopyStream:
        """Another second stream."""
        ...

    def side_stream(self) -> SideStream:
        """Another stream for operators."""
        ...

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies from and to the device need not stage: pinned."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that can still be had."""
        ...
