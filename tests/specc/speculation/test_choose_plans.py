"""Drafts, trees and combinations as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specc.drafters.registry import drafters_of
from specc.errors import ConfigError, TreeError
from specc.speculation.choose_plans import choose_plans, parse_tree, policy_of, split_drafts
from specc.speculation.dynamic_tree import BudgetTree, DynamicTree
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.tree import TokenTree

TWO = ("draft_0", "draft_1")


@pytest.mark.parametrize(
    ("drafts", "models", "names"),
    [
        (None, [], ()),
        ("D/", ["D/"], ("draft_0",)),
        (Path("D"), [Path("D")], ("draft_0",)),
        (
            ["a", "lookup:3", "b", "suffix"],
            ["a", "b"],
            ("draft_0", "lookup-3", "draft_1", "suffix"),
        ),
        ("suffix", [], ("suffix",)),
        (["lookup:2", "lookup:12"], [], ("lookup-2", "lookup-12")),
    ],
)
def test_drafts_are_split_into_models_and_lookups(drafts, models, names):
    assert split_drafts(drafts) == (models, drafters_of(*names))


@pytest.mark.parametrize(
    ("drafts", "found"),
    [
        ("lookup:x", "--draft lookup:x"),
        ("lookup", "--draft lookup"),
        ("lookup:0", "--draft lookup:0"),
        ("lookup:100", "--draft lookup:100"),
        (["suffix", "D", "suffix"], "--draft suffix twice"),
    ],
)
def test_malformed_drafts(drafts, found):
    with pytest.raises(ConfigError) as error:
        split_drafts(drafts)
    assert error.value.found == found


def names_of(*args, **kwargs):
    return [plan.name for plan in choose_plans(*args, **kwargs)]


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (([], None), ["chain-4"]),
        (([], None, ()), []),
        (([], 0), ["off"]),
        (([], 3), ["chain-3"]),
        (([(3, 2, 1), (1, 1)], None), ["tree-3-2-1", "chain-2"]),
        (([DynamicTree(9, 3, 2)], None), ["dynamic-9-3-2"]),
        (([TokenTree((-1, 0, 0, 1))], None), ["tree-n4-d2-85b0"]),
        (([], None, ("lookup-3",)), ["lookup3-chain-8"]),
        (([], 5, ("suffix",)), ["suffix-chain-5"]),
        (([], None, TWO), ["merge-0+1-chain-4"]),
        (([(2, 1)], None, TWO, "merge"), ["merge-0+1-tree-2-1"]),
        (([], 4, (*TWO, "lookup-2"), "vote"), ["vote-0+1+lookup2-chain-4"]),
        (([], None, ("draft_0", "suffix"), "best"), ["chain-4", "suffix-chain-8"]),
        (([(3, 1)], None, ("lookup-3", "draft_0"), "best"), ["tree-3-1", "lookup3-chain-8"]),
    ],
)
def test_plans_that_options_name(args, names):
    assert names_of(*args) == names


@pytest.mark.parametrize(
    ("args", "error", "found"),
    [
        (([(2, 1)], 4), ConfigError, "both a tree"),
        (([], -1), ConfigError, "--num-speculative-tokens -1"),
        (([()], None), ConfigError, "an empty tree"),
        ((["3,2"], None), ConfigError, "tree '3,2'"),
        (([(3, 0)], None), TreeError, "tree widths 3,0"),
        (([], None, TWO, "average"), ConfigError, "--combine average"),
        (([], None, ("draft_0",), "vote"), ConfigError, "--combine vote with 1 draft"),
        (([], None, (), "merge"), ConfigError, "--combine merge with 0 drafts"),
        (([], None, TWO, "best"), ConfigError, "--combine best of draft_0, draft_1"),
        (([(2, 2)], None, TWO, "vote"), ConfigError, "a vote over trees"),
        (([DynamicTree(9, 3, 2)], None, TWO), ConfigError, "a dynamic tree of 2 drafts"),
        (([DynamicTree(9, 3, 2)], None, ("suffix",)), ConfigError, "a dynamic tree of suffix"),
        (([(16, 16, 4)], None, TWO, "merge"), TreeError, "more than 1024"),
        (([(8, 8, 8)], None, TWO, "merge"), TreeError, "of 1169 nodes"),
    ],
)
def test_options_that_contradict_each_other(args, error, found):
    with pytest.raises(error) as caught:
        choose_plans(*args)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("3,2,1", (3, 2, 1)),
        ("1", (1,)),
        ("dynamic:16,4,4", DynamicTree(16, 4, 4)),
        ("budget:4,6,4", BudgetTree.of((4, 6, 4))),
    ],
)
def test_parse_tree(text, tree):
    assert parse_tree(text) == tree


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3,",
        "a",
        "dynamic:",
        "dynamic:3",
        "dynamic:a,b,c",
        "static:3,2",
        "dynamic:1,2,3,4",
        "budget:",
        "budget:4;6",
    ],
)
def test_malformed_trees(text):
    with pytest.raises(TreeError) as error:
        parse_tree(text)
    assert error.value.found == f"--tree {text}"


@pytest.mark.parametrize(
    ("levels", "found"),
    [
        ((), "a budget of levels (none)"),
        ((3, 0), "a budget of levels 3, 0"),
        ((1000, 30), "a budget of 1031 nodes"),
        ((64, 64), "a budget of 129 nodes, which have 4161 places"),
    ],
)
def test_budgets_that_cannot_be(levels, found):
    with pytest.raises(TreeError) as error:
        BudgetTree.of(levels)
    assert error.value.found.startswith(found)


def test_policy_follows_the_combination():
    drafts = (SpecPlan.from_widths((1, 1)),)
    assert [policy_of(how, drafts) for how in (None, "merge", "vote", "best")] == [
        "measured",
        "measured",
        "measured",
        "best",
    ]
    assert policy_of(None, ()) == policy_of(None, (OFF,)) == "fixed"
