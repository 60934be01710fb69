"""The tree with the most tokens a second, from measured seconds."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.cost.acceptance import expected_tokens
from specc.cost.best_tree import best_tree, to_tree
from specc.cost.draft_levels import fed_rows
from specc.cost.latency_table import LatencyTable, PassSeconds, StepShape
from specc.cost.measured_seconds import MeasuredSeconds
from specc.cost.plan_choice import best_plan
from specc.cost.roofline import roofline
from specc.cost.step_seconds import StepSeconds
from specc.drafters.registry import drafter_of
from specc.errors import ConfigError, TreeError
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.tree import TokenTree
from tests.tiers import every

VERIFY = {1: 10.0, 8: 10.4, 16: 11.0, 64: 16.0}


def all_trees(num_nodes: int) -> list[TokenTree]:
    """Every ordered tree of so many nodes."""

    def forests(size: int) -> list[list[list]]:
        if size == 0:
            return [[]]
        return [
            [first, *rest]
            for n in range(1, size + 1)
            for first in forests(n - 1)
            for rest in forests(size - n)
        ]

    def parents_of(children: list, parents: list[int], node: int) -> list[int]:
        for child in children:
            parents.append(node)
            parents_of(child, parents, len(parents) - 1)
        return parents

    return [to_tree(parents_of(children, [-1], 0)) for children in forests(num_nodes - 1)]


def seconds_of(
    verify: dict[int, float], draft: dict[int, float], overhead: float = 0.0
) -> StepSeconds:
    """One request without context: seconds by tokens."""
    passes = [PassSeconds(points, {1: 0.0}, "a model") for points in (verify, draft)]
    table = LatencyTable(passes[0], {"draft_0": passes[1]}, step_s=overhead)
    return StepSeconds(table)


def random_rows(chooser: random.Random, rising: bool) -> list[list[float]]:
    rows = []
    for _ in range(chooser.randint(1, 3)):
        row = [chooser.random() for _ in range(chooser.randint(1, 4))]
        total = sum(row) * (1 + chooser.random())
        rows.append(sorted([value / total for value in row], reverse=not rising))
    return rows


def random_seconds(chooser: random.Random, is_flat: bool) -> StepSeconds:
    slope = 0.0 if is_flat else chooser.choice([0.05, 0.5])
    draft = {1: 1.0, 64: 1.0 + 64 * slope}
    verify = {n: 10 + chooser.choice([0.05, 0.5]) * n for n in (1, 64)}
    return seconds_of(verify, draft, chooser.choice([0.0, 1.0]))


@pytest.mark.parametrize("rising", [False, True], ids=["heap", "tables"])
@pytest.mark.parametrize("seed", range(30))
def test_no_tree_is_faster_where_a_level_costs_the_same_for_any_rows(seed, rising):
    """Then the family of optimal trees by size and depth holds the optimum of all trees."""
    chooser = random.Random(seed)
    rows, seconds = random_rows(chooser, rising), random_seconds(chooser, is_flat=True)
    max_depth = chooser.randint(1, 6)
    trees = [tree for n in range(2, 8) for tree in all_trees(n) if tree.max_depth <= max_depth]
    want = max(expected_tokens(tree, rows) / seconds.of(tree) for tree in trees)
    choice = best_plan(rows, seconds, 7, max_depth)
    assert choice.speculative.tokens_per_s == pytest.approx(want, rel=1e-12)
    assert choice.speculative.tree.max_depth <= max_depth


@pytest.mark.parametrize("rising", [False, True], ids=["heap", "tables"])
@pytest.mark.parametrize("seed", every(3, range(30)))
def test_the_best_of_the_optimal_trees(seed, rising):
    """Where rows cost something, too: the best of all sizes and depths, each tree as it is."""
    chooser = random.Random(seed)
    rows, seconds = random_rows(chooser, rising), random_seconds(chooser, is_flat=False)
    trees = [best_tree(rows, n, depth) for n in range(2, 25) for depth in range(1, 7)]
    want = max(expected_tokens(tree, rows) / seconds.of(tree) for tree in trees)
    choice = best_plan(rows, seconds, 24, 6)
    found = choice.speculative
    assert found.tokens_per_s == pytest.approx(want, rel=1e-9)
    assert found.expected_tokens == expected_tokens(found.tree, rows)
    assert found.seconds == seconds.of(found.tree)


def test_figures_by_hand():
    seconds = seconds_of({1: 10, 3: 12}, {1: 1.0, 2: 3.0}, overhead=0.5)
    choice = best_plan([[0.5]], seconds, 3, 2)
    # the first level reads two tokens: 1 + .5 of 11 + .5 + 3;  1 + .5 + .25 of 12 + .5 + 3 + 1
    assert choice.speculative.tree == TokenTree.chain(2)
    assert choice.speculative.expected_tokens == 1.75
    assert choice.speculative.seconds == 16.5
    assert choice.speculative.tokens_per_s == 1.75 / 16.5
    assert choice.speculative.break_even_length == 1.65
    assert choice.speculative.speedup == pytest.approx(1.75 / 1.65)
    assert choice.best is choice.speculative
    assert choice.off.tokens_per_s == 0.1
    assert (choice.off.break_even_length, choice.off.speedup) == (1, 1)
    assert best_plan([[0.5]], seconds, 2, 2).speculative.seconds == 14.5


def test_off_wins_against_a_useless_draft():
    seconds = seconds_of(VERIFY, {1: 1.0})
    choice = best_plan([[0.05, 0.01]], seconds, 32, 4)
    assert choice.best is choice.off
    assert choice.best.tree == TokenTree.chain(0)
    assert choice.speculative.speedup < 1
    assert choice.speculative.break_even_length > choice.speculative.expected_tokens


def test_off_wins_a_tie_and_where_nothing_is_accepted():
    free = seconds_of({1: 10.0, 2: 15.0}, {1: 0.0})
    tie = best_plan([[0.5]], free, 2, 1)
    assert tie.speculative.speedup == 1
    assert tie.best is tie.off
    for nothing in ([[0.0]], [[0.0, 0.0], [0.5]], [[]]):
        choice = best_plan(nothing, free, 8, 4)
        assert choice.speculative is None
        assert choice.best is choice.off
    assert best_plan([[0.9]], free, 1, 4).speculative is None
    assert best_plan([[0.9]], free, 4, 0).speculative is None


def test_costs_shape_the_tree():
    """Free drafts make the tree deep; dear ones make it wide; dear nodes make it small."""
    table = [[0.6, 0.15, 0.08, 0.04]]
    deep = best_plan(table, seconds_of(VERIFY, {1: 0.0}), 64, 16)
    wide = best_plan(table, seconds_of(VERIFY, {1: 4.0, 64: 4.0}), 64, 16)
    small = best_plan(table, seconds_of({1: 10, 64: 640}, {1: 0.0}), 64, 16)
    assert deep.speculative.tree.max_depth > wide.speculative.tree.max_depth
    assert small.speculative.tree.num_nodes < wide.speculative.tree.num_nodes


def test_rows_fed_to_the_draft():
    assert fed_rows(TokenTree.chain(0)) == []
    assert fed_rows(TokenTree.chain(2)) == [1, 1]
    assert fed_rows(TokenTree.from_widths((3, 2))) == [1, 3]
    assert fed_rows(TokenTree((-1, 0, 0, 0, 1, 1, 3))) == [1, 2]


def test_interpolation():
    seconds = MeasuredSeconds({4: 10.0, 8: 14.0, 16: 16.0}, "verification")
    assert [seconds(n) for n in (1, 4, 5, 8, 12, 16)] == [10, 10, 11, 14, 15, 16]
    assert seconds(32) == 32


def test_seconds_that_fall_are_noise():
    seconds = MeasuredSeconds({8: 3.0, 2: 2.0, 1: 1.0, 4: 1.5, 16: 2.5}, "verification")
    assert [seconds(n) for n in (1, 2, 4, 8, 16)] == [1, 1.75, 1.75, 2.75, 2.75]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
@settings(deadline=None)
def test_the_rising_fit(values):
    """It rises, it keeps the sum, and no rising sequence on the same values is closer."""
    fit = MeasuredSeconds({i + 1: value for i, value in enumerate(values)}, "a level")
    made = [fit(i + 1) for i in range(len(values))]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(made))
    assert sum(made) == pytest.approx(sum(values), abs=1e-9)
    distance = sum((a - b) ** 2 for a, b in zip(made, values, strict=True))
    best = rising_distance(values, sorted({*values, *made}))
    assert distance <= best + 1e-6


def rising_distance(values: list[float], levels: list[float]) -> float:
    """Least squared distance of a rising sequence of these levels."""
    costs = [0.0] * len(levels)
    for value in values:
        least = float("inf")
        for i, level in enumerate(levels):
            least = min(least, costs[i])
            costs[i] = least + (level - value) ** 2
    return min(costs)


BAD = {
    "no point": ({}, {1: 1.0}, 0.0),
    "size 0": ({1: 1.0}, {0: 1.0}, 0.0),
    "no draft": ({1: 1.0}, {}, 0.0),
    "negative": ({1: 1.0, 2: -1.0}, {1: 1.0}, 0.0),
    "nothing": ({1: 0.0, 2: 1.0}, {1: 1.0}, 0.0),
    "nan": ({1: 1.0}, {1: float("nan")}, 0.0),
    "overhead": ({1: 1.0}, {1: 1.0}, -1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_seconds(name):
    verify, draft, overhead = BAD[name]
    with pytest.raises(ConfigError):
        seconds_of(verify, draft, overhead)


@pytest.mark.parametrize("requests", [1, 6])
def test_a_step_costs_what_an_iteration_of_the_table_does(requests):
    """Also trees; and of a lookup no pass but the target's."""
    table = dataclasses.replace(roofline(), step_s=1e-4)
    for source in ("draft_0", "suffix"):
        seconds = StepSeconds(table, drafter_of(source), requests, 300.0)
        for tree in (TokenTree.chain(0), TokenTree.chain(5), TokenTree.from_widths((3, 2, 1))):
            plan = SpecPlan.from_tree(tree, (source,)) if tree.num_nodes > 1 else OFF
            iteration = table.iteration([StepShape(plan, requests, 300.0 * requests)])
            assert seconds.of(tree) == pytest.approx(iteration)


def test_bad_sizes():
    seconds = seconds_of(VERIFY, {1: 1.0})
    with pytest.raises(TreeError):
        best_plan([[0.5]], seconds, 1025, 4)
    with pytest.raises(ConfigError):
        best_plan([[0.7, 0.7]], seconds, 8, 4)
