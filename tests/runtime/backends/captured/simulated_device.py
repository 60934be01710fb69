"""A device without a GPU that captures and replays as CUDA graphs do, and is stricter than they.

Capture records every operator with the tensors that it read and wrote. A replay runs the recorded
operators again on the same tensors, after it has poisoned all that the recording allocated: Python
between the operators does not run, inputs are read where they lay at capture, and a value that no
operator wrote before it is read shows.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specc.runtime.backends.captured.graph_device import SideStream

aten = torch.ops.aten
# read values on the host, or make shapes of them
_FORBIDDEN = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose,
    aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2, aten.bincount,
    aten.unique_consecutive, aten.repeat_interleave, aten.argwhere,
}  # fmt: skip

# say that they are views, and copy where they have to
_COPYING_VIEWS = {aten.to, aten.contiguous, aten.reshape, aten.flatten}

# write into tensors that they are given, whatever these hold, and read nothing on the host
_MOVES = {aten.index_copy_.default, aten.index_select.out}


class Tape:
    """Recorded operators."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        # number of the calls before a mark, and its event
        self.marks: list[tuple[int, Any]] = []
        self._made: list[Tensor] = []

    def record(self, function: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        self.calls.append((function, args, kwargs, outputs))
        given = _storages(tree_leaves((args, kwargs)))
        self._made += [out for out in outputs if _storage(out) not in given]

    @property
    def operators(self) -> list[str]:
        return [str(function) for function, *_ in self.calls]

    def replay(self) -> None:
        self.run(0, len(self.calls))
        for _, event in self.marks:
            event.record()

    @torch.inference_mode()
    def run(self, first: int, last: int) -> None:
        """Some of the calls; the first ones after all that the recording allocated is poisoned."""
        if first == 0:
            self.poison()
        for call in self.calls[first:last]:
            self.perform(*call)

    @torch.inference_mode()
    def poison(self) -> None:
        """All that the recording allocated."""
        for tensor in self._made:
            _poison(tensor)

    def perform(self, function: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        """One call, on the tensors of its recording."""
        found = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
        for old, new in zip(outputs, found, strict=True):
            assert old.shape == new.shape, f"{function}: a shape that follows from data"
            if _storage(old) != _storage(new):
                old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled under it; torch would import its compiler, 2 s of each process
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _FORBIDDEN:
            raise RuntimeError(f"{func} reads device data on the host")
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise RuntimeError(f"{func} with a mask: a shape that follows from data")
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._tape.record(func, args, kwargs, outputs)
        return result


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
        # each part of a step once more before its capture, as CUDA does it
        self.runs_first = False
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
            with _Recorder(tape):
                run()
        finally:
            self.tape = None
        tape.poison()
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
        _poison(buffer)
        return buffer

    def free_bytes(self) -> int:
        captured = [outs for tape in self.tapes for *_, outs in tape.calls]
        return self.memory_bytes - sum(out.nbytes for outs in captured for out in outs)


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
        self._host[_storage(buffer)] = buffer
        return buffer

    def is_of_host(self, values: Any) -> bool:
        """Staging memory is among these tensors, or there are none."""
        storages = _storages(tree_leaves(values))
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
        first = 0
        for last, event in (*self.marks, (len(self.calls), None)):
            self._device.add(partial(self._work, first, last))
            if event is not None:
                event.point = self._device.record_event()
            first = last

    def _work(self, first: int, last: int) -> None:
        if first == 0:
            self._device.before_replay(self)
        self.run(first, last)


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


def _poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(values: list[Any]) -> set[int]:
    return {_storage(value) for value in values if isinstance(value, Tensor)}
