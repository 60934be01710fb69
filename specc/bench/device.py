"""Devices of a benchmark with random weights: clocks, bandwidth, and replays that are timed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specc.artifact.directory import available_memory_bytes
from specc.runtime.backends.cuda.graphs import cuda_device
from specc.runtime.backends.graph_device import Graph, GraphDevice

# a copy on a GPU moves twice this; the CPU's buffers need only be larger than its caches
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
_REPEATS, _WARM_UP = 10, 2


class Clock(Protocol):
    """Marks points in a device's work, and measures between them once it is done."""

    def mark(self) -> Any: ...

    def wait(self) -> None:
        """Until the device has done all that is queued."""
        ...

    def ms(self, begin: Any, end: Any) -> float: ...


class HostClock:
    """Of devices that work while the host waits: the CPU, and what simulates a GPU there."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def ms(self, begin: float, end: float) -> float:
        return 1000 * (end - begin)


class CudaClock:
    """Events of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


class RepeatingDevice:
    """A `GraphDevice` of the CPU: a graph is the function itself, run again."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def active(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def capture(self, run: Callable[[], object]) -> Graph:
        return _Repeat(run)

    def stream_handle(self) -> int:
        return 0

    def record_event(self) -> RepeatingDevice:
        return self

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def replayed_event(self) -> RepeatingDevice:
        return self

    def copy_stream(self) -> RepeatingDevice:
        return self

    def point(self) -> RepeatingDevice:
        return self

    def copy(self, to: Tensor, source: Tensor, after: object) -> RepeatingDevice:
        to.copy_(source)
        return self

    def wait(self, point: object) -> None:
        pass

    def side_stream(self) -> RepeatingDevice:
        return self

    def forked(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def join(self) -> None:
        pass

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def free_bytes(self) -> int:
        return available_memory_bytes() or 1 << 62


class _Repeat(NamedTuple):
    run: Callable[[], object]

    def replay(self) -> None:
        self.run()


def open_device() -> tuple[GraphDevice, str]:
    """The GPU where there is one, else the CPU; and the backend that runs there.

    Raises:
        EngineError: a GPU without Triton.
    """
    if torch.cuda.is_available():
        return cuda_device(), "cuda"
    return RepeatingDevice(), "eager"


class Replay(NamedTuple):
    """One replay: marks of the device's clock around it."""

    begin: Any
    end: Any


class KernelTime(NamedTuple):
    """Launches of a kernel, and microseconds of all of them."""

    launches: int
    us: float


class Kernels(NamedTuple):
    """Launches of some work; on a GPU, also those of each kernel, by name."""

    launches: int
    times: dict[str, KernelTime]


class TimedGraphs:
    """A `GraphDevice` whose replays can be timed and counted."""

    def __init__(self, graphs: GraphDevice) -> None:
        self.device = graphs.device
        self.clock = make_clock(graphs.device)
        self._graphs = graphs
        self._replays: list[Replay] | None = None
        self._counter: OperatorCounter | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphs, name)

    def capture(self, run: Callable[[], object]) -> Graph:
        return _TimedGraph(self, self._graphs.capture(run), run)

    def record(self, work: Callable[[], object]) -> list[Replay]:
        """Do some work and return the replays in it, in order; the device is done then."""
        self._replays = []
        try:
            self.clock.wait()
            work()
            self.clock.wait()
            return self._replays
        finally:
            self._replays = None

    def count_kernels(self, work: Callable[[], object]) -> Kernels:
        """Kernels that some work launches: by the profiler of a GPU, else operators that write."""
        if self.device.type == "cuda":
            return _profile_kernels(work, self.clock)
        self._counter = OperatorCounter()
        try:
            work()
            return Kernels(self._counter.count, {})
        finally:
            self._counter = None

    def replay(self, graph: Graph, run: Callable[[], object]) -> None:
        """Replay a graph; while operators are counted, run what it was captured from."""
        if self._counter is not None:
            with self._counter:
                run()
        elif self._replays is None:
            graph.replay()
        else:
            begin = self.clock.mark()
            graph.replay()
            self._replays.append(Replay(begin, self.clock.mark()))


class _TimedGraph(NamedTuple):
    owner: TimedGraphs
    graph: Graph
    run: Callable[[], object]

    def replay(self) -> None:
        self.owner.replay(self.graph, self.run)


class OperatorCounter(TorchDispatchMode):
    """Counts operators that write: each is at least one kernel. Views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_storage(x) for x in _tensors((args, kwargs))}
        is_new = any(x.numel() and _storage(x) not in given for x in _tensors(result))
        self.count += is_new or func._schema.is_mutable
        return result


def kernels_among(events: Iterable[tuple[str, bool, float]]) -> Kernels:
    """Kernels among what a profiler saw: (name, whether it ran on the device, microseconds).

    Copies are none.
    """
    found: dict[str, KernelTime] = {}
    for name, on_device, us in events:
        if on_device and not name.startswith(("Memcpy", "Memset")):
            before = found.get(name, KernelTime(0, 0.0))
            found[name] = KernelTime(before.launches + 1, before.us + us)
    return Kernels(sum(item.launches for item in found.values()), found)


def measure_copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> dict[str, Any]:
    """Copy a buffer on the device; what is read and what is written both count.

    Returns:
        `gb_s` (10⁹ bytes a second), `method`, `buffer_bytes`, `threads` (of the host).
    """
    size = num_bytes or COPY_BYTES[device.type]
    clock = make_clock(device)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    rates = []
    for number in range(_REPEATS + _WARM_UP):
        begin = clock.mark()
        target.copy_(source)
        end = clock.mark()
        clock.wait()
        if number >= _WARM_UP:
            rates.append(2 * source.nbytes / 1e6 / clock.ms(begin, end))
    return {
        "gb_s": statistics.median(rates),
        "method": "copy on the device" if device.type == "cuda" else "copy",
        "threads": torch.get_num_threads(),
        "buffer_bytes": source.nbytes,
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """What a reader has to know of a device, for JSON."""
    if device.type != "cuda":
        return {"type": device.type, "name": None, "memory_bytes": None, "capability": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": [properties.major, properties.minor],
    }


def _profile_kernels(work: Callable[[], object], clock: Clock) -> Kernels:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    clock.wait()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        clock.wait()
    on_device = torch.autograd.DeviceType.CUDA
    return kernels_among(
        (event.name, event.device_type == on_device, event.time_range.elapsed_us())
        for event in profile.events()
    )


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata
