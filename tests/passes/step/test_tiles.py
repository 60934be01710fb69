"""Tiles that a limit of logits asks for, and the rows that are counted for the memory plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specc.drafters.block import BlockDraft
from specc.drafters.medusa import MedusaHeads
from specc.errors import ConfigError
from specc.passes.step.tiles import logit_rows, pass_rows, tile_plan
from specc.speculation.plans import MERGE, OFF, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree

PAIR = ("draft_0", "draft_1")
TREE = SpecPlan.from_widths((3, 2, 1))  # 1 + 3 + 6 + 6 nodes, of which 1 + 3 + 6 have children
UNEVEN = SpecPlan.from_tree(TokenTree((-1, 0, 0, 0, 1, 3, 3, 6)))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(16, 3, 4))
MERGED = SpecPlan.from_widths((2, 2), PAIR, MERGE)
VOTED = SpecPlan.from_widths((1, 1, 1), PAIR, VOTE)
LOOKUP = SpecPlan.from_widths((1,) * 5, ("lookup-3",))


@pytest.mark.parametrize(
    ("plan", "target", "draft", "passes"),
    [
        (OFF, 1, 0, 0),
        # what children were drawn from stays until the tree is verified
        (TREE, 16, 1 + 3 + 6, 6),
        (UNEVEN, 8, 1 + 2 + 1, 2),
        (MERGED, 13, 1 + 2, 5 - 2),
        # no rule of these looks at it
        (DYNAMIC, 16, 3, 3),
        (VOTED, 4, 1, 4),
        (LOOKUP, 6, 0, 0),
        (replace(TREE, tile=4), 4, 4, 4),
        (replace(TREE, tile=99), 16, 6, 6),
        (replace(DYNAMIC, tile=2), 2, 2, 2),
        (replace(MERGED, tile=1), 1, 1, 3),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rows(plan, target, draft, passes):
    assert (logit_rows(plan, "target"), logit_rows(plan, "draft_0")) == (target, draft)
    assert pass_rows(plan, "draft_0") == passes
    assert pass_rows(plan, "target") == target
    assert logit_rows(plan, "draft_7") == pass_rows(plan, "draft_7") == 0


VIEW = "self_w64_s4"


@pytest.mark.parametrize(
    ("plan", "logits", "passes"),
    [
        # the levels' logits are the target's, too, and stay until the tree is verified
        (SpecPlan.from_widths((3, 2, 1), (VIEW,)), 16 + 1 + 3 + 6, 16),
        (SpecPlan.from_widths((2, 2), (VIEW, "draft_0"), MERGE), 13 + 1 + 2, 13),
        (SpecPlan.from_widths((2, 2), (VIEW, "self_w32_s0"), MERGE), 13 + 2 * (1 + 2), 13),
        # no rule looks at them
        (SpecPlan.from_dynamic(DynamicTree(16, 3, 4), VIEW), 16, 16),
        (SpecPlan.from_dynamic(DynamicTree(3, 4, 2), VIEW), 4, 4),
        (replace(SpecPlan.from_widths((3, 2, 1), (VIEW,)), tile=5), 5, 5),
        (SpecPlan.from_widths((1, 1, 1), (VIEW, "draft_0"), VOTE), 4, 4),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rows_of_views(plan, logits, passes):
    assert (logit_rows(plan, "target"), pass_rows(plan, "target")) == (logits, passes)
    assert logit_rows(plan, VIEW) == pass_rows(plan, VIEW) == 0


MB = 1 << 20


@pytest.mark.parametrize(
    ("plan", "rows", "tile"),
    [
        # all 16 nodes and the 10 that children were drawn from
        (TREE, 26, None),
        # which are let go of, for the tree to fit in one
        (TREE, 25, 16),
        (TREE, 16, 16),
        (TREE, 15, 8),
        (TREE, 7, 6),
        (TREE, 5, 4),
        (TREE, 1, 1),
        (DYNAMIC, 16, None),
        (DYNAMIC, 15, 8),
        (VOTED, 4, None),
        (MERGED, 13 + 6, None),
        (MERGED, 13 + 5, 13),
        (LOOKUP, 6, None),
        (LOOKUP, 5, 3),
        (OFF, 1, None),
        (replace(TREE, tile=3), 100, 3),
        (replace(TREE, tile=9), 5, 4),
        # of the draft's levels, which are wider than the tree
        (SpecPlan.from_dynamic(DynamicTree(4, 8, 3)), 8, None),
        (SpecPlan.from_dynamic(DynamicTree(4, 8, 3)), 7, 4),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_tiles_are_as_few_as_fit(plan, rows, tile):
    sizes = dict.fromkeys(("target", *PAIR), MB // 4)
    assert tile_plan(plan, sizes, 4, rows) == replace(plan, tile=tile)


def test_the_widest_row_of_the_models_that_take_part_counts():
    sizes = {"target": MB, "draft_0": 4 * MB, "draft_1": MB // 2}
    assert tile_plan(TREE, sizes, 1, 16).tile == 4
    other = SpecPlan.from_widths((3, 2, 1), ("draft_1",))
    assert tile_plan(other, sizes, 1, 16).tile == 16
    assert tile_plan(other, sizes, 1, 16 + 5).tile is None
    assert tile_plan(LOOKUP, sizes, 1, 6).tile is None
    assert tile_plan(TREE, sizes, 2, 16).tile == 2


@pytest.mark.parametrize("plan", [OFF, TREE], ids=["off", "tree"])
def test_not_one_node_of_each_sequence(plan):
    with pytest.raises(ConfigError) as caught:
        tile_plan(plan, {"target": 3 * MB // 2, "draft_0": MB}, 9, 13)
    assert caught.value.found.endswith("one node of each of 9 sequences take 13.5 MiB")
    assert caught.value.needed == "14 or more"
    assert caught.value.do == "pass --max-logits-mb 14, or lower --max-batch-size"
    tile_plan(plan, {"target": 3 * MB // 2, "draft_0": MB}, 9, 14)


def test_what_a_block_adds_to_its_tiles_is_within_the_limit():
    """Logits that depend on the token before: rows of all depths, and of those that they make."""
    tree = SpecPlan.from_widths((4, 3, 2, 1, 1))
    plan = tree.with_drafters({"draft_0": BlockDraft(6, 0, is_biased=True)})
    for limit in (12, 24, 40, 64, 200):
        tiled = tile_plan(plan, {"target": MB, "draft_0": MB}, 1, limit)
        rows = [logit_rows(tiled, model) for model in ("target", "draft_0")]
        assert (max if tiled.tile else sum)(rows) <= limit
    with pytest.raises(ConfigError, match=r"--max-logits-mb 6; a block of 5 tokens"):
        tile_plan(plan, {"target": MB, "draft_0": MB}, 1, 6)


@pytest.mark.parametrize(("limit", "advises_depth"), [(11, False), (12, True), (17, True)])
def test_medusa_heads_are_all_computed(limit, advises_depth):
    """Whatever the depth: fewer tokens help where a row more than there are heads fits."""
    block = MedusaHeads(5)
    plan = SpecPlan.from_widths((1,) * 4).with_drafters({"draft_0": block})
    sizes = {"target": MB // 64, "draft_0": MB // 64}
    with pytest.raises(ConfigError) as caught:
        tile_plan(plan, sizes, 128, limit)
    heads = "the logits of 5 Medusa heads, and of 4 depths in order, for each of 128 sequences take"
    assert caught.value.found == f"--max-logits-mb {limit}; {heads} 18.0 MiB"
    assert caught.value.needed.startswith("18 or more")
    assert ("--num-speculative-tokens" in caught.value.do) == advises_depth
    assert tile_plan(plan, sizes, 128, 18).tile is not None
    shallow = SpecPlan.from_widths((1,)).with_drafters({"draft_0": block})
    assert tile_plan(shallow, sizes, 128, 12).tile is not None


def test_views_are_cut_like_models():
    """A level of 48 nodes is wider than the limit, the tree's own tiles apart."""
    plan = SpecPlan.from_widths((48, 1), (VIEW,))
    tiled = tile_plan(plan, {"target": MB}, 1, 40)
    assert tiled.tile is not None
    assert logit_rows(tiled, "target") <= 40
    assert tile_plan(plan, {"target": MB}, 1, 97 + 49) == plan
    assert tile_plan(plan, {"target": MB}, 1, 97 + 48).tile is not None
