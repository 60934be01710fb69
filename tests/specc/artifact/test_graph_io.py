"""Graphs as JSON: real exports there and back."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import specc.kernels.ops  # noqa: F401  registers the operators
from specc.artifact.graph_io import (
    describe_value,
    graph_from_json,
    graph_to_json,
    resolve_target,
    target_name,
)


def through_json(graph: fx.Graph, modules: dict[str, nn.Module] | None = None) -> fx.GraphModule:
    """Encode, print and parse as strict JSON, decode."""
    data = graph_to_json(graph)
    parsed = json.loads(json.dumps(data, allow_nan=False))
    assert parsed == data
    return graph_from_json(parsed, modules)


def flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, (list, tuple)):
        return [leaf for output in outputs for leaf in flat(output)]
    return [outputs]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


class Attention(nn.Module):
    """Symbolic sizes in views, a mask with infinities, dtype and device arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (
            part.view(x.shape[0], length, 2, 3).transpose(1, 2)
            for part in self.qkv(x).split(6, dim=-1)
        )
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        out = (0.7 * q @ k.transpose(-1, -2) + mask).softmax(-1) @ v
        return out.transpose(1, 2).reshape(x.shape[0], length, 6)


class Sizes(nn.Module):
    """Arithmetic on a symbolic size, slices, nested lists, several outputs, no float dtype."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        length = x.shape[1]
        steps = torch.arange(2 * length - 1, device=x.device, dtype=torch.int64)
        tail = x[:, 1:, 1:5:2]
        rows = length // 2 + length % 3 + 2
        joined = torch.cat([x.flip(1), x.new_zeros(x.shape[0], rows, 6)], dim=1)
        return steps, tail, joined, (x > 0).type_as(x)


class Index(nn.Module):
    """An index with None in a list of tensors, and infinities of both signs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(x.shape[1], device=x.device).flip(0)
        lower = torch.where(x > 0, x, float("-inf"))
        return x[:, rows], torch.clamp(lower, min=-1e30, max=float("inf"))


EXPORTS = {"linear": Mlp, "attention": Attention, "sizes": Sizes, "index": Index}


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_export_there_and_back(kind, dynamic):
    module = EXPORTS[kind]()
    length = torch.export.Dim("length", min=4, max=64)
    exported = torch.export.export(
        module,
        (torch.randn(2, 5, 6),),
        dynamic_shapes=({1: length},) if dynamic else None,
        strict=False,
    )
    decoded = through_json(exported.graph)
    weights = list(exported.state_dict.values())
    for size in (5, 4, 9) if dynamic else (5,):
        x = torch.randn(2, size, 6)
        want, got = flat(module(x)), flat(decoded(*weights, x))
        assert len(want) == len(got)
        for expected, actual in zip(want, got, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", EXPORTS)
def test_export_on_meta_keeps_its_device(kind):
    with torch.device("meta"):
        module, x = EXPORTS[kind](), torch.randn(2, 5, 6)
    exported = torch.export.export(module, (x,), strict=False)
    text = json.dumps(graph_to_json(exported.graph))
    decoded = graph_from_json(json.loads(text))
    outs = flat(decoded(*exported.state_dict.values(), x))
    assert all(out.device.type == "meta" for out in outs)


def test_second_round_trip_has_the_same_structure():
    """Node names may change once on loading; operators, arguments and order may not."""
    exported = torch.export.export(Attention(), (torch.randn(2, 5, 6),), strict=False)
    first = through_json(exported.graph)
    second = through_json(first.graph)
    assert first.code == second.code
    assert [n.target for n in first.graph.nodes if n.op == "call_function"] == [
        n.target for n in exported.graph.nodes if n.op == "call_function"
    ]


def test_values_are_described():
    length = torch.export.Dim("length", min=4, max=64)
    exported = torch.export.export(
        Mlp(), (torch.randn(1, 5, 6),), dynamic_shapes=({1: length},), strict=False
    )
    nodes = graph_to_json(exported.graph)["nodes"]
    value = next(node["val"] for node in nodes if node.get("target") == "aten.linear.default")
    assert value.startswith("float32[1, s")
    assert value.endswith(", 8]")
    described = [n.meta.get("described") for n in through_json(exported.graph).graph.nodes]
    assert value in described


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3]", id="tensor"),
        pytest.param(torch.tensor(1), "int64[]", id="scalar"),
        pytest.param([torch.zeros(1), None], "(float32[1], None)", id="list"),
        pytest.param(7, "7", id="size"),
        pytest.param(None, None, id="none"),
        pytest.param("text", None, id="other"),
    ],
)
def test_describe_value(value, text):
    assert describe_value(value) == text


def test_specc_operators_and_modules():
    """As a step program: a module call, specc operators, a dict as output."""
    graph = fx.Graph()
    hidden, tokens, parents = (graph.placeholder(n) for n in ("hidden", "tokens", "parents"))
    logits = graph.call_module("target", (hidden,))
    children = graph.call_function(torch.ops.specc.act_and_mul.default, (logits, "gelu_tanh"))
    winners = graph.call_function(torch.ops.aten.argmax.default, (logits, 1))
    winners = graph.call_function(torch.ops.aten.unsqueeze.default, (winners, 0))
    accepted = graph.call_function(
        torch.ops.specc.accept_winners.default, (winners, tokens, parents, 1)
    )
    path = graph.call_function(operator.getitem, (accepted, 0))
    graph.output({"children": children, "nested": {"path": path}, "list": [path, None]})
    target = nn.Linear(3, 8)
    args = (
        torch.randn(2, 3),
        torch.tensor([[1, 2]]),
        torch.tensor([[-1, 0]], dtype=torch.int32),
    )
    want = fx.GraphModule({"target": target}, graph)(*args)
    got = through_json(graph, {"target": target})(*args)
    assert got.keys() == want.keys()
    assert torch.equal(got["children"], want["children"])
    assert torch.equal(got["nested"]["path"], want["nested"]["path"])
    assert got["list"][1] is None


def output_of(value: Any) -> Any:
    """What a graph that only returns `value` returns after a round trip."""
    graph = fx.Graph()
    graph.output(value)
    return through_json(graph)()


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        None,
        0,
        -(2**63),
        2**63 - 1,
        0.1,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        "",
        "none",
        'quote " and \\ backslash',
        "node",
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.strided,
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.device("cpu"),
        torch.device("meta"),
        torch.device("cuda", 1),
        slice(None),
        slice(1, None, 2),
    ],
    ids=repr,
)
def test_constant(value):
    got = output_of(value)
    assert got == value
    assert type(got) is type(value)
    assert repr(got) == repr(value)


def test_nan():
    assert math.isnan(output_of(math.nan))


def test_nested_arguments():
    value = [1, [2.5, [None, "a"], []], {"k": [True, {"dtype": torch.int32}]}, math.inf]
    assert output_of(value) == value


@pytest.mark.parametrize("key", ["node", "float", "dtype", "slice", "dict", "device"])
def test_dict_with_a_key_that_looks_like_a_tag(key):
    assert output_of({key: "x"}) == {key: "x"}


def test_index_by_a_tuple():
    """`x[0, 1]` is one element; `x[[0, 1]]` would be two rows."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.getitem, (x, (0, 1))))
    x = torch.arange(12).view(3, 4)
    assert torch.equal(through_json(graph)(x), x[0, 1])


def test_keyword_arguments_and_slices_reach_the_call():
    graph = fx.Graph()
    x = graph.placeholder("x")
    rows = graph.call_function(operator.getitem, (x, slice(None, 2)))
    part = graph.call_function(torch.ops.aten.slice.Tensor, (rows, 1, 1))
    out = graph.call_function(torch.ops.aten.add.Tensor, (part,), {"other": part, "alpha": -2.5})
    graph.output(out)
    x = torch.randn(3, 4)
    torch.testing.assert_close(through_json(graph)(x), -1.5 * x[:2, 1:])


@pytest.mark.parametrize(
    "name", ["getitem", "add", "sub", "mul", "floordiv", "mod", "le", "lt", "ge", "gt", "eq"]
)
def test_python_operator(name):
    graph = fx.Graph()
    x = graph.placeholder("x")
    args = [graph.call_function(torch.ops.aten.sym_size.int, (x, dim)) for dim in (0, 1)]
    if name == "getitem":
        args = [graph.call_function(torch.ops.aten.split.Tensor, (x, 1)), 2]
    graph.output(graph.call_function(getattr(operator, name), tuple(args)))
    got, value = through_json(graph)(torch.ones(7, 2)), getattr(operator, name)
    assert torch.equal(got, torch.ones(1, 2)) if name == "getitem" else got == value(7, 2)


@pytest.mark.parametrize("function", [torch.sym_max, torch.sym_min], ids=["max", "min"])
def test_symbolic_bounds(function):
    graph = fx.Graph()
    size = graph.call_function(torch.ops.aten.sym_size.int, (graph.placeholder("x"), 0))
    graph.output(graph.call_function(function, (size, 4)))
    decoded = through_json(graph)
    assert [decoded(torch.ones(n)) for n in (3, 9)] == [function(n, 4) for n in (3, 9)]


@pytest.mark.parametrize("name", ["tokens", "linear", "add", "max", "input"])
def test_placeholder_keeps_its_name(name):
    """Stages of a step bind their inputs by name, whatever fx calls the node."""
    graph = fx.Graph()
    x = graph.placeholder(name)
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, 1)))
    decoded = through_json(graph)
    placeholders = [n.target for n in decoded.graph.nodes if n.op == "placeholder"]
    assert placeholders == [name]
    assert decoded(torch.ones(1)).item() == 2


def test_node_named_like_the_operator_of_another():
    """`add` is the name of a product: references follow the file, not fx's own numbering."""
    data = {
        "nodes": [
            {"name": "x", "op": "placeholder"},
            {
                "name": "add_tensor",
                "op": "call_function",
                "target": "aten.mul.Tensor",
                "args": [{"node": "x"}, 3],
            },
            {
                "name": "mul_tensor",
                "op": "call_function",
                "target": "aten.add.Tensor",
                "args": [{"node": "add_tensor"}, 1],
            },
        ],
        "output": [{"node": "mul_tensor"}, {"node": "add_tensor"}],
    }
    assert [out.item() for out in graph_from_json(data)(torch.tensor(2))] == [7, 6]


def test_mutation_survives():
    """An operator whose result is unused is kept: caches are written through such nodes."""
    graph = fx.Graph()
    cache, value = graph.placeholder("cache"), graph.placeholder("value")
    places = graph.placeholder("places")
    graph.call_function(torch.ops.aten.index_put_.default, (cache, [places], value))
    graph.output(value)
    cache = torch.zeros(2)
    through_json(graph)(cache, torch.ones(1), torch.tensor([1]))
    assert cache.tolist() == [0, 1]


@pytest.mark.parametrize(
    "target",
    [
        torch.ops.aten.linear.default,
        torch.ops.aten.sym_size.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.specc.commit_kv.default,
        operator.floordiv,
        torch.sym_max,
    ],
    ids=lambda target: getattr(target, "__name__", str(target)),
)
def test_name_there_and_back(target):
    assert resolve_target(target_name(target)) is target
