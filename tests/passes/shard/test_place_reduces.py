"""Sums over ranks stand where they have to, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from specc.passes.shard.place_reduces import place_reduces

aten = torch.ops.aten


def reduced(build: Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], fx.Node]) -> list[str]:
    """Names of the values that are summed, where a and b are parts and x is not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 3)
    a, b = (graph.call_function(aten.neg.default, (x,), name=name) for name in "ab")
    graph.output(build(graph, x, a, b))
    for node in graph.nodes:
        if node.op == "call_function":
            args = fx.map_arg(node.args, lambda item: item.meta["val"])
            node.meta["val"] = node.target(*args)
    return [node.name for node in place_reduces(graph, (a, b).__contains__, lambda _: False)]


def call(graph: fx.Graph, target: Callable[..., Tensor], *args: object) -> fx.Node:
    return graph.call_function(target, args)


def test_sums_stand_before_what_is_not_linear() -> None:
    assert reduced(lambda g, x, a, b: call(g, aten.relu.default, a)) == ["a"]
    assert reduced(lambda g, x, a, b: call(g, aten.mul.Tensor, a, b)) == ["a", "b"]
    assert reduced(lambda g, x, a, b: call(g, aten.mul.Tensor, a, a)) == ["a"]
    assert reduced(lambda g, x, a, b: call(g, aten.div.Tensor, x, a)) == ["a"]


def test_parts_travel_through_what_is_linear() -> None:
    def sum_of_two(g: fx.Graph, x: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
        scaled = call(g, aten.mul.Tensor, a, x)
        turned = call(g, aten.transpose.int, call(g, aten.transpose.int, b, 0, 1), 0, 1)
        total = g.call_function(aten.add.Tensor, (scaled, turned), name="total")
        return call(g, aten.relu.default, total)

    assert reduced(sum_of_two) == ["total"]


def test_what_all_ranks_have_is_added_to_a_sum() -> None:
    """Else each rank would add it."""
    assert reduced(lambda g, x, a, b: call(g, aten.add.Tensor, a, x)) == ["a"]
    assert reduced(lambda g, x, a, b: call(g, aten.add.Tensor, a, 1.0)) == ["a"]


def test_a_value_with_several_readers_is_summed_once() -> None:
    def twice(g: fx.Graph, x: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
        return call(g, aten.mul.Tensor, call(g, aten.neg.default, a), call(g, aten.relu.default, a))

    assert reduced(twice) == ["a"]


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_output_is_a_sum(name: str) -> None:
    found = reduced(lambda g, x, a, b: {"a": a, "b": b}[name])
    assert found == [name]
