"""The GPU of this process: CUDA graphs in one memory pool, replayed on one stream."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specc.errors import ConfigError, EngineError
from specc.runtime.backends.graph_device import CopyStream, SideStream
from specc.system.extras import install_command


class CudaGraphs:
    """`GraphDevice` of a CUDA GPU.

    All graphs share one pool: they replay one after the other, so what one holds between its
    operators another may overwrite. Results that outlive a replay are copied out after it.

    Graphs live as long as this object, whatever else lets go of them. Once the last graph of a pool
    is gone, torch 2.13 captures no other into it: its allocator of pinned memory never forgets the
    pool, and asks for one that is in use. And a graph that goes frees cuBLAS's workspace of the
    stream that it was captured on, which the other graphs of that stream go on writing to (pytorch
    issue 193402). So graphs that were only timed cost what their nodes take, and no more: what they
    allocate others allocate again.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        # None: a graph gets one of its own
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def active(self) -> torch.cuda.device:
        return torch.cuda.device(self.device)

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        # on the stream of the capture: compiled programs are loaded for each stream
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            _refuse_host_reads(run)
        torch.cuda.synchronize(self.device)
        # garbage that is found within a capture may give memory back to the device, which ends it;
        # where no collection runs by itself nothing is found, and many captures in a row are quick
        if gc.isenabled():
            gc.collect()
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # not torch.cuda.graph: where a capture fails, that leaves its stream current and its error
        # in place of the operator's
        with torch.cuda.stream(self._stream):
            try:
                # thread_local: other threads of the process may allocate meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                run()
            except BaseException as error:
                self._abandon(graph, error)
                raise
            graph.capture_end()
        self._graphs.append(graph)
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, error: BaseException) -> None:
        """End a capture that failed; its pool may be in any state: the next graphs get another.

        Nothing that fails here takes the place of `error`: it becomes a note of it.
        """
        pool, self._pool = self._pool, None
        # torch 2.11 forgets the second where ending the capture is an error
        for what, undo in (
            ("ending the capture", graph.capture_end),
            ("leaving its pool", lambda: _leave_pool(self.device, pool)),
            ("making another pool", self._make_pool),
        ):
            try:
                undo()
            except RuntimeError:
                # how torch says that a capture is invalid, or has left its pool already
                continue
            except Exception as second:
                error.add_note(f"{what} failed, too: {type(second).__name__}: {second}")

    def _make_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def stream_handle(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def replayed_event(self) -> torch.cuda.Event:
        # external: in a capture it becomes a node that records it at every replay
        return torch.cuda.Event(external=True)

    def copy_stream(self) -> CopyStream:
        return CudaCopies(self.device)

    def side_stream(self) -> SideStream:
        return CudaSide(self.device)

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        # torch keeps what was freed, and takes it from no other process
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


class CudaCopies:
    """`CopyStream` of a CUDA GPU.

    Its stream joins a capture by waiting for an event that was recorded inside of it; an event of
    before the capture would end it with an error (cudaErrorStreamCaptureIsolation).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def point(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, to: Tensor, source: Tensor, after: Any) -> torch.cuda.Event:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, point: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(point)


class CudaSide:
    """`SideStream` of a CUDA GPU.

    No `record_stream`: torch gives memory that was taken on one stream to that stream alone again.
    What is taken within `forked` is used by the stream of the thread after a `join`, and the side
    stream goes on only at the next fork, after all of that; nothing is taken before a fork, used
    within, and let go of between that and the join.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def choose_gpu(local_rank: int, num_local: int) -> None:
    """Make the GPU of a rank the one of this thread: each rank of a machine has its own.

    Args:
        local_rank: of this process, among the ranks of this machine.
        num_local: ranks of the engine on this machine.
    Raises:
        ConfigError: more ranks than GPUs; nothing has been allocated by then.
    """
    count = torch.cuda.device_count()
    # without any, loading the engine says what to do
    if 0 < count < num_local:
        raise ConfigError(
            f"{num_local} ranks on this machine, and {count} GPU{'s' if count > 1 else ''}",
            "a GPU for each rank",
            "compile for fewer ranks (--tensor-parallel-size), or start the ranks on several"
            " machines with torchrun",
        )
    if count:
        torch.cuda.set_device(local_rank)


def cuda_device() -> CudaGraphs:
    """The GPU of this process, with the Triton kernels registered.

    Raises:
        EngineError: torch sees no GPU, or there is no Triton.
    """
    if not torch.cuda.is_available():
        raise EngineError(
            "an engine for CUDA, and no GPU that torch can use",
            "an NVIDIA GPU and a CUDA build of torch",
            "run it where there is one (specc doctor tells what this machine has), or run its"
            " graphs with --backend eager",
        )
    try:
        from specc.kernels.cuda.register import register
    except ImportError as error:
        raise EngineError(
            f"no Triton: {error}", "triton, which runs the kernels", install_command("cuda")
        ) from error
    register("CUDA")
    return CudaGraphs(torch.cuda.current_device())


def _leave_pool(device: torch.device, pool: Any) -> None:
    torch._C._cuda_endAllocateToPool(device.index, pool)


def _refuse_host_reads(run: Callable[[], object]) -> None:
    """Run once, and let every operator fail that waits for the device.

    Inside a capture such an operator would invalidate it, and not every torch recovers from that.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
