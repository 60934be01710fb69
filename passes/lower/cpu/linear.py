"""Put `specc.linear` in place of `aten.linear`: the CPU's own projection of few rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, Weight, bind_args, emit_call, replace

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
        program: whose inputs change.
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


def replace_linear(
    node: fx.Node, operator: Any, weight: fx.Node, out_features: int, *more: Any
) -> None:
    """Put a projection of flattened rows, `operator(x, weight, bias, N, *more)`, in place of one.

    Args:
        node: an `aten.linear`.
        operator: takes rows [M, K] and returns [M, N].
        weight: the input that it reads.
        out_features: N.
        more: further arguments.
    """
    graph, bound = node.graph, bind_args(node)
    x = bound["input"]
    shape = x.meta["val"].shape
    with graph.inserting_before(node):
        rows = emit_call(graph, aten.reshape.default, x, [-1, shape[-1]])
        out = emit_call(graph, operator, rows, weight, bound["bias"], out_features, *more)
        if len(shape) != 2:
            # the dynamic dimension, the number of tokens, is what the others leave
            leading = [size if isinstance(size, int) else -1 for size in shape[:-1]]
            out = emit_call(graph, aten.reshape.default, out, [*leading, out_features])
    replace(node, out)


def _lower_embedding(node: fx.Node, num_embeddings: int) -> None:
    graph, (blocks, ids) = node.graph, node.args[:2]
    width, shape = node.meta["val"].shape[-1], ids.meta["val"].shape
    with graph.inserting_before(node):
        flat = emit_call(graph, aten.reshape.default, ids, [-1])
        out = emit_call(graph, ops.embedding_of_blocks, blocks, flat, num_embeddings, width)
        leading = [size if isinstance(size, int) else -1 for size in shape]
        out = emit_call(graph, aten.reshape.default, out, [*leading, width])
    replace(node, out)
