"""Compute layers of a head for the rows that are asked for alone."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.base import Pass, PassResult
from specc.passes.facts import logits_are_selected
from specc.passes.program import Program, emit_call
from specc.passes.values import value_of_call

aten = torch.ops.aten

# what makes each row of the same row of its arguments
_ROW_BY_ROW = (aten.linear.default, aten.silu.default, aten.add.Tensor)


class SelectEarlier(Pass):
    """Gather `logit_rows` before the layers that lead to the projection, and not after them.

    Layers of a head go row by row, so that a pass over a prompt, of which no logits are asked, has
    none to compute. `SelectLogits` has gathered rows before the projection.
    """

    requires = (logits_are_selected,)
    ensures = (logits_are_selected,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        (chosen,) = program.placeholder("logit_rows").users
        if chosen.target is not aten.index_select.default:
            result.decline(chosen.name, "rows are no selection before a projection")
            return result
        source: fx.Node = chosen.args[0]  # type: ignore[assignment]
        layers, read = _layers_before(chosen, source, program)
        if len(read) != 1 or not layers:
            result.decline(chosen.name, "no layers of one input lead to the projection")
            return result
        (given,) = read
        with program.graph.inserting_after(given):
            rows = emit_call(program.graph, aten.index_select.default, given, *chosen.args[1:])
        given.replace_all_uses_with(rows, delete_user_cb=lambda user: user in layers)
        chosen.replace_all_uses_with(source)
        program.graph.erase_node(chosen)
        for node in layers:
            assert callable(node.target)
            node.meta["val"] = value_of_call(program.graph, node.target, node.args, node.kwargs)
        result.rewrites += 1
        return result


def _layers_before(
    chosen: fx.Node, source: fx.Node, program: Program
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Nodes that go row by row and lead to a selection alone, in order, and what they read."""
    layers: list[fx.Node] = []
    read: list[fx.Node] = []
    needed = {source}
    for node in reversed(program.graph.nodes):
        if node not in needed:
            continue
        if node.target in _ROW_BY_ROW and {*node.users} <= {chosen, *layers}:
            layers.insert(0, node)
            needed |= {x for x in node.all_input_nodes if x.target not in program.weights}
        else:
            read.append(node)
    return layers, read
