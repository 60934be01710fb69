"""Optimal static trees against all trees there are."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.cost.acceptance import check_acceptance, expected_tokens, is_falling, path_probabilities
from specc.cost.best_tree import best_tree, likely_tree, to_tree
from specc.cost.best_tree_dp import TreeTables
from specc.cost.best_tree_heap import grow_best_first
from specc.errors import ConfigError, TreeError
from specc.speculation.dynamic_tree import BudgetTree, DynamicTree
from specc.speculation.tree import MAX_NODES, TokenTree
from tests.tiers import every

LARGEST = 12
KINDS = ("falling", "rising", "any", "one")


def random_row(chooser: random.Random, kind: str) -> list[float]:
    """Probabilities of a few ranks, at most 1 in sum, some of them 0."""
    num_ranks = 1 if kind == "one" else chooser.randint(1, 7)
    weights = [chooser.random() ** 3 * (chooser.random() > 0.15) for _ in range(num_ranks)]
    share = 1.0 if chooser.random() < 0.1 else chooser.random()
    row = [share * weight / (sum(weights) or 1) for weight in weights]
    return {"falling": sorted(row, reverse=True), "rising": sorted(row)}.get(kind, row)


def random_table(seed: int) -> list[list[float]]:
    chooser = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    # every second one differs by depth
    num_rows = 1 if seed // len(KINDS) % 2 else chooser.randint(2, 6)
    return [random_row(chooser, kind) for _ in range(num_rows)]


def all_expectations(table: list[list[float]], num_nodes: int, max_depth: int) -> np.ndarray:
    """Expected tokens of every ordered tree of exactly `num_nodes` nodes: one entry a tree."""

    @functools.cache
    def trees(size: int, depth: int) -> np.ndarray:
        return 1 + forests(size - 1, 0, depth)

    @functools.cache
    def forests(size: int, rank: int, depth: int) -> np.ndarray:
        """Sums over the children of rank `rank` and above of a node of this depth."""
        if size == 0:
            return np.zeros(1)
        if depth == max_depth:
            return np.zeros(0)
        row = table[min(depth, len(table) - 1)]
        chance = row[rank] if rank < len(row) else 0.0
        parts = [
            np.add.outer(chance * trees(n, depth + 1), forests(size - n, rank + 1, depth)).ravel()
            for n in range(1, size + 1)
        ]
        return np.concatenate(parts)

    return trees(num_nodes, 0)


def expectation_by_walks(parents: tuple[int, ...], table: list[list[float]]) -> float:
    """Σ over nodes of the product along the path, from the definition."""
    total = 0.0
    for node in range(len(parents)):
        path, chance = [node], 1.0
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for depth, (parent, child) in enumerate(itertools.pairwise(path)):
            row = table[min(depth, len(table) - 1)]
            rank = [i for i, p in enumerate(parents) if p == parent].index(child)
            chance *= row[rank] if rank < len(row) else 0.0
        total += chance
    return total


def check_order(tree: TokenTree) -> None:
    """Level by level, siblings adjacent."""
    assert list(tree.depths) == sorted(tree.depths)
    assert list(tree.parents) == sorted(tree.parents)


def test_all_trees_are_enumerated():
    """As many ordered trees as Catalan numbers, and the right ones of depth 2."""
    sizes = [len(all_expectations([[0.5]], n, LARGEST)) for n in range(1, LARGEST + 1)]
    assert sizes == [1, 1, 2, 5, 14, 42, 132, 429, 1430, 4862, 16796, 58786]
    found = all_expectations([[0.5, 0.25], [0.3, 0.2]], 4, 2)
    # three children; an only child with two; two children, the first or the second with one
    assert sorted(found) == pytest.approx(sorted([1.75, 1.75, 1.9, 1.825]))


# nine tables of each kind, of one row and of several; more of them in the slow tier
@pytest.mark.default("0", "3", "6", "9", "12", "15", "18", "21")
@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(i, marks=pytest.mark.slow) for i in range(24, 200))]
)
def test_best_of_all_trees(seed):
    table = random_table(seed)
    for num_nodes in range(1, LARGEST + 1):
        want = max(all_expectations(table, n, LARGEST).max() for n in range(1, num_nodes + 1))
        tree = best_tree(table, num_nodes)
        assert tree.num_nodes <= num_nodes
        assert expectation_by_walks(tree.parents, table) == pytest.approx(want, rel=1e-12)
        check_order(tree)


@pytest.mark.default("0", "6", "15", "24", "33", "39", "48", "57")
@pytest.mark.parametrize("seed", every(3, range(64)))
def test_best_of_all_trees_of_a_depth(seed):
    table = random_table(seed)
    for max_depth in range(5):
        found = [all_expectations(table, n, max_depth) for n in range(1, LARGEST)]
        for num_nodes in (2, 5, 8, 11):
            want = max(values.max(initial=0) for values in found[:num_nodes])
            tree = best_tree(table, num_nodes, max_depth)
            assert tree.num_nodes <= num_nodes
            assert tree.max_depth <= max_depth
            assert expectation_by_walks(tree.parents, table) == pytest.approx(want, rel=1e-12)
            check_order(tree)


@given(st.integers(0, 10**6), st.integers(1, 120), st.one_of(st.none(), st.integers(0, 12)))
@settings(deadline=None, max_examples=60)
def test_both_ways_agree_where_acceptance_falls(seed, num_nodes, max_depth):
    chooser = random.Random(seed)
    table = [random_row(chooser, "falling") for _ in range(chooser.randint(1, 5))]
    rows = check_acceptance(table)
    limit = num_nodes if max_depth is None else max_depth
    grown = grow_best_first(rows, num_nodes, limit)
    tables = TreeTables(rows, num_nodes)
    expected = tables.expected(max_depth)
    for n in range(1, num_nodes + 1):
        tokens = sum(node.probability for node in grown[:n])
        assert tokens == pytest.approx(expected[n], rel=1e-12)
    for n in {1, num_nodes // 2 or 1, num_nodes}:
        tree = to_tree(tables.parents(n, max_depth))
        assert expected_tokens(tree, table) == pytest.approx(expected[n], rel=1e-12)
        check_order(tree)


def test_the_heap_is_wrong_where_acceptance_rises():
    """The reason for the dynamic program: an unlikely first child precedes a likely one."""
    table = [[0.01, 0.9]]
    grown = grow_best_first(check_acceptance(table), 3, 2)
    assert [node.parent for node in grown] == [-1, 0, 0]
    assert expected_tokens(best_tree(table, 5), table) == pytest.approx(1 + 0.91 + 0.9 * 0.91)
    assert best_tree(table, 5).parents == (-1, 0, 0, 2, 2)


@pytest.mark.parametrize("table", [[[0.5, 0.2, 0.1]], [[0.5, 0.1, 0.2], [0.1, 0.4]]], ids=str)
def test_trees_of_1024_nodes(table):
    tree = best_tree(table, MAX_NODES)
    assert tree.num_nodes == MAX_NODES
    check_order(tree)
    smaller = best_tree(table, MAX_NODES - 1)
    assert expected_tokens(tree, table) > expected_tokens(smaller, table)
    shallow = best_tree(table, MAX_NODES, 4)
    assert shallow.max_depth == 4
    assert expected_tokens(shallow, table) < expected_tokens(tree, table)


@pytest.mark.slow
def test_depth_beyond_a_thousand_levels():
    """A chain is the best tree where nothing but the first child is ever accepted."""
    assert best_tree([[1.0]], MAX_NODES) == TokenTree.chain(MAX_NODES - 1)
    tables = TreeTables(((1.0,),), MAX_NODES)
    assert to_tree(tables.parents(MAX_NODES, 1000)) == TokenTree.chain(1000)


def test_nodes_that_add_nothing_are_left_out():
    assert best_tree([[0.5, 0.2]], 100, 2).num_nodes == 1 + 2 + 4
    assert best_tree([[0.0]], 10).num_nodes == 1
    assert best_tree([[]], 10).num_nodes == 1
    assert best_tree([[0.5, 0.0], [0.0]], 10).parents == (-1, 0)
    # the first child is worth nothing, and is there for the second's sake
    assert best_tree([[0.0, 0.5], [0.0]], 10).parents == (-1, 0, 0)
    assert best_tree([[0.0, 0.5], [0.0]], 2).num_nodes == 1
    assert best_tree([[0.9]], 5, 0).num_nodes == 1
    # a product below the least float
    assert best_tree([[1e-200]], 5).num_nodes == 2


def test_expansions_have_widths():
    """An optimal tree that is an expansion is one in every respect."""
    assert best_tree([[0.4, 0.4, 0.1], [0.9]], 5) == TokenTree.from_widths((2, 1))
    assert best_tree([[0.3, 0.3, 0.3], [0.5, 0.4]], 10) == TokenTree.from_widths((3, 2))
    assert best_tree([[0.5, 0.45], [0.9]], 4).parents == (-1, 0, 0, 1)
    assert best_tree([[0.5, 0.45], [0.9]], 4).widths == ()
    assert to_tree((-1, 0, 0, 1, 2, 1)).widths == ()


def test_relabeling_keeps_ranks():
    """A node's first child stays its first, wherever it grew."""
    tree = to_tree((-1, 0, 1, 0, 3, 3, 1))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2)
    #                      root with a (0.5) and b (0.25); a's children 0.25 and 0.125
    table = [[0.5, 0.25]]
    paths = path_probabilities(tree, table)
    assert paths == [1, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]
    assert to_tree((-1, 0, 0, 2)).parents == (-1, 0, 0, 2)


def test_expected_tokens_of_given_trees():
    chain = TokenTree.chain(3)
    assert expected_tokens(chain, [[0.8]]) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert expected_tokens(chain, [[0.5], [0.2], [1.0]]) == pytest.approx(1 + 0.5 + 0.1 + 0.1)
    tree = TokenTree.from_widths((3, 2))
    assert expected_tokens(tree, [[0.5, 0.2], [0.1, 0.3]]) == pytest.approx(1 + 0.7 + 0.7 * 0.4)
    assert expected_tokens(TokenTree.chain(0), [[0.9]]) == 1


def test_falling_is_asked_row_by_row():
    assert is_falling(check_acceptance([[0.5, 0.5, 0.0], [0.6, 0.1]]))
    assert not is_falling(check_acceptance([[0.5, 0.1], [0.1, 0.2]]))


BAD = {
    "none": ([], "without rows"),
    "above": ([[1.1]], "1.1"),
    "below": ([[0.5], [-0.1, 0.2]], "depth 1: -0.1, 0.2"),
    "nan": ([[float("nan")]], "nan"),
    "sum": ([[0.6, 0.3], [0.6, 0.6]], "depth 1: 0.6, 0.6, 1.2 in sum"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_acceptance(name):
    table, found = BAD[name]
    with pytest.raises(ConfigError) as error:
        best_tree(table, 4)
    assert found in error.value.found


@pytest.mark.parametrize(("num_nodes", "max_depth"), [(0, None), (MAX_NODES + 1, None), (4, -1)])
def test_bad_sizes(num_nodes, max_depth):
    with pytest.raises(TreeError):
        best_tree([[0.5]], num_nodes, max_depth)


def test_trees_that_drafts_choose() -> None:
    """Nodes of a level that is shared out go where paths are likeliest, as many as there are."""
    rows = [[0.6, 0.3, 0.05], [0.5, 0.4], [0.9]]
    assert likely_tree(DynamicTree(4, 2, 2), rows) == best_tree([r[:2] for r in rows], 4, 2)
    # .6 and .3; of .30, .24, .15, .12 the first three; .9 of each of those, and nothing after it
    found = likely_tree(BudgetTree.of((2, 3, 4)), rows)
    assert found.parents == (-1, 0, 0, 1, 1, 2, 3, 3, 4, 5)
    assert likely_tree(BudgetTree.of((1, 1, 1)), rows).parents == TokenTree.chain(3).parents
