"""Put `specc.linear` in place of `aten.linear`: the CPU's own projection of few rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, Weight, emit_call, replace
from specc.passes.rewrite.flat_rows import replace_linear

aten = torch.ops.aten


class LowerLinear(Pass):
    """`aten.linear(x, w, b)` → `specc.linear` over the flattened rows of x, where w is in blocks.

    `aten.embedding(w, ids)` of such a weight → `specc.embedding_of_blocks`. The graph's inputs
    become the blocks themselves.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node, weight in inputs_of_blocks(program, 2):
            for user in list(node.users):
                if user.target is aten.embedding.default:
                    _lower_embedding(user, weight.shape[0])
                else:
                    replace_linear(user, ops.linear, node, weight.shape[0])
                    result.rewrites += 1
        for node in program.calls(aten.linear.default):
            result.decline(node.name, "its weight is not in blocks")
        return result


def inputs_of_blocks(program: Program, num_dims: int) -> Iterator[tuple[fx.Node, Weight]]:
    """Inputs whose weights are in blocks, made those blocks; those of an earlier run are left out.

    Args:
        num_dims: of the weights: 2 of projections, 3 of experts.
    """
    for node in program.graph.find_nodes(op="placeholder"):
        weight = program.weights.get(node.target)
        if weight is None or not weight.in_blocks or len(weight.shape) != num_dims:
            continue
        if tuple(node.meta["val"].shape) == weight.stored_shape:
            continue
        node.meta["val"] = node.meta["val"].new_empty(weight.stored_shape)
        yield node, weight


def _lower_embedding(node: fx.Node, num_embeddings: int) -> None:
    graph, (blocks, ids) = node.graph, node.args[:2]
    width, shape = node.meta["val"].shape[-1], ids.meta["val"].shape
    with graph.inserting_before(node):
        flat = emit_call(graph, aten.reshape.default, ids, [-1])
        out = emit_call(graph, ops.embedding_of_blocks, blocks, flat, num_embeddings, width)
        leading = [size if isinstance(size, int) else -1 for size in shape]
        out = emit_call(graph, aten.reshape.default, out, [*leading, width])
    replace(node, out)
