"""Any graph as a program of the library: without weights, caches or flat tokens."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from specc.artifact.graph_io import graph_to_json
from specc.runtime.backends.cpu.native_calls import Pool, functions, made
from specc.runtime.backends.cpu.program import encode, run_program


class PlainProgram:
    """Runs a graph of placeholders and one tensor as output.

    Args:
        graph: what `graph_to_json` takes.
        pool: memory; None: its own.
    """

    def __init__(self, graph: fx.Graph, pool: Pool | None = None) -> None:
        self.pool = Pool() if pool is None else pool
        inputs = graph.find_nodes(op="placeholder")
        program = {"name": "plain", "graph": graph_to_json(graph), "inputs": inputs}
        self.encoder, result = encode(program)
        slots = (ctypes.c_int64 * len(inputs))(*range(len(inputs)))
        library = functions()
        self.pointer = made(
            library.specc_program_new(self.encoder.code, slots, len(inputs), result)
        )
        weakref.finalize(self, library.specc_program_free, self.pointer)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return run_program(self.pointer, self.pool, inputs)


def expected(graph: fx.Graph, inputs: Sequence[Tensor]) -> Tensor:
    """What torch makes of it, of copies of the inputs."""
    with torch.inference_mode():
        return fx.GraphModule({}, graph)(*(x.clone() for x in inputs))
