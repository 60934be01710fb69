"""Let ranks add up what a gated norm takes the mean of, where it goes over all heads of a layer.

Gated norms of Mamba-2 go over the outputs of several heads together: where that is all of them, no
rank has the mean alone. It becomes a sum, of which each rank has a part, and a quotient; a sum over
ranks of one number for each token then stands between the two.
"""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.proof.token_routing import CONVERSIONS, name_of

aten = torch.ops.aten
# in the metadata of a sum: ranks may each have a part of what it goes over
ADDS_HEADS = "adds_heads"
_MOVES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten")


def split_means(program: Program) -> int:
    """`mean(x, -1)` over the outputs of all heads of a recurrence → a sum and a quotient.

    Rewrite in place; returns how many there were.
    """
    graph, count = program.graph, 0
    for node in program.calls(ops.tree_recurrence):
        _, heads, value_dim = node.meta["val"].shape
        for mean in _means_of(node, int(heads) * int(value_dim)):
            given = bind_args(mean)
            with graph.inserting_before(mean):
                total = emit_call(graph, aten.sum.dim_IntList, given["self"], [-1], True)
                found = emit_call(graph, aten.div.Scalar, total, float(heads * value_dim))
            total.meta[ADDS_HEADS] = True
            for new in (total, found):
                new.meta["nn_module_stack"] = mean.meta.get("nn_module_stack")
            mean.replace_all_uses_with(found)
            graph.erase_node(mean)
            count += 1
    return count


def _means_of(node: fx.Node, size: int) -> list[fx.Node]:
    """Means over so many columns of what follows a call element by element."""
    found: list[fx.Node] = []
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            is_tensor = isinstance(user.meta.get("val"), torch.Tensor)
            if user in seen or not is_tensor or not hasattr(user.target, "_schema"):
                continue
            seen.add(user)
            if name_of(user) == "mean":
                given = bind_args(user)
                source = given["self"].meta["val"]
                is_last = [dim % source.dim() for dim in given["dim"] or ()] == [source.dim() - 1]
                if is_last and given["keepdim"] and source.shape[-1] == size:
                    found.append(user)
            elif _goes_on(user):
                waiting.append(user)
    return found


def _goes_on(node: fx.Node) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise or name_of(node) in (*_MOVES, *CONVERSIONS)
