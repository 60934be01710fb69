"""CUDA graphs: capture into one memory pool, replay on one stream."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraphs:
    """`GraphDevice` of a CUDA GPU.

    All graphs share one pool: they replay one after the other, so what one holds between its
    operators another may overwrite. Results that outlive a replay are copied out behind it.

    Args:
        index: of the GPU.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)

    def active(self) -> torch.cuda.device:
        return torch.cuda.device(self.device)

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        # on the stream of the capture: compiled programs are loaded for each stream
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            _refuse_host_reads(run)
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # not torch.cuda.graph: where a capture fails, that leaves its stream current and its error
        # in place of the operator's
        with torch.cuda.stream(self._stream):
            # thread_local: other threads of the process may allocate meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed; its pool may be in any state: the next graphs get another."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        # torch 2.11 forgets this where ending the capture is an error
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def stream_handle(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        # torch keeps what was freed, and takes it from no other process
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


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
