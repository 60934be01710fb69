"""Let a draft put out hidden states beside its logits, where its step computes with them."""

from __future__ import annotations

import torch
from torch import fx

from specc.errors import UnsupportedGraphError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import logits_are_selected
from specc.passes.program import Program, emit_call

aten = torch.ops.aten


class ReturnHidden(Pass):
    """Each row of the output becomes logits, then what they were projected from: [R, V + d].

    A program keeps its one output, so that steps are captured and compiled as those of others; a
    step takes the columns apart again. It is the last change of the output: until then its columns
    are ids.

    Args:
        width: d.
    """

    requires = (logits_are_selected,)
    ensures = (logits_are_selected,)

    def __init__(self, width: int) -> None:
        self._width = width

    def run(self, program: Program) -> PassResult:
        graph, logits = program.graph, program.logits
        users = list(program.placeholder("logit_rows").users)
        chosen = users[0] if len(users) == 1 else None
        if chosen is None or not self._are_rows(chosen, logits):
            raise UnsupportedGraphError(
                f"hidden states of {program.name}: logits that no projection of them gives",
                f"a projection of rows of {self._width} columns, of the type of the logits",
                "choose another draft",
            )
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            rows = emit_call(graph, aten.reshape.default, chosen, [-1, self._width])
            program.logits = emit_call(graph, aten.cat.default, [logits, rows], 1)
        program.hidden_columns = self._width
        return PassResult(1)

    def _are_rows(self, node: fx.Node, logits: fx.Node) -> bool:
        value = node.meta["val"]
        is_row = node.target is aten.index_select.default and value.shape[-1] == self._width
        return is_row and value.dtype == logits.meta["val"].dtype
