"""Let every layer see fewer rows: a window, and a sink where it had no window of its own."""

from __future__ import annotations

import dataclasses

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program


class NarrowWindows(Pass):
    """Attention over all rows → over the last `window` and the first `sink`.

    A layer with a sliding window keeps it where that is the smaller one, and gets no sink: it has
    never seen the first rows from far away. Positions stay true, and so do the rows that are
    written: the block table of such a program is that of the whole sequence.

    Args:
        window: rows before a token that it sees, itself included.
        sink: first rows of a sequence.
        max_seq_len: tokens of the longest sequence; a window of as many is none.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def __init__(self, window: int, sink: int, max_seq_len: int) -> None:
        self._window, self._sink, self._max_seq_len = window, sink, max_seq_len

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for place, call in enumerate(program.calls(ops.tree_attention)):
            layer = program.layers[place]
            slides = 0 < layer.window < self._max_seq_len
            window = min(layer.window, self._window) if slides else self._window
            call.kwargs = {**call.kwargs, "window": window, "sink": 0 if slides else self._sink}
            program.layers[place] = dataclasses.replace(layer, window=window)
            result.rewrites += 1
        return result
