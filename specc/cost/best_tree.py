"""Optimal static trees: the shape of so many nodes from which a step emits the most tokens.

Source: Sequoia, arXiv:2402.12374 §3.
"""

from __future__ import annotations

from collections.abc import Sequence

from specc.cost.acceptance import check_acceptance, is_falling, row_at
from specc.cost.best_tree_dp import TreeTables
from specc.cost.best_tree_heap import grow_best_first
from specc.errors import TreeError
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.tree import MAX_NODES, TokenTree


def best_tree(
    acceptance: Sequence[Sequence[float]], num_nodes: int, max_depth: int | None = None
) -> TokenTree:
    """The tree of at most `num_nodes` nodes with the most expected tokens a step.

    Best-first growth where acceptance falls with the rank, a dynamic program else. Nodes that add
    nothing are left out, so the tree is smaller where the ranks and depths run out.

    Args:
        acceptance: by depth and sibling rank; see specc/cost/acceptance.py.
        num_nodes: most nodes, root included.
        max_depth: of any node; None is no limit.
    Raises:
        ConfigError: acceptance that is no table of probabilities.
        TreeError: fewer than 1 or more than 1024 nodes, or a negative depth.
    """
    rows = check_acceptance(acceptance)
    check_size(num_nodes, max_depth)
    limit = num_nodes - 1 if max_depth is None else max_depth
    if is_falling(rows):
        return to_tree([node.parent for node in grow_best_first(rows, num_nodes, limit)])
    tables = TreeTables(rows, num_nodes)
    # one table for all depths, where the limit changes nothing
    tree = to_tree(tables.parents(num_nodes, None))
    return tree if tree.max_depth <= limit else to_tree(tables.parents(num_nodes, limit))


def likely_tree(shape: DynamicTree, acceptance: Sequence[Sequence[float]]) -> TokenTree:
    """The tree that a draft grows where its nodes are accepted as on average.

    Args:
        shape: of a tree that is data.
        acceptance: by depth and sibling rank, see specc/cost/acceptance.py.
    """
    if not shape.knows_counts:
        narrow = [row[: shape.top_k] for row in acceptance]
        return best_tree(narrow, shape.num_nodes, shape.depth)
    rows = check_acceptance(acceptance)
    parents, level, first = [-1], [1.0], 0
    for depth, size in enumerate(shape.level_sizes):
        row = row_at(rows, depth)
        places = [
            (-above * (row[rank] if rank < len(row) else 0.0), node, rank)
            for node, above in enumerate(level)
            for rank in range(size)
        ]
        # ties go to the earlier place, so that these are the first children of each node
        taken = sorted(sorted(places)[:size], key=lambda place: place[1:])
        parents += [first + node for _, node, _ in taken]
        first, level = first + len(level), [-value for value, _, _ in taken]
    return TokenTree(tuple(parents))


def check_size(num_nodes: int, max_depth: int | None) -> None:
    """Raises TreeError: fewer than 1 or more than 1024 nodes, or a negative depth."""
    if not 1 <= num_nodes <= MAX_NODES:
        raise TreeError(
            f"a tree of {num_nodes} nodes", f"1 … {MAX_NODES} nodes", "choose another size"
        )
    if max_depth is not None and max_depth < 0:
        raise TreeError(f"a tree of depth {max_depth}", "0 or more", "choose another depth")


def to_tree(parents: Sequence[int]) -> TokenTree:
    """Number the nodes level by level, siblings adjacent and in their order.

    Args:
        parents: in any order in which a child comes after its parent and its elder siblings.
    Returns:
        A tree whose `widths` are given where it is an expansion.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    made, widths, is_expansion = [-1], [], True
    level, number = [0], {0: 0}
    while following := [child for node in level for child in children[node]]:
        counts = [len(children[node]) for node in level]
        is_expansion &= len(set(counts)) == 1
        widths.append(counts[0])
        for child in following:
            number[child] = len(made)
            made.append(number[parents[child]])
        level = following
    return TokenTree(tuple(made), tuple(widths) if is_expansion else ())
