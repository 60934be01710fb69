"""What no graph may hold, written or read; and that no text of a file becomes code."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from typing import Any

import pytest
import torch
from torch import fx, nn

import specc.kernels.ops  # noqa: F401  registers the operators
from specc.artifact.graph_io import graph_from_json, graph_to_json, resolve_target, target_name
from specc.errors import EngineError, UnsupportedGraphError


@pytest.mark.parametrize(
    "target",
    [
        os.system,
        print,
        eval,
        operator.attrgetter,
        operator.truediv,
        torch.add,
        nn.functional.linear,
        torch.ops.aten.add,
        torch.ops.quantized.add.default,
        torch.ops.higher_order.cond,
    ],
    ids=lambda target: getattr(target, "__name__", str(target)),
)
def test_foreign_target_is_refused(target):
    with pytest.raises(UnsupportedGraphError) as caught:
        target_name(target)
    assert str(target) in caught.value.found
    assert "aten" in caught.value.needed
    assert caught.value.do
    graph = fx.Graph()
    graph.output(graph.call_function(target, ()))
    with pytest.raises(UnsupportedGraphError):
        graph_to_json(graph)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2), 1j, object(), b"bytes", {1, 2}, range(3)],
    ids=lambda v: type(v).__name__,
)
def test_foreign_argument_is_refused(value):
    graph = fx.Graph()
    x = graph.placeholder("x")
    # create_node checks less than call_function, as passes that build nodes by hand
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    node._args = (x, value)
    graph.output(node)
    with pytest.raises(UnsupportedGraphError) as caught:
        graph_to_json(graph)
    assert type(value).__name__ in caught.value.found


def test_attributes_and_methods_are_refused():
    for op, target in (("get_attr", "weight"), ("call_method", "size")):
        graph = fx.Graph()
        args = (graph.placeholder("x"),) if op == "call_method" else ()
        graph.output(graph.create_node(op, target, args))
        with pytest.raises(UnsupportedGraphError) as caught:
            graph_to_json(graph)
        assert op in caught.value.found


def test_graph_without_output_is_refused():
    graph = fx.Graph()
    graph.placeholder("x")
    with pytest.raises(UnsupportedGraphError):
        graph_to_json(graph)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "os.system",
        "os.path.join",
        "builtins.eval",
        "posix.system.default",
        "operator.attrgetter",
        "operator.methodcaller",
        "operator.call",
        "operator.__builtins__",
        "torch.load",
        "torch.ops.aten",
        "torch.hub.load",
        "quantized.add.default",
        "higher_order.cond.default",
        "aten",
        "aten.linear",
        "aten.linear.nothing",
        "aten.nothing.default",
        "aten.linear.default.__call__",
        "aten.linear.default.redispatch",
        "aten.__class__.mro",
        "aten.__class__.__subclasses__",
        "aten.__class__.__base__",
        "aten.__init__.__globals__",
        "aten.__getattr__.__globals__",
        "aten.__getattr__.__func__",
        "aten.__dict__.clear",
        "aten.name.upper",
        "aten.name.format",
        "aten.linear.__class__",
        "aten.linear.__call__",
        "aten.linear.__getattr__",
        "aten.linear.__init__",
        "aten.linear.__module__",
        "aten.linear.op",
        "aten.linear._op",
        "aten.linear.overloads",
        "prims.__dir__.__self__",
        "specc.__reduce__.__self__",
        " aten.linear.default",
        "aten.linear.default\n",
        "ATEN.linear.default",
    ],
    ids=lambda name: repr(name),
)
def test_hostile_name_is_refused(name):
    with pytest.raises(EngineError) as caught:
        resolve_target(name)
    assert repr(name) in caught.value.found
    assert caught.value.needed
    assert caught.value.do
    with pytest.raises(EngineError):
        graph_from_json(program({"name": "a", "op": "call_function", "target": name}))


def placeholder(name: Any = "x") -> dict[str, Any]:
    return {"name": name, "op": "placeholder"}


def program(*nodes: Any, output: Any = None) -> dict[str, Any]:
    return {"nodes": list(nodes), "output": output}


def call(**changes: Any) -> dict[str, Any]:
    entry = {
        "name": "a",
        "op": "call_function",
        "target": "aten.add.Tensor",
        "args": [{"node": "x"}, 1],
    }
    return entry | changes


# stands for any code that a file must not reach; `specc_test_marker` is its only trace
CODE = "__import__('sys').modules.__setitem__('specc_test_marker', None)"


@pytest.fixture
def no_marker():
    sys.modules.pop("specc_test_marker", None)
    yield
    sys.modules.pop("specc_test_marker", None)


HOSTILE = {
    "default-of-a-placeholder": program(placeholder(f"x={CODE}")),
    "annotation-of-a-placeholder": program(placeholder(f"x: {CODE}")),
    "second-argument": program(placeholder(f"x, y={CODE}")),
    "body-after-the-signature": program(placeholder(f"x):\n        {CODE}\n#")),
    "keyword": program(
        placeholder(), call(kwargs={f"alpha={CODE} or 1, out": None}), output={"node": "a"}
    ),
    "keyword-of-a-module": program(
        placeholder(),
        {
            "name": "a",
            "op": "call_module",
            "target": "inner",
            "args": [],
            "kwargs": {f"input={CODE} or 1, other": 1},
        },
        output={"node": "a"},
    ),
    "module-name": program(
        placeholder(),
        {"name": "a", "op": "call_module", "target": f'inner"), {CODE}, ("'},
    ),
    "node-name": program(placeholder(), call(name=f"a = {CODE}; b")),
    "string-argument": program(
        placeholder(), call(args=[{"node": "x"}, 1], kwargs={}), output=f"' + {CODE} + '"
    ),
    "dict-key": program(placeholder(), output={"dict": {f"' : {CODE}, '": 1}}),
    "dtype": program(placeholder(), output={"dtype": f"float32 or {CODE}"}),
    "float": program(placeholder(), output={"float": CODE}),
    "device": program(placeholder(), output={"device": CODE}),
    "value-note": program(placeholder() | {"val": f"int64[]\n{CODE}"}),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_text_of_a_file_becomes_code(data, no_marker):
    """A file may be refused, or do what a harmless one does; it may not run its own text."""
    # which error a refusal has to be is the business of test_malformed_file
    with contextlib.suppress(Exception):
        decoded = graph_from_json(data, {"inner": nn.Identity()})
        decoded(torch.ones(2))
    assert "specc_test_marker" not in sys.modules


MALFORMED = {
    "empty": {},
    "not-a-dict": [],
    "none": None,
    "text": "nodes",
    "no-output": {"nodes": []},
    "no-nodes": {"output": None},
    "nodes-none": {"nodes": None, "output": None},
    "node-is-text": program("x"),
    "node-is-none": program(None),
    "node-without-name": program({"op": "placeholder"}),
    "node-without-op": program({"name": "x"}),
    "name-is-a-number": program(placeholder(5)),
    "name-is-none": program(placeholder(None)),
    "name-is-a-list": program(placeholder(["x"])),
    "name-is-empty": program(placeholder("")),
    "name-is-a-keyword": program(placeholder("class")),
    "name-is-no-identifier": program(placeholder("1x")),
    "name-with-a-star": program(placeholder("*x")),
    "name-with-a-default": program(placeholder("x=1")),
    "name-twice": program(placeholder(), placeholder()),
    "call-named-as-a-placeholder": program(placeholder(), call(name="x")),
    "unknown-op": program(placeholder(), call(op="call_method", target="size")),
    "get-attr": program({"name": "a", "op": "get_attr", "target": "training"}),
    "op-output": program(placeholder(), call(op="output")),
    "target-missing": program(placeholder(), {"name": "a", "op": "call_function"}),
    "target-is-a-number": program(placeholder(), call(target=3)),
    "target-is-a-list": program(placeholder(), call(target=["aten"])),
    "args-none": program(placeholder(), call(args=None)),
    "args-number": program(placeholder(), call(args=3)),
    "kwargs-list": program(placeholder(), call(kwargs=[1])),
    "kwargs-none": program(placeholder(), call(kwargs=None)),
    "keyword-is-no-identifier": program(placeholder(), call(kwargs={"al pha": 1})),
    "unknown-node": program(placeholder(), call(args=[{"node": "y"}])),
    "later-node": program(call(args=[{"node": "x"}]), placeholder()),
    "node-is-a-list": program(placeholder(), output={"node": ["x"]}),
    "unknown-tag": program(output={"pickle": "abc"}),
    "two-tags": program(placeholder(), output={"node": "x", "float": "1"}),
    "no-tag": program(output={}),
    "float-is-a-word": program(output={"float": "lots"}),
    "float-is-a-list": program(output={"float": []}),
    "slice-is-short": program(output={"slice": []}),
    "slice-is-long": program(output={"slice": [1, 2, 3, 4]}),
    "slice-is-a-number": program(output={"slice": 1}),
    "dict-is-a-list": program(output={"dict": []}),
    "dtype-unknown": program(output={"dtype": "float33"}),
    "dtype-is-a-module": program(output={"dtype": "os"}),
    "dtype-is-a-function": program(output={"dtype": "load"}),
    "dtype-is-a-number": program(output={"dtype": 3}),
    "layout-is-a-dtype": program(output={"layout": "float32"}),
    "device-unknown": program(output={"device": "warp9"}),
    "device-is-a-list": program(output={"device": []}),
    "module-unknown": program({"name": "a", "op": "call_module", "target": "nothing"}),
    "module-missing": program({"name": "a", "op": "call_module"}),
    "module-by-a-path": program({"name": "a", "op": "call_module", "target": "inner.forward"}),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_file(data):
    with pytest.raises(EngineError) as caught:
        graph_from_json(data, {"inner": nn.Identity()})
    assert caught.value.found
    assert caught.value.needed
    assert "compile" in caught.value.do


def test_deeply_nested_argument():
    """Deeper than Python's stack: refused as any other malformed file."""
    value: Any = 1
    for _ in range(10 * sys.getrecursionlimit()):
        value = [value]
    with pytest.raises(EngineError):
        graph_from_json(program(output=value))
