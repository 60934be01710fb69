"""Keep the heads of a value apart from its tokens, where a model makes rows of both.

Gated norms of some models go over rows [tokens * heads, D], made by a view and taken back by
another one. A dimension of tokens and heads together cannot be cut for ranks. So what lies between
the two views is computed on [..., tokens, heads, D] instead, where it is element by element, or
over the columns of a row; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from specc.passes.program import Program, bind_args, emit_call
from specc.passes.proof.token_routing import CONVERSIONS, POINTWISE, name_of

aten = torch.ops.aten
_VIEWS = ("view", "reshape", "_unsafe_view")
# over the last dimension, which is kept
_OVER_COLUMNS = ("mean", "sum")


def keep_heads(program: Program) -> int:
    """Rewrite in place; returns how many views take heads and tokens apart again.

    Args:
        program: of flat tokens.
    """
    graph = program.graph
    # rows of tokens and heads → the same apart
    apart: dict[fx.Node, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        joined = [item for item in node.all_input_nodes if item in apart]
        if name_of(node) in _VIEWS:
            source = node.args[0]
            if joined:
                # elements are in the same order
                node.target = aten.reshape.default
                node.update_arg(0, apart[source])
                count += 1
            elif _joins_heads(node):
                apart[node] = source
            continue
        if joined and _is_by_row(node, apart):
            with graph.inserting_before(node):
                args, kwargs = fx.map_arg(
                    (node.args, node.kwargs), lambda item: apart.get(item, item)
                )
                if name_of(node) in _OVER_COLUMNS:
                    args = (args[0], [-1], *args[2:])
                apart[node] = emit_call(graph, node.target, *args, **kwargs)
            apart[node].meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    graph.eliminate_dead_code()
    return count


def _joins_heads(node: fx.Node) -> bool:
    """Whether a view makes [tokens * heads, D] of [..., tokens, heads, D]."""
    before, after = (item.meta["val"].shape for item in (node.args[0], node))
    if len(before) < 3 or len(after) != 2 or not isinstance(before[-2], int):
        return False
    is_merged = not isinstance(after[0], int) and not isinstance(before[-3], int)
    return is_merged and str(before[-1]) == str(after[1]) and before[-2] > 1


def _is_by_row(node: fx.Node, apart: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether it is the same of rows that are apart: other operands are columns alone."""
    value, name = node.meta.get("val"), name_of(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    others = [item for item in node.all_input_nodes if item not in apart]
    if any(item.meta["val"].dim() > 1 for item in others if _is_tensor(item)):
        return False
    if name in _OVER_COLUMNS:
        given = bind_args(node)
        return bool(given["keepdim"]) and list(given["dim"] or ()) in ([-1], [1])
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise or name in (POINTWISE | CONVERSIONS) - {"repeat", "stack"}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
