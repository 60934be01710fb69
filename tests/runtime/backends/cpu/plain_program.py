"""Any graph as a program of the library: without caches or flat tokens."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from specc.runtime.backends.cpu.native_calls import Pool, checked, describe, functions, made
from specc.runtime.backends.cpu.program import encode_graph, run_program


class PlainProgram:
    """Runs a graph of placeholders and one tensor as output.

    Args:
        pool: memory; None: its own.
        bound: name of a placeholder → what it always is.
    """

    def __init__(
        self, graph: fx.Graph, pool: Pool | None = None, bound: Mapping[str, Tensor] | None = None
    ) -> None:
        self.pool = Pool() if pool is None else pool
        self._library = library = functions()
        names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
        self._bound = dict(bound or {})
        given = [slot for slot, name in enumerate(names) if name not in self._bound]
        self.encoder, result = encode_graph(graph)
        slots = (ctypes.c_int64 * len(given))(*given)
        self.pointer = made(library.specc_program_new(self.encoder.code, slots, len(given), result))
        weakref.finalize(self, library.specc_program_free, self.pointer)
        for name, value in self._bound.items():
            slot, found = names.index(name), describe(value)
            checked(library.specc_program_bind(self.pointer, slot, ctypes.byref(found)))
        self._narrow_rows = 64
        self.set_num_threads(torch.get_num_threads())

    def __call__(self, *inputs: Tensor) -> Tensor:
        return run_program(self.pointer, self.pool, inputs)

    @property
    def num_threads(self) -> int:
        return int(self._library.specc_program_threads(self.pointer))

    def set_num_threads(self, count: int) -> None:
        checked(self._library.specc_program_limits(self.pointer, count, self._narrow_rows, 0))

    def set_narrow_rows(self, count: int) -> None:
        checked(self._library.specc_program_limits(self.pointer, self.num_threads, count, 0))
        self._narrow_rows = count


def expected(graph: fx.Graph, inputs: Sequence[Tensor]) -> Tensor:
    """What torch makes of it, of copies of the inputs."""
    with torch.inference_mode():
        return fx.GraphModule({}, graph)(*(x.clone() for x in inputs))
