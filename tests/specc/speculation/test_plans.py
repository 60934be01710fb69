"""Plans: names, sizes, what drafts must read again, and which combinations are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.artifact.manifest_entries import PlanEntry
from specc.drafters.block import BlockDraft
from specc.drafters.registry import drafter_of
from specc.errors import ConfigError
from specc.sampling.params import SamplingParams
from specc.sampling.rows import Rule
from specc.speculation.dynamic_tree import BudgetTree
from specc.speculation.plan_json import plan_from_json, plan_to_json
from specc.speculation.plans import (
    MERGE,
    OFF,
    VOTE,
    DynamicTree,
    SpecPlan,
)
from specc.speculation.tree import TokenTree

PAIR = ("draft_0", "draft_1")
MIXED = ("draft_1", "lookup-3", "suffix")
# levels of 3, 3 and 1 nodes, none of them an expansion
UNEVEN = TokenTree((-1, 0, 0, 0, 1, 1, 3, 6))
ALL_RULES = tuple(Rule)
NOISE_RULES = (Rule.COUPLED, Rule.DELTA)


def widths(*counts: int, drafts: tuple[str, ...] = ("draft_0",), combine: str = "") -> SpecPlan:
    return SpecPlan.from_widths(counts, drafts, combine)


def dynamic(*sizes: int, draft: str = "draft_0") -> SpecPlan:
    return SpecPlan.from_dynamic(DynamicTree(*sizes), draft)


PLANS = {
    "off": OFF,
    "chain-1": widths(1),
    "chain-4": widths(1, 1, 1, 1),
    "tree-2": widths(2),
    "tree-1-2": widths(1, 2),
    "tree-3-2-1": widths(3, 2, 1),
    "tree-10-1": widths(10, 1),
    "tree-n8-d3-90f5": SpecPlan.from_tree(UNEVEN),
    "draft1-chain-2": widths(1, 1, drafts=("draft_1",)),
    "draft1-tree-n8-d3-90f5": SpecPlan.from_tree(UNEVEN, ("draft_1",)),
    "lookup3-chain-4": widths(1, 1, 1, 1, drafts=("lookup-3",)),
    "lookup12-tree-3-2": widths(3, 2, drafts=("lookup-12",)),
    "suffix-chain-8": widths(*(1,) * 8, drafts=("suffix",)),
    "dynamic-16-4-4": dynamic(16, 4, 4),
    "dynamic-3-4-1": dynamic(3, 4, 1),
    "dynamic-3-1-5": dynamic(3, 1, 5),
    "draft1-dynamic-6-2-3": dynamic(6, 2, 3, draft="draft_1"),
    "budget-4-6-4": SpecPlan.from_dynamic(BudgetTree.of((4, 6, 4))),
    "draft1-budget-1-1": SpecPlan.from_dynamic(BudgetTree.of((1, 1)), "draft_1"),
    "merge-0+1-chain-2": widths(1, 1, drafts=PAIR, combine=MERGE),
    "merge-1+lookup3+suffix-tree-2-1": widths(2, 1, drafts=MIXED, combine=MERGE),
    "merge-0+1-tree-n8-d3-90f5": SpecPlan.from_tree(UNEVEN, PAIR, MERGE),
    "vote-0+1-chain-3": widths(1, 1, 1, drafts=PAIR, combine=VOTE),
    "vote-1+lookup3+suffix-chain-3": widths(1, 1, 1, drafts=MIXED, combine=VOTE),
}
# name → nodes, rows, depth, last tokens that a draft's first level reads, draft tokens by depth
SIZES = {
    "off": (1, 1, 0, 1, ()),
    "chain-1": (2, 2, 1, 2, (1,)),
    "chain-4": (5, 5, 4, 2, (1, 1, 1, 1)),
    "tree-2": (3, 3, 1, 2, (2,)),
    "tree-1-2": (4, 4, 2, 2, (1, 2)),
    "tree-3-2-1": (16, 16, 3, 2, (3, 6, 6)),
    "tree-10-1": (21, 21, 2, 2, (10, 10)),
    "tree-n8-d3-90f5": (8, 8, 3, 2, (3, 3, 1)),
    "draft1-chain-2": (3, 3, 2, 2, (1, 1)),
    "draft1-tree-n8-d3-90f5": (8, 8, 3, 2, (3, 3, 1)),
    # a lookup proposes a chain, however wide the tree
    "lookup3-chain-4": (5, 5, 4, 2, (1, 1, 1, 1)),
    "lookup12-tree-3-2": (3, 3, 2, 2, (1, 1)),
    "suffix-chain-8": (9, 9, 8, 2, (1,) * 8),
    "dynamic-16-4-4": (16, 16, 4, 2, (4, 11, 0, 0)),
    "dynamic-3-4-1": (3, 3, 1, 2, (2,)),
    # the draft reads the root and a node of each level but the last, more than are verified
    "dynamic-3-1-5": (3, 5, 5, 2, (1, 1, 0, 0, 0)),
    "draft1-dynamic-6-2-3": (6, 6, 3, 2, (2, 3, 0)),
    "budget-4-6-4": (15, 15, 3, 2, (4, 6, 4)),
    "draft1-budget-1-1": (3, 3, 2, 2, (1, 1)),
    "merge-0+1-chain-2": (5, 5, 2, 3, (2, 2)),
    "merge-1+lookup3+suffix-tree-2-1": (9, 9, 2, 3, (4, 4)),
    "merge-0+1-tree-n8-d3-90f5": (15, 15, 3, 4, (6, 6, 2)),
    "vote-0+1-chain-3": (4, 4, 3, 4, (1, 1, 1)),
    "vote-1+lookup3+suffix-chain-3": (4, 4, 3, 4, (1, 1, 1)),
}


@pytest.fixture(params=PLANS)
def named(request) -> tuple[str, SpecPlan]:
    return request.param, PLANS[request.param]


def test_names(named):
    name, plan = named
    assert plan.name == name
    assert plan.kind == name.split("-")[0]
    # they are names of files, too
    assert re.fullmatch(r"[a-z0-9+-]+", plan.name)


def test_sizes(named):
    name, plan = named
    found = (plan.num_nodes, plan.num_rows, plan.max_depth, plan.catch_up, plan.level_sizes)
    assert found == SIZES[name]
    assert SIZES.keys() == PLANS.keys()


def test_models(named):
    name, plan = named
    wanted = tuple(draft for draft in plan.drafts if draft.startswith("draft_"))
    assert plan.model_names == (() if name == "off" else wanted)
    assert plan.speculates == (name != "off")


def test_rules(named):
    """MSS and SWOR need every draw, in its order: reranking and voting lose some."""
    name, plan = named
    is_lossy = "dynamic" in name or name.startswith("vote")
    assert plan.rules == (NOISE_RULES if is_lossy else ALL_RULES)


@pytest.mark.parametrize("tile", [1, 3, 2000])
def test_trees_in_tiles(named, tile):
    """They have lost the logits; all else is as it was."""
    name, plan = named
    if name == "off":
        with pytest.raises(ConfigError, match="tiles of"):
            dataclasses.replace(plan, tile=tile)
        return
    tiled = dataclasses.replace(plan, tile=tile)
    assert tiled.rules == NOISE_RULES
    assert (tiled.name, tiled.num_nodes, tiled.num_rows) == (name, plan.num_nodes, plan.num_rows)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(tiled)))) == tiled != plan
    assert PlanEntry.of(tiled, "steps/x.json").plan == tiled
    with pytest.raises(ConfigError, match="in tiles of 0 nodes"):
        dataclasses.replace(plan, tile=0)


def test_tiles_cover_all_nodes_once():
    plan = SpecPlan.from_widths((2, 2))
    assert plan.tiles(7) == ((0, 7),)
    assert dataclasses.replace(plan, tile=3).tiles(7) == ((0, 3), (3, 6), (6, 7))
    assert dataclasses.replace(plan, tile=7).tiles(7) == ((0, 7),)
    assert dataclasses.replace(plan, tile=9).tiles(7) == ((0, 7),)


def test_whether_the_tree_is_known(named):
    name, plan = named
    is_data = re.match("(draft1-)?(dynamic|budget)|merge|vote|lookup|suffix", name)
    assert plan.is_static == (not is_data)
    if plan.is_static:
        assert plan.tree == plan.shape
        assert plan.tree.num_nodes == plan.num_nodes
    else:
        with pytest.raises(AssertionError):
            _ = plan.tree


def test_shapes():
    assert PLANS["tree-3-2-1"].tree == TokenTree.from_widths((3, 2, 1))
    assert PLANS["tree-n8-d3-90f5"].tree == UNEVEN
    assert OFF.tree == TokenTree((-1,))
    with pytest.raises(AssertionError):
        _ = PLANS["dynamic-16-4-4"].shape


def test_tree_of_a_draft():
    plan = PLANS["merge-1+lookup3+suffix-tree-2-1"]
    assert plan.tree_of(drafter_of("draft_1")) == TokenTree.from_widths((2, 1))
    assert (
        plan.tree_of(drafter_of("lookup-3"))
        == plan.tree_of(drafter_of("suffix"))
        == TokenTree.chain(2)
    )


def test_off_in_every_way():
    for plan in (
        SpecPlan.from_widths(()),
        SpecPlan.from_widths([], PAIR, MERGE),
        SpecPlan.from_tree(TokenTree.chain(0)),
        SpecPlan.from_tree(TokenTree((-1,)), PAIR, VOTE),
    ):
        assert plan == OFF


def test_an_expansion_is_named_after_its_widths():
    assert SpecPlan.from_tree(TokenTree.from_widths((3, 2, 1))) == PLANS["tree-3-2-1"]
    assert SpecPlan.from_tree(TokenTree.chain(4)) == PLANS["chain-4"]


def test_plans_are_keys():
    again = {plan_from_json(plan_to_json(plan)) for plan in PLANS.values()}
    assert again == set(PLANS.values())
    assert len(again) == len(PLANS)


def test_names_tell_plans_apart():
    """A plan's file is named after it."""
    singles = [
        ("draft_0",),
        ("draft_1",),
        ("draft_11",),
        ("lookup-1",),
        ("lookup-11",),
        ("suffix",),
    ]
    several = list(itertools.permutations(["draft_0", "draft_1", "lookup-1", "suffix"], 2))
    several += itertools.permutations(["draft_0", "draft_1", "draft_2"], 3)
    several += [("draft_0", "draft_11"), ("draft_0", "lookup-11")]
    plans = [widths(1, 1, drafts=drafts) for drafts in singles]
    plans += [dynamic(4, 2, 2, draft=draft) for draft in ("draft_0", "draft_1")]
    for combine in (MERGE, VOTE):
        plans += [widths(1, 1, drafts=drafts, combine=combine) for drafts in several]
    plans += [widths(1), widths(1, 1, 1), widths(11), widths(11, 1)]
    assert len({plan.name for plan in plans}) == len({*plans}) == len(plans)


# --- what is kept in files ---


def test_manifest_round_trip(named):
    _, plan = named
    entry = PlanEntry.of(plan, "steps/x.json")
    assert entry.plan == plan
    assert (entry.name, entry.file) == (plan.name, "steps/x.json")
    assert json.loads(json.dumps(dataclasses.asdict(entry))).keys() == plan_to_json(plan).keys() | {
        "file",
        "heads",
        "sharpness",
        "blocks",
        "kinds",
    }


# --- what plans promise to schedules and statistics ---


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    parents = [-1]
    for node in range(1, draw(st.integers(2, 14))):
        parents.append(draw(st.integers(max(0, parents[-1]), node - 1)))
    return TokenTree(tuple(parents))


EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True)


@EXAMPLES
@given(tree=trees())
def test_catch_up_covers_what_a_draft_lacks(tree):
    """Whatever is accepted: the draft has read all but the last of these tokens and the bonus."""
    plan = SpecPlan.from_tree(tree)
    lacks = []
    for node in range(tree.num_nodes):
        path = [i for i, above in enumerate(tree.ancestor_mask()[node].tolist()) if above]
        fed = list(itertools.takewhile(lambda i: i not in tree.leaves, path))
        lacks.append(len(path) - len(fed) + 1)
    assert max(lacks) == plan.catch_up
    # of several drafts, all of a path but the root may be another one's
    for combined in (MERGE, VOTE):
        if combined == MERGE or len(tree.leaves) == 1:
            assert SpecPlan.from_tree(tree, PAIR, combined).catch_up == tree.max_depth + 1


@EXAMPLES
@given(tree=trees(), drafts=st.sampled_from([("draft_1",), PAIR, MIXED]))
def test_level_sizes_count_every_draft_token(tree, drafts):
    combine = MERGE if len(drafts) > 1 else ""
    plan = SpecPlan.from_tree(tree, drafts, combine)
    assert sum(plan.level_sizes) == plan.num_nodes - 1
    assert len(plan.level_sizes) == plan.max_depth
    own = [len(level) for level in tree.levels[1:]]
    models = len(plan.models)
    wanted = [models * count + len(drafts) - models for count in own]
    assert list(plan.level_sizes) == wanted
    assert plan_from_json(plan_to_json(plan)) == plan


@EXAMPLES
@given(data=st.data(), k=st.integers(1, 6), depth=st.integers(1, 5))
def test_level_sizes_of_dynamic_trees(data, k, depth):
    most = DynamicTree(2, k, depth).num_candidates
    num_nodes = data.draw(st.integers(2, most))
    plan = dynamic(num_nodes, k, depth)
    assert sum(plan.level_sizes) == num_nodes - 1
    candidates = [k, *[k * k] * (depth - 1)]
    assert all(0 <= size <= limit for size, limit in zip(plan.level_sizes, candidates, strict=True))
    assert plan.num_rows == max(num_nodes, 1 + (depth - 1) * k)


@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.dynamic is None])
def test_the_largest_tree_has_every_node(name):
    """Nothing is proposed twice: every draft's whole tree hangs below the one root."""
    plan = PLANS[name]
    tree = plan.largest_tree
    assert tree.num_nodes == plan.num_nodes
    assert tuple(len(level) for level in tree.levels[1:]) == plan.level_sizes
    assert list(tree.parents) == sorted(tree.parents)
    drafts = plan.drafters if plan.combine == MERGE else plan.drafters[:1]
    if plan.speculates:
        leaves = sum(len(plan.tree_of(draft).leaves) for draft in drafts)
        assert len(tree.leaves) == leaves


@pytest.mark.parametrize("draft", ["draft_0", "draft_1"])
def test_rules_of_trees_that_are_data(draft):
    """Best-first by what was drawn stays refused; counts that were fixed before do not."""
    drawn = ("mss", "swor")
    best = SpecPlan.from_dynamic(DynamicTree(9, 3, 2), draft)
    shared = SpecPlan.from_dynamic(BudgetTree.of((3, 5)), draft)
    for rule in drawn:
        params = SamplingParams(temperature=1.0, rule=rule)
        assert not best.suits(params)
        assert shared.suits(params)
        assert not dataclasses.replace(shared, tile=2).suits(params)


def test_one_drafter_that_draws_once_is_enough_to_refuse_mss():
    """Of two that are merged: equal siblings share the draws of the one, whatever the other is."""
    plan = SpecPlan.from_widths((2, 2, 1), ("draft_0", "draft_1"), MERGE)
    biased, product = BlockDraft(5, 0, is_biased=True), BlockDraft(5, 0)
    without_mss = (Rule.COUPLED, Rule.DELTA, Rule.SWOR)
    assert plan.with_drafters({"draft_0": biased, "draft_1": product}).rules == without_mss
    assert plan.with_drafters({"draft_0": product, "draft_1": biased}).rules == without_mss
    assert plan.with_drafters({"draft_0": biased, "draft_1": biased}).rules == tuple(Rule)
