"""Layouts of the operators' table, read as relations between dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from specc.kernels import ops
from specc.kernels.operator import Cut, NoRule
from specc.passes.shard.cut_rules import apply_cut
from specc.passes.shard.relations import Relations

SHAPES = {"x": (6, 8), "weight": (3, 8, 10), "ends": (3,)}


@pytest.fixture
def call() -> fx.Node:
    """`grouped_mm` of 6 rows by 3 experts."""
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in SHAPES]
    for node in operands:
        node.meta["val"] = torch.empty(SHAPES[node.target], device="meta")
    node = graph.call_function(ops.grouped_mm, tuple(operands))
    node.meta["val"] = torch.empty(6, 10, device="meta")
    return node


def relations(node: fx.Node, rule: Cut | NoRule) -> Relations:
    found = Relations()
    apply_cut(found, node, "grouped_mm", rule)
    return found


def test_words_are_relations(call):
    x, weight, ends = call.args
    found = relations(call, ops.OPERATORS["grouped_mm"].cut)
    pairs = {(item.large, item.small) for item in found.relations}
    assert pairs == {
        ((x, 0), (call, 0)),
        ((x, 1), (weight, 1)),
        ((weight, 2), (call, 1)),
    }
    assert [element for element, _ in found.blocks] == [(weight, 0), (ends, 0)]
    assert {why for _, why in found.blocks} == {"experts are chosen by tokens"}
    assert found.contracted == {call: (x, 1)}


def test_words_in_front_are_one_each(call):
    found = relations(call, Cut({"x": "... *"}, "... *", "it goes over it"))
    x = call.args[0]
    assert [(item.large, item.small) for item in found.relations] == [((x, 0), (call, 0))]
    assert [element for element, _ in found.blocks] == [(x, 1), (call, 1)]


def test_a_layout_of_other_dimensions_is_no_layout(call):
    with pytest.raises(AssertionError, match="rows is not a layout of 2 dimensions"):
        relations(call, Cut({"x": "rows"}, "rows .", "nothing"))


def test_heads_are_the_first_named_dimensions(call):
    rule = Cut({"x": ". heads", "weight": "* . heads"}, ". .", "so", heads=("x", "weight"))
    x, weight, _ = call.args
    assert relations(call, rule).heads == {call: ((x, 1), (weight, 2))}


def test_without_a_rule_everything_stays_whole(call):
    found = relations(call, NoRule("nobody cuts it"))
    assert not found.relations
    assert len(found.blocks) == 2 + 3 + 1 + 2
    assert {why for _, why in found.blocks} == {"grouped_mm: nobody cuts it"}
