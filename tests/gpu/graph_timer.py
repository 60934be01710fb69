"""Times work as CUDA graphs; or, without a GPU, goes through everything and computes nothing."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# microseconds of a timing at least, and timings
LEAST_US, TIMINGS = 1200.0, 3


class Graphs:
    """Times work on a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self._stream = torch.cuda.Stream()
        # what the library allocates once for a stream is not part of a graph
        with torch.cuda.stream(self._stream):
            square = torch.zeros(64, 64, dtype=torch.bfloat16, device=self.device)
            torch.nn.functional.linear(square, square)
        torch.cuda.synchronize()

    def weights(self, size: int) -> Any:
        """Memory of so many bytes that weights are parts of."""
        pool = torch.empty(size // 2, dtype=torch.bfloat16, device=self.device)
        pool.normal_(0.0, 0.02)
        torch.cuda.synchronize()
        return pool

    def off(self, found: Any, wanted: Any) -> float:
        """Largest difference of results, relative to their size."""
        off = 0.0
        for own, other in zip(found, wanted, strict=True):
            size = torch.linalg.vector_norm(other.float())
            ratio = torch.linalg.vector_norm(own.float() - other.float()) / size
            off = max(off, float(ratio.nan_to_num(math.inf)))
        return off

    def same(self, results: Sequence[Tensor], wanted: Tensor) -> bool:
        """Whether all are the same, bit for bit."""
        return all(torch.equal(each, wanted) for each in results)

    def microseconds(self, run: Callable[[], object], most: float = math.inf) -> float:
        """Of work that has run once: a median of replays.

        Args:
            most: a first timing above it is the result.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                run()
            finally:
                graph.capture_end()
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            found, count = [], 1
            for _ in range(1 + TIMINGS):
                begin.record()
                for _ in range(count):
                    graph.replay()
                end.record()
                end.synchronize()
                found.append(1e3 * begin.elapsed_time(end) / count)
                if found[0] > most:
                    return found[0]
                count = max(1, math.ceil(LEAST_US / found[0]))
        # the first warms up, and says how many replays a timing needs
        return statistics.median(found[1:])

    def facts(self) -> dict[str, Any]:
        import triton

        name = torch.cuda.get_device_name()
        return {"device": name, "torch": torch.__version__, "triton": triton.__version__}

    def wait(self) -> None:
        torch.cuda.synchronize()


@contextlib.contextmanager
def launch_nothing() -> Iterator[None]:
    """Skip launches, compiled or interpreted: what they would write stays as it is."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # kernels in Gluon are never interpreted
    kinds: tuple[Any, ...] = (InterpretedFunction, JITFunction)
    runs = [kind.run for kind in kinds]
    for kind in kinds:
        kind.run = lambda kernel, *args, **options: None
    try:
        yield
    finally:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = run


class NoGraphs:
    """Goes through everything, and computes nothing."""

    def __init__(self) -> None:
        self.device = torch.device("meta")

    def weights(self, size: int) -> Any:
        return torch.empty(size // 2, dtype=torch.bfloat16, device=self.device)

    def off(self, found: Any, wanted: Any) -> float:
        for own, other in zip(found, wanted, strict=True):
            assert (own.shape, own.dtype) == (other.shape, other.dtype), (own.shape, other.shape)
        return 0.0

    def same(self, results: Sequence[Tensor], wanted: Tensor) -> bool:
        return all(each.shape == wanted.shape for each in results)

    def microseconds(self, run: Callable[[], object], most: float = math.inf) -> float:
        begin = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begin)

    def facts(self) -> dict[str, Any]:
        return {"device": "none"}

    def wait(self) -> None: ...
