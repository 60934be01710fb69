"""Let drafts read features from paged slabs, and keep there what they hand on."""

from __future__ import annotations

import torch

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree, features_are_read, logits_are_selected
from specc.passes.program import (
    FEATURE_ROWS,
    FEATURES,
    GEOMETRY,
    HANDED_ON,
    Program,
    add_placeholder,
    emit_call,
    last_placeholder,
)

aten = torch.ops.aten

# inputs of traced modules of drafts beside tokens and positions
TAPPED, OWN_FEATURES, IS_TAPPED = "features", "own_features", "is_tapped"
# of a block drafter whose rows read those before them: [Nt, 1] int32, -1 - j of row j of a block
PLACES = "places"


class ReadFeatures(Pass):
    """One output and one more input, `feature_rows`, in place of rows that are given and returned.

    A token names the row whose features it reads: [Nt, 2] int32, a row of the target's slab and -1,
    or -1 and a row of the head's own slab, into which each token's row is written, too. Both slabs
    are paged as K and V are, by the same block table. So what a node hands on to its children is a
    row of a cache, whatever shape the tree has, and no step hands tensors from pass to pass.

    A block drafter hands nothing on, and has no slab of its own: a row of the context names a row
    of the target's slab and -1, and row j of a block none, -1 and -1 - j, which it may ask for.
    Every row of Medusa heads names one of the target's slab, and -1.
    """

    requires = (attention_is_a_tree, logits_are_selected)
    ensures = (attention_is_a_tree, features_are_read)

    def run(self, program: Program) -> PassResult:
        graph, handed_on = program.graph, program.handed_on
        # names of inputs: those of the slabs are free once the rows are gone
        given = {FEATURES: program.placeholder(TAPPED)}
        if handed_on is not None:
            given = {HANDED_ON: program.placeholder(OWN_FEATURES), **given}
        may_be_untapped = IS_TAPPED in program.row_inputs
        tokens = program.placeholder("tokens").meta["val"]
        last = program.placeholder(_inputs_of_all(program)[-1])
        value = tokens.new_empty((tokens.shape[0], 2), dtype=torch.int32)
        rows = add_placeholder(program, FEATURE_ROWS, value, last)
        slabs = {}
        for name, node in given.items():
            caches = (*program.caches, *program.target_caches, GEOMETRY)
            like = program.placeholder(caches[0]).meta["val"]
            width, dtype = int(node.meta["val"].shape[1]), node.meta["val"].dtype
            value = like.new_empty((*like.shape[:2], width), dtype=dtype)
            slabs[name] = add_placeholder(program, f"{name}_slab", value, last_placeholder(graph))
        q_start, slot, table = map(program.placeholder, ("q_start", "slot", "block_table"))
        first = next(node for node in graph.nodes if node.op == "call_function")
        with graph.inserting_before(first):
            # padding is far below zero; and what the operator reads has to lie in one piece
            places = {
                name: emit_call(
                    graph,
                    aten.clamp.default,
                    emit_call(graph, aten.slice.Tensor, rows, 1, column, column + 1),
                    -1,
                )
                for column, name in enumerate((FEATURES, HANDED_ON))
                if name in given
            }
            read = {
                name: emit_call(
                    graph,
                    aten.squeeze.dim,
                    emit_call(graph, ops.take_rows, slabs[name], place, q_start, table),
                    1,
                )
                for name, place in places.items()
            }
            replaced = {node: read[name] for name, node in given.items()}
            if PLACES in program.row_inputs:
                numbers = emit_call(graph, aten.slice.Tensor, rows, 1, 1, 2)
                replaced[program.placeholder(PLACES)] = numbers
            if may_be_untapped:
                is_tapped = program.placeholder(IS_TAPPED)
                if handed_on is None:
                    reads_target = emit_call(graph, aten.ge.Scalar, places[FEATURES], 0)
                else:
                    reads_target = emit_call(graph, aten.lt.Scalar, places[HANDED_ON], 0)
                replaced[is_tapped] = reads_target
        for old, new in replaced.items():
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        for name, node in slabs.items():
            node.target = name
        for node in graph.find_nodes(op="placeholder", target=GEOMETRY):
            # of a draft without layers, nothing else has taken its sizes
            graph.erase_node(node)
        if handed_on is not None:
            (output,) = graph.find_nodes(op="output")
            output.args = (program.logits,)
            with graph.inserting_before(output):
                kept = emit_call(graph, aten.squeeze.dim, handed_on, 0)
                emit_call(graph, ops.write_rows, kept, slabs[HANDED_ON], q_start, slot, table)
        program.runtime_inputs = (*_inputs_of_all(program), FEATURE_ROWS)
        program.row_inputs = (FEATURE_ROWS,)
        return PassResult(len(replaced))


def _inputs_of_all(program: Program) -> tuple[str, ...]:
    """Of the runtime's inputs, those that are no rows."""
    return tuple(name for name in program.runtime_inputs if name not in program.row_inputs)
