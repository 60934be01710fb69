"""Where sums over ranks stand in hand-made graphs, and what the check of them refuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from specc.kernels import ops
from specc.passes.shard.place_reduces import check_sums, place_reduces

aten = torch.ops.aten
Build = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


def graph_of(build: Build) -> tuple[fx.Graph, set[fx.Node]]:
    """X [6, 4] → two products that leave parts of sums → what `build` makes of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(6, 4)
    products = [graph.call_function(aten.mul.Tensor, (x, 2.0)) for _ in range(2)]
    graph.output(build(graph, *products))
    for node in graph.nodes:
        if node.op == "call_function":
            args = fx.map_arg(node.args, lambda item: item.meta["val"])
            node.meta["val"] = node.target(*args)
    return graph, set(products)


def call(graph: fx.Graph, target: Callable, *args: object) -> fx.Node:
    return graph.call_function(target, args)


def residual(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return call(graph, aten.relu.default, call(graph, aten.add.Tensor, a, b))


def moved(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    rows = call(graph, aten.slice.Tensor, call(graph, aten.t.default, a), 1, 0, 2)
    return call(graph, aten.tanh.default, call(graph, aten.view.default, rows, [4, 1, 2]))


def scaled(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return call(graph, aten.div.Tensor, call(graph, aten.mul.Tensor, a, 3.0), 2.0)


def product(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return call(graph, aten.mul.Tensor, a, b)


def square(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return call(graph, aten.mul.Tensor, a, a)


def plus_one(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return call(graph, aten.add.Tensor, a, 1.0)


def residual_of_all(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    x = next(iter(graph.nodes))
    return call(graph, aten.add.Tensor, x, a)


def reciprocal(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    x = next(iter(graph.nodes))
    return call(graph, aten.div.Tensor, x, a)


def floored(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return graph.call_function(aten.div.Tensor_mode, (a, 2.0), {"rounding_mode": "floor"})


def two_readers(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    turned = call(graph, aten.neg.default, a)
    return call(graph, aten.add.Tensor, turned, call(graph, aten.neg.default, turned))


CASES = [
    (residual, ["add_tensor"]),
    (moved, ["view_default"]),
    (scaled, ["div_tensor"]),
    (product, ["mul_tensor", "mul_tensor_1"]),
    (square, ["mul_tensor"]),
    (plus_one, ["mul_tensor"]),
    (reciprocal, ["mul_tensor"]),
    (two_readers, ["neg_default"]),
    (residual_of_all, ["mul_tensor"]),
]


@pytest.mark.parametrize(("build", "names"), CASES)
def test_sums_travel_as_far_as_they_can(build: Build, names: list[str]) -> None:
    graph, products = graph_of(build)
    found = place_reduces(graph, products.__contains__, lambda node: False)
    read = [node for node in found if node.users]
    assert [node.name for node in read] == names
    for node in found:
        with graph.inserting_after(node):
            total = graph.call_function(ops.all_reduce, (node,))
        total.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(total, lambda user, total=total: user is not total)
    check_sums(graph, products, ops.all_reduce)


def test_a_quotient_that_is_rounded_is_not_linear() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    floor = floored(graph, x, x)
    graph.output(floor)
    for node in (x, floor):
        node.meta["val"] = torch.ones(2)
    with pytest.raises(AssertionError, match=f"{floor.name} reads x"):
        check_sums(graph, {x}, ops.all_reduce)


def test_a_value_that_is_cut_reads_whole_sums() -> None:
    graph, products = graph_of(scaled)
    found = place_reduces(graph, products.__contains__, lambda node: node.name == "div_tensor")
    assert "div_tensor" not in [node.name for node in found]
    assert "mul_tensor_2" in [node.name for node in found]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (residual, "relu_default reads add_tensor"),
        (plus_one, "add_tensor reads mul_tensor"),
        (product, "mul_tensor_2 reads mul_tensor"),
    ],
)
def test_a_sum_that_is_missing_is_found(build: Build, told: str) -> None:
    graph, products = graph_of(build)
    with pytest.raises(AssertionError, match=told):
        check_sums(graph, products, ops.all_reduce)


def test_a_part_of_a_sum_does_not_leave() -> None:
    graph, products = graph_of(scaled)
    with pytest.raises(AssertionError, match="output reads div_tensor, a part of a sum"):
        check_sums(graph, products, ops.all_reduce)


def test_several_results_are_not_linear() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    halves = call(graph, aten.chunk.default, x, 2)
    x.meta["val"], halves.meta["val"] = torch.ones(4), torch.ones(4).chunk(2)
    graph.output(halves)
    with pytest.raises(AssertionError, match="chunk_default reads x, a part of a sum"):
        check_sums(graph, {x}, ops.all_reduce)


def test_a_sum_of_sums_is_found() -> None:
    graph, products = graph_of(plus_one)
    node = next(node for node in products if node.users)
    with graph.inserting_after(node):
        once = graph.call_function(ops.all_reduce, (node,))
    with graph.inserting_after(once):
        twice = graph.call_function(ops.all_reduce, (once,))
    for item in (once, twice):
        item.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(twice, lambda user: user not in (once, twice))
    told = re.escape(f"{twice.name} sums {once.name}, which is no part of a sum")
    with pytest.raises(AssertionError, match=told):
        check_sums(graph, products, ops.all_reduce)
