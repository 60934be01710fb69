"""Let layers of a block drafter differ in what a row of a block sees."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.drafters.block_spec import BlockSpec
from specc.passes.facts import attention_is_a_tree, features_are_read
from specc.passes.program import FEATURE_ROWS, Program, emit_call

aten = torch.ops.aten


class SeeBlocks(Pass):
    """Other `ancestors` for causal layers, and another `position` where windows end at the anchor.

    A pass has one list of the rows that its tokens see. Row j of a block has -1 - j in the second
    column of `feature_rows`: in a causal layer it sees rows 0 … j. A window that ends at the anchor
    is one of a row whose position is the anchor's; a position is read for nothing else there. Rows
    of the context have -1, as row 0 has: nothing reads what they attend to, and they see a key.
    """

    requires = (attention_is_a_tree, features_are_read)
    ensures = (attention_is_a_tree, features_are_read)

    def __init__(self, spec: BlockSpec) -> None:
        self._spec = spec

    def run(self, program: Program) -> PassResult:
        result, graph = PassResult(), program.graph
        calls = program.calls(ops.tree_attention)
        with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")):
            # -1 - j
            rows = program.placeholder(FEATURE_ROWS)
            offsets = emit_call(graph, aten.slice.Tensor, rows, 1, 1, 2)
            seen = self._up_to_itself(graph, offsets)
            anchor = self._anchor(program, offsets)
        for layer, call in enumerate(calls):
            if layer in self._spec.block.causal_layers:
                _replace(call, "ancestors", seen)
                result.rewrites += 1
            if self._spec.windows[layer] and self._spec.is_anchored:
                _replace(call, "position", anchor)
                result.rewrites += 1
        graph.eliminate_dead_code()
        return result

    @staticmethod
    def _up_to_itself(graph: fx.Graph, offsets: fx.Node) -> fx.Node:
        """[Nt, 1] int64: bits of the rows of a block up to each row."""
        count = emit_call(graph, aten.neg.default, offsets)
        count = emit_call(graph, aten._to_copy.default, count, dtype=torch.int64)
        one = emit_call(graph, aten.full_like.default, count, 1)
        bits = emit_call(graph, aten.bitwise_left_shift.Tensor, one, count)
        return emit_call(graph, aten.sub.Tensor, bits, one)

    @staticmethod
    def _anchor(program: Program, offsets: fx.Node) -> fx.Node:
        """[Nt] int64 positions of the anchors of rows."""
        graph = program.graph
        back = emit_call(graph, aten.squeeze.dim, offsets, 1)
        back = emit_call(graph, aten.add.Scalar, back, 1)
        return emit_call(graph, aten.add.Tensor, program.placeholder("positions"), back)


def _replace(call: fx.Node, name: str, value: fx.Node) -> None:
    """Another argument in place of one that is given by its place."""
    place = [item.name for item in ops.tree_attention._schema.arguments].index(name)
    call.update_arg(place, value)
