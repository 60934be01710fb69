"""Plans that cannot be: errors of three lines, before a step that would be wrong."""

from __future__ import annotations

import pytest

from specc.cost.best_tree import to_tree
from specc.drafters.registry import drafter_of, drafters_of
from specc.errors import ConfigError, EngineError, TreeError
from specc.speculation.plan_json import plan_from_json, plan_to_json
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import MAX_NODES, TokenTree
from tests.specc.test_config import assert_three_lines

PAIR = ("draft_0", "draft_1")


# levels of 3, 3 and 1 nodes, none of them an expansion
UNEVEN = TokenTree((-1, 0, 0, 0, 1, 1, 3, 6))


def widths(*counts: int, drafts: tuple[str, ...] = ("draft_0",), combine: str = "") -> SpecPlan:
    return SpecPlan.from_widths(counts, drafts, combine)


def dynamic(*sizes: int) -> SpecPlan:
    return SpecPlan.from_dynamic(DynamicTree(*sizes))


CHAIN = widths(1, 1, 1, 1)
TREE = SpecPlan.from_tree(UNEVEN)
DYNAMIC = dynamic(16, 4, 4)


def changed(plan: SpecPlan, **changes: object) -> object:
    return plan_to_json(plan) | changes


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({}, id="nothing"),
        pytest.param(None, id="none"),
        pytest.param([], id="list"),
        *(
            pytest.param(
                {k: v for k, v in plan_to_json(CHAIN).items() if k != key}, id=f"no-{key}"
            )
            for key in ("name", "widths", "parents", "dynamic", "drafts", "combine")
        ),
        pytest.param(changed(CHAIN, widths=3), id="widths-number"),
        pytest.param(changed(CHAIN, widths=["a"]), id="widths-text"),
        pytest.param(changed(CHAIN, drafts=[0]), id="drafts-number"),
        pytest.param(changed(CHAIN, dynamic={"num_nodes": 4}), id="dynamic-incomplete"),
        pytest.param(changed(CHAIN, dynamic=[4, 2, 2]), id="dynamic-list"),
        pytest.param(changed(CHAIN, parents=[-1, 0]), id="two-shapes"),
        pytest.param(
            changed(DYNAMIC, widths=[1]), id="widths-beside-dynamic"
        ),
    ],
)  # fmt: skip
def test_no_plan(data):
    with pytest.raises(EngineError) as caught:
        plan_from_json(data)
    assert_three_lines(caught.value, "a plan")


@pytest.mark.parametrize(
    ("data", "error", "found"),
    [
        pytest.param(changed(CHAIN, widths=[0]), TreeError, "widths 0", id="width"),
        pytest.param(changed(TREE, parents=[-1, 1]), TreeError, "parent 1", id="parent"),
        pytest.param(changed(TREE, parents=[0, 0]), TreeError, "parents (0, 0", id="root"),
        pytest.param(
            changed(DYNAMIC, dynamic={"num_nodes": 99, "top_k": 1, "depth": 2}),
            TreeError,
            "99 nodes out of 3",
            id="dynamic",
        ),
        pytest.param(changed(CHAIN, drafts=["draft"]), ConfigError, "'draft'", id="draft"),
    ],
)
def test_no_plan_that_can_be(data, error, found):
    """Also in an entry of the manifest."""
    with pytest.raises(error) as caught:
        plan_from_json(data)
    assert_three_lines(caught.value, found)


@pytest.mark.parametrize("counts", [(0,), (2, -1), (1024,), (2,) * 10], ids=str)
def test_bad_widths(counts):
    with pytest.raises(TreeError) as caught:
        widths(*counts)
    assert_three_lines(caught.value, ",".join(map(str, counts)))


@pytest.mark.parametrize(
    "draft",
    ["", "draft", "draft_", "draft-0", "draft_x", "lookup", "lookup-", "lookup-0", "lookup-100",
     "lookup-03", "lookup:3", "suffix-2", " suffix", "draft_0 ", "target"],
)  # fmt: skip
def test_unknown_drafts(draft):
    with pytest.raises(ConfigError) as caught:
        widths(1, 1, drafts=(draft,))
    assert_three_lines(caught.value, repr(draft))
    with pytest.raises(ConfigError):
        widths(1, 1, drafts=("draft_0", draft), combine=MERGE)


def test_known_drafts():
    for draft, ngram in {"lookup-1": 1, "lookup-99": 99, "suffix": None, "draft_0": None}.items():
        assert getattr(drafter_of(draft), "ngram", None) == ngram
        assert drafter_of(draft).is_asked == (draft == "draft_0")
        assert widths(1, drafts=(draft,)).drafts == (draft,)


@pytest.mark.parametrize(
    ("drafts", "combine", "found"),
    [
        pytest.param(PAIR, "", "2 drafts, combined by 'nothing'", id="two-and-no-way"),
        pytest.param(("draft_0",), MERGE, "1 drafts, combined by 'merge'", id="merge-of-one"),
        pytest.param(("draft_0",), VOTE, "1 drafts, combined by 'vote'", id="vote-of-one"),
        pytest.param(PAIR, "best", "combined by 'best'", id="another-way"),
        pytest.param(PAIR, "Merge", "combined by 'Merge'", id="capital"),
        pytest.param((), "", "(none)", id="no-draft"),
        pytest.param(("draft_0", "draft_0"), MERGE, "draft_0, draft_0", id="one-draft-twice"),
        pytest.param(
            ("suffix", "draft_0", "suffix"), VOTE, "suffix, draft_0, suffix", id="suffixes"
        ),
    ],
)
def test_drafts_that_cannot_be_combined(drafts, combine, found):
    with pytest.raises(ConfigError) as caught:
        widths(1, 1, drafts=drafts, combine=combine)
    assert_three_lines(caught.value, found)


@pytest.mark.parametrize("counts", [(2,), (1, 2), (2, 1), (1, 1, 3)], ids=str)
def test_a_vote_is_over_chains(counts):
    with pytest.raises(ConfigError) as caught:
        widths(*counts, drafts=PAIR, combine=VOTE)
    assert_three_lines(caught.value, f"{TokenTree.from_widths(counts).num_nodes} nodes")
    assert "--combine merge" in caught.value.do
    with pytest.raises(ConfigError):
        SpecPlan.from_tree(UNEVEN, PAIR, VOTE)


@pytest.mark.parametrize("drafts", [PAIR, ("lookup-3",), ("suffix",)], ids=str)
def test_a_dynamic_tree_is_of_one_model(drafts):
    with pytest.raises(ConfigError) as caught:
        SpecPlan(
            "dynamic",
            dynamic=DynamicTree(6, 2, 3),
            drafters=drafters_of(*drafts),
            combine=MERGE * (drafts == PAIR),
        )
    assert_three_lines(caught.value, drafts[0])


@pytest.mark.parametrize(
    "parents",
    [
        pytest.param((-1, 0, 1, 0), id="level-1-behind-level-2"),
        pytest.param((-1, 0, 0, 1, 2, 1), id="siblings-apart"),
        pytest.param((-1, 0, 0, 2, 1), id="children-in-another-order-than-their-parents"),
    ],
)
def test_nodes_out_of_order(parents):
    """Drafting numbers nodes level by level: another order would verify other tokens' parents."""
    with pytest.raises(TreeError) as caught:
        SpecPlan.from_tree(TokenTree(parents))
    assert_three_lines(caught.value, ", ".join(map(str, parents)))
    assert SpecPlan.from_tree(to_tree(parents)).num_nodes == len(parents)


@pytest.mark.parametrize(
    ("plan", "most"),
    [
        pytest.param(lambda n: widths(n), MAX_NODES - 1, id="width"),
        pytest.param(lambda n: widths(*(1,) * n), MAX_NODES - 1, id="chain"),
        pytest.param(
            lambda n: widths(*(1,) * n, drafts=("suffix", "lookup-2"), combine=MERGE),
            (MAX_NODES - 1) // 2,
            id="merged",
        ),
        pytest.param(
            lambda n: widths(n, drafts=(*PAIR, "draft_2"), combine=MERGE),
            (MAX_NODES - 1) // 3,
            id="merged-widths",
        ),
        pytest.param(lambda n: dynamic(n, 32, 4), MAX_NODES, id="dynamic-nodes"),
        # one row of the draft for each level but the last
        pytest.param(lambda n: dynamic(9, 2, n), MAX_NODES // 2, id="dynamic-rows"),
        # 1 + k + 63 k² candidates
        pytest.param(lambda n: dynamic(9, n, 64), 8, id="dynamic-candidates"),
    ],
)
def test_largest_plans(plan, most):
    assert plan(most).num_rows <= MAX_NODES
    with pytest.raises(TreeError) as caught:
        plan(most + 1)
    assert_three_lines(caught.value)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        pytest.param((1, 2, 2), "1 nodes", id="no-draft-token"),
        pytest.param((4, 0, 2), "top 0", id="no-child"),
        pytest.param((4, 2, 0), "depth 0", id="no-level"),
        pytest.param((-4, 2, 2), "-4 nodes", id="negative"),
        pytest.param((8, 2, 2), "8 nodes out of 7 candidates", id="more-nodes-than-candidates"),
        pytest.param((6, 4, 1), "6 nodes out of 5 candidates", id="one-level"),
        pytest.param((1025, 32, 4), "1025 nodes", id="too-many-nodes"),
    ],
)
def test_dynamic_trees_that_cannot_be(sizes, found):
    with pytest.raises(TreeError) as caught:
        DynamicTree(*sizes)
    assert_three_lines(caught.value, found)


@pytest.mark.parametrize(("k", "depth"), [(1, 1), (1, 4), (2, 3), (4, 4), (8, 2), (5, 1)])
def test_candidates_of_a_dynamic_tree(k, depth):
    """All of them can be verified, counted by growing the tree."""
    levels = [k]
    while len(levels) < depth:
        levels.append(k * min(k, levels[-1]))
    tree = DynamicTree(1 + sum(levels), k, depth)
    assert tree.num_candidates == tree.num_nodes
    assert tree.num_fed == 1 + sum(min(k, size) for size in levels[:-1])
