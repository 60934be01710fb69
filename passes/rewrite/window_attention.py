"""Let the layers of a draft attend to the last rows of its cache, and to the first ones."""

from __future__ import annotations

from dataclasses import replace

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program
from specc.speculation.kv_window import KVWindow


class WindowAttention(Pass):
    """`tree_attention(…)` → `tree_attention(…, window=W, sink=S)` in every layer.

    The operator counts both in positions, in prefill and in levels of a tree alike, so all passes
    of a draft compute the same rows. A layer that has a window of its own keeps the smaller of the
    two, and gets no sink: it has never seen rows further back. Nor has a layer with chunks, of
    which the operator keeps its chunk's rows alone, those of the sink, too.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def __init__(self, rows: KVWindow) -> None:
        self._rows = rows

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for number, node in enumerate(program.calls(ops.tree_attention)):
            layer = program.layers[number]
            own = min((rows for rows in (layer.window, layer.chunk) if rows), default=0)
            if own and own <= self._rows.window:
                kind = "a window" if own == layer.window else "chunks"
                result.decline(node.name, f"it has {kind} of {own} rows")
                continue
            sink = 0 if layer.window else self._rows.sink
            node.kwargs = {**node.kwargs, "window": self._rows.window, "sink": sink}
            program.layers[number] = replace(layer, window=self._rows.window, sink=sink)
            result.rewrites += 1
        return result
