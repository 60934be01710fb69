"""Which numbers of rows are measured of products; `test_estimate.py` holds them to real steps."""

from __future__ import annotations

import pytest

from specc.drafters.block import BlockDraft
from specc.runtime.backends.cuda.step_rows import step_rows
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.plans import MERGE, SpecPlan

OFF, CHAIN = SpecPlan.from_widths(()), SpecPlan.from_widths((1,) * 5)
TREE = SpecPlan.from_widths((3, 2))
BLOCKED = SpecPlan.from_widths((1, 1, 1)).with_drafters({"draft_0": BlockDraft(5, 0)})
MERGED = SpecPlan.from_widths((2, 2), ("draft_0", "draft_1"), MERGE)


@pytest.mark.parametrize(
    ("plans", "draft", "max_batch", "wanted"),
    [
        ([OFF], None, 1, (1,)),
        ([OFF], "draft_0", 1, ()),
        # the whole tree, of 6 nodes; a level of one node, after the two that were not seen
        ([OFF, CHAIN], None, 1, (1, 8)),
        ([OFF, CHAIN], "draft_0", 1, (1, 2)),
        ([CHAIN], "draft_1", 1, ()),
        ([TREE], None, 1, (16,)),
        ([TREE], "draft_0", 1, (1, 2, 4, 8)),
        # as many sequences as there may be, and fewer: 6, 12, 18
        ([CHAIN], None, 3, (8, 16, 32)),
        ([OFF], None, 5, (1, 2, 4, 8)),
        # the target drafts by itself, and verifies
        ([SpecPlan.from_widths((1,) * 5, ("self_w64_s4",))], None, 1, (1, 8)),
        # one pass of a block of 5 and 4 rows of context, and a row of logits for each depth
        ([BLOCKED], "draft_0", 1, (4, 16)),
        ([BLOCKED], "draft_0", 4, (4, 8, 16, 32, 64)),
        # whatever there can be
        ([MERGED], "draft_1", 1, (1, 2, 4, 8, 16)),
    ],
)  # fmt: skip
def test_rows(plans, draft, max_batch, wanted) -> None:
    assert step_rows(plans, draft, max_batch) == wanted


def test_a_dynamic_tree_may_have_any_rows() -> None:
    plan = SpecPlan("dynamic", dynamic=DynamicTree(num_nodes=8, top_k=2, depth=3))
    assert step_rows([plan], None, 1)[:4] == (1, 2, 4, 8)
