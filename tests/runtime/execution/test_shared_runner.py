"""Groups of which no more is verified than their drafters are sure of."""

from __future__ import annotations

import torch

from specc.drafters.block import OF_TOKEN, BlockDraft
from specc.runtime.execution.shared_runner import cut_unlikely
from specc.runtime.scheduling.batch import StepGroup
from specc.speculation.live_nodes import says_confidence
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan

CHAIN = SpecPlan.from_widths((1, 1, 1))


def test_no_more_than_there_were() -> None:
    """The policy may have left fewer nodes."""
    confidence = torch.tensor([[0.9, 0.2, 0.9], [0.9, 0.9, 0.9]])
    group = StepGroup(CHAIN, [])
    found = cut_unlikely(group, confidence, 0.5)
    assert (found.live, found.allowed) == ((2, 4), (4, 4))
    group = StepGroup(CHAIN, [], live=(3, 1))
    found = cut_unlikely(group, confidence, 0.5)
    assert (found.live, found.allowed) == ((2, 1), (3, 1))


def test_plans_that_say_it() -> None:
    plain = BlockDraft(5, 0, is_biased=True)
    telling = BlockDraft(5, 0, is_biased=True, hidden_columns=8, confidence=OF_TOKEN)
    assert says_confidence(CHAIN.with_drafters({"draft_0": telling}))
    assert not says_confidence(CHAIN.with_drafters({"draft_0": plain}))
    merged = SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE)
    dynamic = SpecPlan.from_dynamic(DynamicTree(6, 3, 3))
    for plan in (merged, dynamic):
        assert not says_confidence(plan.with_drafters({"draft_0": telling}))
