"""How many nodes are verified, by what a drafter says of its own tokens."""

from __future__ import annotations

import pytest
import torch

from specc.runtime.execution.confident_nodes import confident_nodes, cut_unlikely
from specc.runtime.scheduling.batch import StepGroup
from specc.speculation.block_drafts import OF_TOKEN, BlockDraft
from specc.speculation.live_nodes import says_confidence
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree

CHAIN = SpecPlan.from_widths((1, 1, 1))
# nodes 1 and 3 go on, 2 does not; 4 is the child of 1, 5 and 6 are those of 3; 7 is that of 5
TREE = SpecPlan.from_tree(TokenTree((-1, 0, 0, 0, 1, 3, 3, 5)))


def test_chains_end_before_the_first_unlikely_token() -> None:
    rows = [[0.9, 0.8, 0.7], [0.9, 0.2, 0.7], [0.1, 0.9, 0.9], [0.5, 0.5, 0.49]]
    assert confident_nodes(CHAIN, torch.tensor(rows), 0.5) == (4, 2, 1, 3)
    assert confident_nodes(CHAIN, torch.tensor(rows), 0.0) == (4, 4, 4, 4)
    assert confident_nodes(CHAIN, torch.tensor(rows), 1.0) == (1, 1, 1, 1)


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
    assert confident_nodes(TREE, torch.tensor([row]), 0.5) == (count,)


def test_no_more_than_there_were() -> None:
    """The policy may have left fewer nodes."""
    confidence = torch.tensor([[0.9, 0.2, 0.9], [0.9, 0.9, 0.9]])
    group = StepGroup(CHAIN, [])
    assert cut_unlikely(group, confidence, 0.5).live == (2, 4)
    group = StepGroup(CHAIN, [], live=(3, 1))
    assert cut_unlikely(group, confidence, 0.5).live == (2, 1)


def test_plans_that_say_it() -> None:
    plain = BlockDraft(5, 0, is_biased=True)
    telling = BlockDraft(5, 0, is_biased=True, hidden_columns=8, confidence=OF_TOKEN)
    assert says_confidence(CHAIN.with_heads((), {"draft_0": telling}))
    assert not says_confidence(CHAIN.with_heads((), {"draft_0": plain}))
    merged = SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE)
    dynamic = SpecPlan.from_dynamic(DynamicTree(6, 3, 3))
    for plan in (merged, dynamic):
        assert not says_confidence(plan.with_heads((), {"draft_0": telling}))
