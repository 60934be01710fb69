"""Trees that the target verifies in part: which plans have them, and how many nodes are where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specc.speculation.live_nodes import can_cut, live_levels, nodes_by_depth
from specc.speculation.plans import MERGE, OFF, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree

TREE = SpecPlan.from_tree(TokenTree((-1, 0, 0, 1, 1, 2, 3)))
TWO = ("draft_0", "draft_1")


@pytest.mark.parametrize(
    ("plan", "is_static"),
    [
        (TREE, True),
        (SpecPlan.from_widths((1, 1)), True),
        (OFF, False),
        (replace(TREE, tile=2), False),
        (SpecPlan.from_dynamic(DynamicTree(5, 2, 3)), False),
        (SpecPlan.from_widths((1, 1), TWO, MERGE), False),
        (SpecPlan.from_widths((1, 1), TWO, VOTE), False),
        (SpecPlan.from_widths((1, 1), ("lookup-3",)), False),
    ],
    ids=lambda value: value.name if isinstance(value, SpecPlan) else "",
)
def test_trees_that_are_known_before_they_are_drawn(plan: SpecPlan, is_static: bool) -> None:
    assert can_cut(plan) == is_static


def test_nodes_and_levels() -> None:
    assert nodes_by_depth(TREE) == (1, 3, 6, 7)
    assert [live_levels(TREE, live) for live in range(1, 8)] == [
        (), (1,), (2,), (2, 1), (2, 2), (2, 3), (2, 3, 1),
    ]  # fmt: skip
    assert live_levels(TREE, 7) == TREE.level_sizes
