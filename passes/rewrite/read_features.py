"""Let a draft head read its features from paged slabs, and keep there what it hands on."""

from __future__ import annotations

import torch

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree, logits_are_selected, own_features_are_kept
from specc.passes.frontend.heads.feature_head import FEATURES as TAPPED
from specc.passes.frontend.heads.feature_head import IS_TAPPED, OWN_FEATURES
from specc.passes.program import (
    FEATURE_ROWS,
    FEATURES,
    HANDED_ON,
    Program,
    add_placeholder,
    emit_call,
    last_placeholder,
)

aten = torch.ops.aten


class ReadFeatures(Pass):
    """One output and one more input, `feature_rows`, in place of rows that are given and returned.

    A token names the row whose features it reads: [Nt, 2] int32, a row of the target's slab and -1,
    or -1 and a row of the head's own slab, into which each token's row is written, too. Both slabs
    are paged as K and V are, by the same block table. So what a node hands on to its children is a
    row of a cache, whatever shape the tree has, and no step hands tensors from pass to pass.
    """

    requires = (attention_is_a_tree, logits_are_selected)
    ensures = (attention_is_a_tree, own_features_are_kept)

    def run(self, program: Program) -> PassResult:
        graph, handed_on = program.graph, program.handed_on
        assert handed_on is not None, "a head hands on a row of each token"
        features, own = program.placeholder(TAPPED), program.placeholder(OWN_FEATURES)
        is_tapped = program.placeholder(IS_TAPPED)
        tokens = program.placeholder("tokens").meta["val"]
        last = program.placeholder(_inputs_of_all(program)[-1])
        value = tokens.new_empty((tokens.shape[0], 2), dtype=torch.int32)
        rows = add_placeholder(program, FEATURE_ROWS, value, last)
        # names of inputs: those of the slabs are free once the rows are gone
        slabs = {}
        for name, node in ((HANDED_ON, own), (FEATURES, features)):
            cache = program.placeholder(next(iter(program.caches))).meta["val"]
            width, dtype = int(node.meta["val"].shape[1]), node.meta["val"].dtype
            value = cache.new_empty((*cache.shape[:2], width), dtype=dtype)
            slabs[name] = add_placeholder(program, f"{name}_slab", value, last_placeholder(graph))
        q_start, slot, table = map(program.placeholder, ("q_start", "slot", "block_table"))
        first = next(node for node in graph.nodes if node.op == "call_function")
        with graph.inserting_before(first):
            # padding is far below zero; and what the operator reads has to lie in one piece
            named = [
                emit_call(
                    graph,
                    aten.clamp.default,
                    emit_call(graph, aten.slice.Tensor, rows, 1, column, column + 1),
                    -1,
                )
                for column in range(2)
            ]
            tapped, handed = (
                emit_call(
                    graph,
                    aten.squeeze.dim,
                    emit_call(graph, ops.take_rows, slabs[name], places, q_start, table),
                    1,
                )
                for name, places in ((FEATURES, named[0]), (HANDED_ON, named[1]))
            )
            reads_target = emit_call(graph, aten.lt.Scalar, named[1], 0)
        for old, new in ((features, tapped), (own, handed), (is_tapped, reads_target)):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        for name, node in slabs.items():
            node.target = name
        (output,) = graph.find_nodes(op="output")
        output.args = (program.logits,)
        with graph.inserting_before(output):
            kept = emit_call(graph, aten.squeeze.dim, handed_on, 0)
            emit_call(graph, ops.write_rows, kept, slabs[HANDED_ON], q_start, slot, table)
        program.runtime_inputs = (*_inputs_of_all(program), FEATURE_ROWS)
        program.row_inputs = (FEATURE_ROWS,)
        return PassResult(3)


def _inputs_of_all(program: Program) -> tuple[str, ...]:
    """Of the runtime's inputs, those that are no rows."""
    return tuple(name for name in program.runtime_inputs if name not in program.row_inputs)
