"""A device without a GPU that captures and replays as CUDA graphs do, and is stricter than they.

A capture records every operator with the memory that it read and wrote, and leaves all of that as
if nothing had run: what was written in place is as before, and what was made is poisoned. A replay
runs the recorded operators again at the same places, after it has poisoned all that the recording
allocated: Python between the operators does not run, inputs are read where they lay at capture, and
a value that no operator wrote before it is read shows. A tape keeps alive only what it allocated
itself: a replay after anything else is gone fails.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specc.runtime.backends.captured import backend as captured_backend
from specc.runtime.backends.graph_device import SideStream
from tests.runtime.backends.captured.tape import Recorder, Tape, poison, storage_of, storages_of

aten = torch.ops.aten
# say that they are views, and copy where they have to
_COPYING_VIEWS = {aten.to, aten.contiguous, aten.reshape, aten.flatten}

# write into tensors that they are given, whatever these hold, and read nothing on the host
_MOVES = {aten.index_copy_.default, aten.index_select.out}


class SimulatedDevice:
    """A `GraphDevice` on the CPU.

    `tapes` holds what it captured, `num_waits` counts waits, `memory_bytes` is what it has, and
    `is_active` says whether launches would go to it.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.tapes: list[Tape] = []
        self.num_waits = 0
        self.memory_bytes = 1 << 40
        self.is_active = False
        # what is captured once more before, as CUDA does it
        self.runs_first = True
        # of the capture that is under way
        self.tape: Tape | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        before, self.is_active = self.is_active, True
        try:
            yield
        finally:
            self.is_active = before

    def capture(self, run: Callable[[], object]) -> Tape:
        if self.runs_first:
            run()
        tape = self.tape = self.make_tape()
        try:
            with Recorder(tape):
                run()
        finally:
            self.tape = None
            with _disable_current_modes():
                tape.end()
        self.tapes.append(tape)
        return tape

    def make_tape(self) -> Tape:
        return Tape()

    def stream_handle(self) -> int:
        return 0

    def record_event(self) -> SimulatedDevice:
        return self

    def copy_stream(self) -> SimulatedCopies:
        return SimulatedCopies()

    def side_stream(self) -> SideStream:
        return SimulatedSide()

    def synchronize(self) -> None:
        self.num_waits += 1

    def replayed_event(self) -> ReplayedEvent:
        return ReplayedEvent(self)

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(*shape, dtype=dtype)
        poison(buffer)
        return buffer

    def free_bytes(self) -> int:
        return self.memory_bytes - sum(tape.num_bytes for tape in self.tapes)


def stand_in(patch: pytest.MonkeyPatch) -> SimulatedDevice:
    """A simulated device in the place of this machine's GPU, until the patch is undone."""
    simulated = SimulatedDevice()
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(captured_backend, "cuda_device", lambda: simulated)
    return simulated


class SimulatedCopies:
    """A second stream that is never ahead nor late; see `forked_device.py` for one that is both."""

    def point(self) -> object:
        return self

    def copy(self, to: Tensor, source: Tensor, after: object) -> object:
        to.copy_(source)
        return self

    def wait(self, point: object) -> None: ...


class SimulatedSide:
    """A second stream for operators that is never ahead nor late; `branched_device.py` has others.

    What it is given runs where it is given.
    """

    def forked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def join(self) -> None: ...


class ReplayedEvent:
    """An event that a capture records, and each replay of it again; waiting before that fails."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        # what was queued before the last record
        self.point: Any = None

    def record(self) -> None:
        if self._device.tape is not None:
            self._device.tape.marks.append((len(self._device.tape.calls), self))
        else:
            self.point = self._device.record_event()

    def synchronize(self) -> None:
        assert self.point is not None, "an event that nobody has recorded"
        self.point.synchronize()


class LateDevice(SimulatedDevice):
    """Runs what is queued as late as a device may: when somebody waits for it, or needs it.

    Replays, copies that need not be staged and operators that move rows between given tensors are
    queued in their order; every other operator on memory of the device waits for all of them.
    Staging buffers are read and written at once: one that is filled again too early spoils the copy
    from it.

    `before_replay` is called with the tape whenever the device comes to a replay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_replay: Callable[[Tape], object] = lambda tape: None
        self._queue: deque[Callable[[], object]] = deque()
        self._num_queued = self._num_done = 0
        # with the buffers: memory that is let go of would be another tensor's next
        self._host: dict[int, Tensor] = {}

    @property
    def num_waiting(self) -> int:
        """Replays and copies that nobody has waited for yet."""
        return len(self._queue)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with super().active(), _Late(self):
            yield

    def capture(self, run: Callable[[], object]) -> Tape:
        self.run_until(self._num_queued)
        return super().capture(run)

    def make_tape(self) -> Tape:
        return _LateTape(self)

    def record_event(self) -> _LateEvent:
        return _LateEvent(self, self._num_queued)

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        buffer = super().host_buffer(*shape, dtype=dtype)
        self._host[storage_of(buffer)] = buffer
        return buffer

    def is_of_host(self, values: Any) -> bool:
        """Staging memory is among these tensors, or there are none."""
        storages = storages_of(tree_leaves(values))
        return not storages or bool(storages & self._host.keys())

    def add(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self._num_queued += 1

    def run_until(self, count: int) -> None:
        """Do the first `count` pieces of work that were ever queued."""
        while self._num_done < count:
            self._num_done += 1
            work = self._queue.popleft()
            # copies go to memory of either kind
            with _disable_current_modes(), torch.inference_mode():
                work()

    def run_all(self) -> None:
        self.run_until(self._num_queued)


class _LateTape(Tape):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def replay(self) -> None:
        # as a stream: what is let go of later is used by others later
        held = self.hold()
        first = 0
        for last, event in (*self.marks, (len(self.calls), None)):
            self._device.add(partial(self._work, first, last, held))
            if event is not None:
                event.point = self._device.record_event()
            first = last

    def _work(self, first: int, last: int, held: list[Tensor]) -> None:
        if first == 0:
            self._device.before_replay(self)
        self.run(first, last, held)


class _LateEvent:
    def __init__(self, device: LateDevice, count: int) -> None:
        self._device = device
        self._count = count

    def synchronize(self) -> None:
        self._device.num_waits += 1
        self._device.run_until(self._count)


class _Late(TorchDispatchMode):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and (kwargs.get("non_blocking") or len(args) > 2):
            self._device.add(lambda: args[0].copy_(args[1]))
            return args[0]
        if func in _MOVES:
            self._device.add(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        is_view = func.is_view and func.overloadpacket not in _COPYING_VIEWS
        if not (is_view or self._device.is_of_host((args, kwargs))):
            self._device.run_all()
        return func(*args, **kwargs)
