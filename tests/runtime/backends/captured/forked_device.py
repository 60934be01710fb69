"""A simulated device with a second stream, which runs as early or as late as its events allow.

Between these two lies whatever a GPU does: a copy that may come before the slot is free spoils what
is read from it in one of them, and an operator that may run before its copy reads poison in the
other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.captured.tape import Call, Place, Tape, poison


@dataclass
class Mark:
    """A point of the computing stream: the number of its calls before it."""

    tape: ForkedTape | None
    place: int


@dataclass(eq=False)
class Copy:
    """Work of the second stream, after a point of the first."""

    tape: ForkedTape | None
    after: Mark
    to: Place | None
    calls: list[Call] = field(default_factory=list)
    is_joined: bool = False


class ForkedTape(Tape):
    """Recorded operators of two streams."""

    def __init__(self, device: ForkedDevice) -> None:
        super().__init__()
        self._device = device
        self.copies: list[Copy] = []
        # (calls before it, number of copies that are waited for)
        self.waits: list[tuple[int, int]] = []
        self.current: Copy | None = None

    def record(self, function: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        super().record(function, args, kwargs, outputs)
        if self.current is not None:
            self.current.calls.append(self.calls.pop())

    @torch.inference_mode()
    def run(self, first: int, last: int, held: list[Tensor]) -> None:
        if first == 0:
            self.poison()
            self._done = 0
            for copy in self.copies:
                assert copy.to is not None
                poison(held[copy.to.number])
        for place in range(first, last + 1):
            needed = max((count for at, count in self.waits if at == place), default=0)
            if self._device.is_early:
                ready = [copy.after.place <= place for copy in self.copies]
                needed = max(needed, ready.index(False) if False in ready else len(ready))
            while self._done < needed:
                copy = self.copies[self._done]
                assert copy.after.place <= place, "two streams that wait for each other"
                for call in copy.calls:
                    self.perform(call, held)
                self._done += 1
            if place < last:
                self.perform(self.calls[place], held)


class ForkedDevice(SimulatedDevice):
    """See the module.

    Args:
        is_early: copies run as soon as they may, not only when somebody waits for them.
    """

    def __init__(self, is_early: bool) -> None:
        super().__init__()
        self.is_early = is_early

    def make_tape(self) -> ForkedTape:
        return ForkedTape(self)

    def capture(self, run: Callable[[], object]) -> Tape:
        tape = super().capture(run)
        assert isinstance(tape, ForkedTape)
        # as CUDA, which ends such a capture with an error
        assert all(copy.is_joined for copy in tape.copies), "a copy that nothing waits for"
        return tape

    def copy_stream(self) -> ForkedCopies:
        return ForkedCopies(self)


class ForkedCopies:
    """`CopyStream`; outside of a capture its copies are done at once."""

    def __init__(self, device: ForkedDevice) -> None:
        self._device = device

    def _tape(self) -> ForkedTape | None:
        tape = self._device.tape
        assert tape is None or isinstance(tape, ForkedTape)
        return tape

    def point(self) -> Mark:
        tape = self._tape()
        return Mark(tape, len(tape.calls) if tape is not None else 0)

    def copy(self, to: Tensor, source: Tensor, after: Mark) -> Copy:
        tape = self._tape()
        assert after.tape is tape, "an event of another capture: cudaErrorStreamCaptureIsolation"
        copy = Copy(tape, after, tape.place_of(to, "a copy") if tape is not None else None)
        if tape is not None:
            tape.copies.append(copy)
            tape.current = copy
        try:
            to.copy_(source)
        finally:
            if tape is not None:
                tape.current = None
        return copy

    def wait(self, point: Copy) -> None:
        tape = self._tape()
        assert point.tape is tape, "an event of another capture: cudaErrorStreamCaptureIsolation"
        point.is_joined = True
        if tape is not None:
            tape.waits.append((len(tape.calls), tape.copies.index(point) + 1))
