"""CUDA graphs: capture into one memory pool, replay on one stream."""

from __future__ import annotations

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

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may allocate meanwhile
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free
