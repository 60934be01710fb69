"""Where the partial sums of ranks become sums.

A product over a cut dimension, and a lookup in a cut table, give each rank a part of a sum. What is
linear may go on with parts: views, choices of rows, products with what all ranks have, sums of two
parts. So a sum over ranks stands before the first thing that is not linear, or where a value has
several readers: after the residual's two branches where they are added first, after the experts of
a token, once for token and position.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from specc.passes.proof.token_routing import name_of
from specc.passes.shard.relations import is_tensor

# the operand by position that may be a part of a sum, with nothing else that is
_LINEAR = frozenset(
    (
        "view", "reshape", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze",
        "contiguous", "clone", "neg", "slice", "index", "index_select", "sum",
    )
)  # fmt: skip


def place_reduces(graph: fx.Graph, is_part: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Values that are summed over the ranks as soon as they are computed, in order.

    Args:
        graph: before the cut.
        is_part: whether a node's own operation leaves each rank a part of a sum.
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
        if node.op != "call_function" or not is_tensor(node):
            continue
        operands = [item for item in node.all_input_nodes if item in parts]
        own = is_part(node)
        if operands and (own or not _goes_on(node, operands)):
            for item in operands:
                reduce(item)
            operands = []
        if own or operands:
            parts.add(node)
            if len(node.users) > 1:
                reduce(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    return sorted(reduced, key=order.__getitem__)


def _goes_on(node: fx.Node, parts: list[fx.Node]) -> bool:
    """Whether parts of sums give a part of the same operation on the sums."""
    name, first = name_of(node), node.args[0]
    tensors = [item for item in node.args if is_tensor(item)]
    if name in _LINEAR:
        return parts == [first]
    if name in ("add", "sub"):
        return len(tensors) == 2 and all(item in parts for item in tensors)
    if name == "mul":
        return len(parts) == 1 and tensors.count(parts[0]) == 1
    if name == "div":
        return parts == [first]
    return False
