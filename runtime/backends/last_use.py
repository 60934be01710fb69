"""When the values of a graph are read for the last time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


def last_used(nodes: Iterable[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node → values that no node after it reads, its own included.

    Args:
        nodes: in the order in which they run.
        kept: values that are needed after all of them.
    """
    last: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found[node] = []
        last |= dict.fromkeys([node, *node.all_input_nodes], node)
    for value, node in last.items():
        if value not in kept:
            found[node].append(value)
    return found
