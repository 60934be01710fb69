"""How many nodes are verified, by what a drafter says of its own tokens."""

from __future__ import annotations

import random

import pytest
import torch

from specc.speculation.confidence import ConfidentNodes
from specc.speculation.live_nodes import nodes_by_depth
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree

CHAIN = SpecPlan.from_widths((1, 1, 1))
# nodes 1 and 3 go on, 2 does not; 4 is the child of 1, 5 and 6 are those of 3; 7 is that of 5
TREE = SpecPlan.from_tree(TokenTree((-1, 0, 0, 0, 1, 3, 3, 5)))


def counted(plan: SpecPlan, rows: list[list[float]], threshold: float) -> list[int]:
    found = ConfidentNodes(plan, threshold)(torch.tensor(rows))
    assert found.dtype == torch.int32
    return found.tolist()


def test_chains_end_before_the_first_unlikely_token() -> None:
    rows = [[0.9, 0.8, 0.7], [0.9, 0.2, 0.7], [0.1, 0.9, 0.9], [0.5, 0.5, 0.49]]
    assert counted(CHAIN, rows, 0.5) == [4, 2, 1, 3]
    assert counted(CHAIN, rows, 0.0) == [4, 4, 4, 4]
    assert counted(CHAIN, rows, 1.0) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ([0.9, 0.9, 0.9, 0.9], 8),
        ([0.2, 0.9, 0.9, 0.9], 1),
        # nobody goes on from depth 1
        ([0.9, 0.2, 0.2, 0.9], 4),
        # node 1 alone does, and its child has no children
        ([0.9, 0.9, 0.2, 0.9], 7),
        # node 3 alone does
        ([0.9, 0.2, 0.9, 0.9], 8),
        ([0.9, 0.2, 0.9, 0.2], 7),
    ],
)
def test_levels_of_a_tree(row: list[float], count: int) -> None:
    """Verified while some path down to them was likely at every node: root, 1, 3 and 5."""
    assert counted(TREE, [row], 0.5) == [count]


@pytest.mark.parametrize("seed", range(20))
def test_any_tree(seed: int) -> None:
    """As one walks down it, node by node."""
    chooser = random.Random(seed)
    parents = [-1, 0]
    for _ in range(chooser.randint(0, 12)):
        # level by level
        parents.append(chooser.randint(parents[-1], len(parents) - 1))
    tree = TokenTree(tuple(parents))
    plan = SpecPlan.from_tree(tree)
    fed = [node for node in range(tree.num_nodes) if node in parents]
    rows = [[chooser.random() for _ in fed] for _ in range(16)]
    wanted = []
    for row in rows:
        sure = dict(zip(fed, row, strict=True))

        def depth_below(node: int, sure: dict[int, float] = sure) -> int:
            if sure.get(node, 0.0) < 0.4:
                return 0
            return 1 + max(depth_below(child) for child in tree.children(node))

        wanted.append(nodes_by_depth(plan)[depth_below(0)])
    assert counted(plan, rows, 0.4) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_as_large_as_the_threshold(dtype: torch.dtype) -> None:
    """Compared as it is, not with the threshold rounded to its type."""
    value = torch.tensor([[0.7]], dtype=dtype)
    chain = SpecPlan.from_widths((1,))
    exact = float(value)
    assert exact != 0.7
    for threshold in (exact, 0.7):
        wanted = 2 if exact >= threshold else 1
        assert ConfidentNodes(chain, threshold)(value).tolist() == [wanted]
