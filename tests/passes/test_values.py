"""Calls that are alike share one value; whatever differs, they do not."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specc.passes.program import emit_call

aten = torch.ops.aten


def placeholders(graph: fx.Graph, *shapes: tuple[int, ...], dtype=torch.float32) -> list[fx.Node]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    found = []
    for i, shape in enumerate(shapes):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = mode.from_tensor(torch.empty(shape, dtype=dtype))
        found.append(node)
    return found


def test_calls_that_are_alike_share_a_value():
    graph = fx.Graph()
    first, second = placeholders(graph, (4, 8), (4, 8))
    values = [emit_call(graph, aten.sum.dim_IntList, x, [1]).meta["val"] for x in (first, second)]
    assert values[0] is values[1]
    assert tuple(values[0].shape) == (4,)


def test_calls_that_are_not_alike_have_values_of_their_own():
    graph = fx.Graph()
    x, other = placeholders(graph, (4, 8), (2, 8))
    (half,) = placeholders(graph, (4, 8), dtype=torch.bfloat16)
    target = aten.sum.dim_IntList
    calls = [
        emit_call(graph, target, x, [1]),
        emit_call(graph, target, x, [0]),
        emit_call(graph, target, x, [0], True),
        emit_call(graph, target, x, [0], keepdim=True),
        emit_call(graph, target, other, [1]),
        emit_call(graph, target, half, [1]),
        emit_call(graph, aten.mean.dim, x, [1]),
        emit_call(graph, target, emit_call(graph, aten.t.default, x), [1]),
    ]
    found = [(tuple(call.meta["val"].shape), call.meta["val"].dtype) for call in calls]
    shapes = [(4,), (8,), (1, 8), (1, 8), (2,), (4,), (4,), (8,)]
    dtypes = [torch.float32] * 5 + [torch.bfloat16] + [torch.float32] * 2
    assert found == list(zip(shapes, dtypes, strict=True))


def test_graphs_share_nothing():
    values = []
    for _ in range(2):
        graph = fx.Graph()
        (x,) = placeholders(graph, (4, 8))
        values.append(emit_call(graph, aten.relu.default, x).meta["val"])
    assert values[0] is not values[1]
    assert values[0].fake_mode is not values[1].fake_mode
