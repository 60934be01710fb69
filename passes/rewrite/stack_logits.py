"""Give logits of several heads, which lie side by side, a row each."""

from __future__ import annotations

import torch

from specc.passes.base import Pass, PassResult
from specc.passes.facts import logits_are_selected
from specc.passes.program import Program, emit_call

aten = torch.ops.aten


class StackLogits(Pass):
    """[R, D · V] → [R · D, V]: the rows of a token follow each other, the first head's first.

    Args:
        num_heads: D.
    """

    requires = (logits_are_selected,)
    ensures = (logits_are_selected,)

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def run(self, program: Program) -> PassResult:
        (output,) = program.graph.find_nodes(op="output")
        logits = program.logits
        vocab = int(logits.meta["val"].shape[1]) // self._num_heads
        with program.graph.inserting_before(output):
            program.logits = emit_call(program.graph, aten.reshape.default, logits, [-1, vocab])
        return PassResult(1)
