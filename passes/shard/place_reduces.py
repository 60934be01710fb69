"""Where the partial sums of ranks become sums.

A product over a cut dimension, and a lookup in a cut table, give each rank a part of a sum. What is
linear may go on with parts: views, choices of rows, products with what all ranks have, sums of two
parts. So a sum over ranks stands before the first thing that is not linear, or where a value has
several readers: after the residual's two branches where they are added first, after the experts of
a token, once for token and position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from specc.passes.proof.token_routing import name_of
from specc.passes.shard.relations import is_tensor

# the operand by position that may be a part of a sum, with nothing else that is
_LINEAR = frozenset(
    (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t",
        "unsqueeze", "squeeze", "contiguous", "clone", "neg", "slice", "index", "index_select",
        "sum",
    )
)  # fmt: skip


# without a rounding mode
_QUOTIENTS = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)


def place_reduces(
    graph: fx.Graph, is_part: Callable[[fx.Node], bool], is_cut: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """Values that are summed over the ranks as soon as they are computed, in order.

    Args:
        graph: before the cut.
        is_part: whether a node's own operation leaves each rank a part of a sum.
        is_cut: whether ranks hold pieces of a value, which cannot be parts of a sum as well.
    """
    parts: set[fx.Node] = set()
    reduced: list[fx.Node] = []

    def reduce(node: fx.Node) -> None:
        parts.remove(node)
        reduced.append(node)

    for node in graph.nodes:
        if node.op == "output":
            for item in [item for item in node.all_input_nodes if item in parts]:
                reduce(item)
        if node.op != "call_function":
            continue
        operands = [item for item in node.all_input_nodes if item in parts]
        own = is_part(node)
        if operands and (own or not _goes_on(node, operands) or is_cut(node)):
            for item in operands:
                reduce(item)
            operands = []
        if own or operands:
            parts.add(node)
            if len(node.users) > 1:
                reduce(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    return sorted(reduced, key=order.__getitem__)


def check_sums(graph: fx.Graph, origins: Collection[fx.Node], all_reduce: object) -> None:
    """See that the sums of a graph are summed once, before anything that is not linear.

    Args:
        graph: after the cut.
        origins: nodes whose own operation leaves each rank a part of a sum.
    Raises:
        AssertionError: naming the node.
    """
    parts: set[fx.Node] = set()
    for node in graph.nodes:
        operands = [item for item in node.all_input_nodes if item in parts]
        if node.target is all_reduce:
            if not operands:
                raise AssertionError(f"{node.name} sums {node.args[0]}, which is no part of a sum")
            continue
        if operands and (node.op == "output" or node in origins or not _goes_on(node, operands)):
            raise AssertionError(f"{node.name} reads {operands[0].name}, a part of a sum")
        if operands or node in origins:
            parts.add(node)


def _goes_on(node: fx.Node, parts: list[fx.Node]) -> bool:
    """Whether parts of sums give a part of the same operation on the sums."""
    if not is_tensor(node):
        return False
    name, first = name_of(node), node.args[0]
    tensors = [item for item in node.args if is_tensor(item)]
    if name in _LINEAR:
        return parts == [first]
    if name in ("add", "sub"):
        return len(tensors) == 2 and all(item in parts for item in tensors)
    if name == "mul":
        return len(parts) == 1 and tensors.count(parts[0]) == 1
    if name == "div":
        return parts == [first] and node.target in _QUOTIENTS
    return False
