"""Hostile graphs are refused where they are read: whatever they call, and with what."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
import torch
from torch import fx

import specc.kernels.ops  # noqa: F401  registers the operators
from specc.artifact.graph_checks import MOST_ELEMENTS, MOST_NODES
from specc.artifact.graph_io import graph_from_json, store_graph
from specc.errors import EngineError, UnsupportedGraphError

X = {"node": "x"}


def call(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    entry = {"name": name, "op": "call_function", "target": target, "args": list(args)}
    return entry | ({"kwargs": kwargs} if kwargs else {})


def program(*nodes: Any, output: Any = None) -> dict[str, Any]:
    return {"nodes": [{"name": "x", "op": "placeholder"}, *nodes], "output": output}


def size(name: str = "n") -> dict[str, Any]:
    return call(name, "aten.sym_size.int", X, 0)


def tower(function: str, levels: int) -> list[dict[str, Any]]:
    """A number, and what comes of it and itself again and again."""
    nodes = [size("n0")]
    for level in range(levels):
        last = {"node": f"n{level}"}
        nodes.append(call(f"n{level + 1}", function, last, last))
    return nodes


HOSTILE: dict[str, tuple[Any, ...]] = {
    # operators
    "not-listed": (call("a", "aten.as_strided.default", X, [9], [1], 10**9),),
    "file": (call("a", "aten.from_file.default", "/etc/passwd"),),
    "sparse": (call("a", "aten._sparse_coo_tensor_unsafe.default", X, X, [3, 3]),),
    "in-place": (call("a", "aten.add_.Tensor", X, 1),),
    "out": (call("a", "aten.add.out", X, 1, out=X),),
    "collective": (call("a", "specc.gather_rows.default", X),),
    # arguments that there are not, twice, or too many
    "unknown-argument": (call("a", "aten.add.Tensor", X, 1, out=X),),
    "argument-twice": (call("a", "aten.add.Tensor", X, 1, other=X),),
    "too-many-arguments": (call("a", "aten.neg.default", X, 1),),
    "argument-missing": (call("a", "aten.index_select.default", X, 0),),
    # of another kind
    "number-for-a-list-of-tensors": (call("a", "aten.cat.default", 3),),
    "text-for-a-tensor": (call("a", "aten.neg.default", "x"),),
    "text-for-a-size": (call("a", "aten.view.default", X, ["x"]),),
    "tensor-for-a-size": (call("a", "aten.view.default", X, [X]),),
    "fraction-for-a-size": (call("a", "aten.view.default", X, [1.5]),),
    "infinity-for-a-size": (call("a", "aten.view.default", X, [{"float": "inf"}]),),
    "number-for-a-flag": (call("a", "aten.sum.dim_IntList", X, [0], 1),),
    "object-for-a-number": (call("a", "aten.add.Tensor", X, 1, alpha={"dict": {}}),),
    "slice-for-a-number": (call("a", "aten.select.int", X, 0, {"slice": [0, 1, 1]}),),
    "several-for-one": (
        call("a", "aten.split.Tensor", X, 1),
        call("b", "aten.neg.default", {"node": "a"}),
    ),
    "nothing-for-a-tensor": (
        call("a", "specc.record_tokens.default", X, X, X, X, X, X),
        call("b", "aten.neg.default", {"node": "a"}),
    ),
    # tensors of other kinds
    "quantized": (call("a", "aten.to.dtype", X, {"dtype": "qint8"}),),
    "complex128": (call("a", "aten.to.dtype", X, {"dtype": "complex128"}),),
    "sparse-layout": (call("a", "aten.zeros.default", [3], layout={"layout": "sparse_coo"}),),
    "nested-layout": (call("a", "aten.zeros_like.default", X, layout={"layout": "jagged"}),),
    "mkldnn-device": (call("a", "aten.zeros.default", [3], device={"device": "mkldnn"}),),
    "channels-last": (
        call("a", "aten.clone.default", X, memory_format={"memory_format": "channels_last"}),
    ),
    # ends the process where the least integer is divided by -1
    "truncated-quotient": (call("a", "aten.div.Tensor_mode", X, X, rounding_mode="trunc"),),
    "unknown-word": (call("a", "specc.act_and_mul.default", X, "x" * 10**6),),
    # numbers
    "beyond-int64": (call("a", "aten.select.int", X, 0, 2**63),),
    "beyond-int64-below": (call("a", "aten.add.Tensor", X, -(2**63) - 1),),
    "columns": (call("a", "specc.linear.default", X, X, None, 2**40),),
    "negative-nodes": (call("a", "specc.accept_winners.default", X, X, X, -2),),
    "children": (call("a", "specc.draft_children.default", X, 2**33, X, X, 0, X, X),),
    # what is made of numbers
    "full": (call("a", "aten.full.default", [10**9], 0),),
    "full-of-many-dimensions": (call("a", "aten.full.default", [2**10] * 4, 0),),
    "zeros": (call("a", "aten.zeros.default", [10**5, 10**5]),),
    "new-zeros": (call("a", "aten.new_zeros.default", X, [2**62]),),
    "arange": (call("a", "aten.arange.default", 10**9),),
    "arange-from": (call("a", "aten.arange.start_step", 0, 2**62, 1),),
    "arange-to-infinity": (call("a", "aten.arange.default", {"float": "inf"}),),
    "arange-to-nan": (call("a", "aten.arange.default", {"float": "nan"}),),
    "repeat": (call("a", "aten.repeat.default", X, [10**5, 10**5]),),
    "repeat-interleave": (call("a", "aten.repeat_interleave.self_int", X, 10**9),),
    "pad": (call("a", "aten.constant_pad_nd.default", X, [0, 10**9]),),
    "list-of-many": (call("a", "aten.cat.default", [X] * 5000),),
    # arithmetic of Python
    "text-times-a-number": (call("a", "operator.mul", "x", 10**10),),
    "list-times-a-number": (call("a", "operator.mul", [1, 2], 10**10),),
    "tensors-times-a-number": (
        call("a", "aten.split.Tensor", X, 1),
        call("b", "operator.mul", {"node": "a"}, 10**10),
    ),
    "sum-of-lists": (call("a", "operator.add", [1], [2]),),
    "tensor-in-arithmetic": (call("a", "operator.mul", X, X),),
    "format-of-a-text": (call("a", "operator.mod", "%9999999999d", 1),),
    "fraction-in-arithmetic": (size(), call("a", "operator.floordiv", {"node": "n"}, 0.5)),
    "divided-by-nothing": (size(), call("a", "operator.floordiv", {"node": "n"}, 0)),
    "remainder-by-nothing": (size(), call("a", "operator.mod", {"node": "n"}, 0)),
    "sums-of-one": (size(), call("a", "operator.add", {"node": "n"})),
    "tower-of-products": tuple(tower("operator.mul", 20)),
    "character-of-a-text": (call("a", "operator.getitem", "text", 0),),
    "part-of-a-number": (size(), call("a", "operator.getitem", {"node": "n"}, 0)),
    "part-named-by-text": (call("a", "operator.getitem", X, "T"),),
    "part-named-by-a-tensor": (call("a", "operator.getitem", X, X),),
    "module-of-numbers": ({"name": "a", "op": "call_module", "target": "inner", "args": [3]},),
}


@pytest.mark.parametrize("nodes", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_graph_is_refused(nodes):
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with pytest.raises(EngineError) as caught:
            graph_from_json(program(*nodes), {"inner": torch.nn.Identity()})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.found
    assert caught.value.do
    assert len(str(caught.value)) < 2000
    assert time.perf_counter() - begin < 2
    assert peak < 32 << 20


GOOD: dict[str, tuple[Any, ...]] = {
    "numbers-for-tensors": (call("a", "aten.mul.Tensor", X, 2.5),),
    "largest-slice": (call("a", "aten.slice.Tensor", X, 0, 1, 2**63 - 1),),
    "one-for-all-dimensions": (call("a", "aten.sum.dim_IntList", X, 0),),
    "size-in-a-shape": (size(), call("a", "aten.view.default", X, [{"node": "n"}, -1])),
    "few-sums": tuple(tower("operator.add", 60)),
    "few-products": tuple(tower("operator.mul", 3)),
    "largest-mask": (call("a", "aten.full.default", [MOST_ELEMENTS], 0),),
    "index-without-a-dimension": (call("a", "aten.index.Tensor", X, [None, X]),),
    "parts-of-a-split": (
        call("a", "aten.split.Tensor", X, 1),
        call("b", "operator.getitem", {"node": "a"}, -1),
        call("c", "aten.cat.default", {"node": "a"}),
    ),
}


@pytest.mark.parametrize("nodes", GOOD.values(), ids=GOOD.keys())
def test_what_engines_hold_is_read(nodes):
    # with its input and its output
    assert len(graph_from_json(program(*nodes)).graph.nodes) == len(nodes) + 2


def test_many_nodes_are_refused_before_they_are_made():
    nodes = [call(f"a{place}", "aten.neg.default", X) for place in range(MOST_NODES)]
    begin = time.perf_counter()
    with pytest.raises(EngineError, match=f"{MOST_NODES + 1} nodes, at most {MOST_NODES}"):
        graph_from_json(program(*nodes))
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("target", [torch.ops.aten.as_strided.default, torch.ops.aten.add.out])
def test_the_compiler_writes_nothing_that_would_be_refused(target):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x, [1], [1])))
    with pytest.raises(UnsupportedGraphError, match=r"as_strided|add\.out") as caught:
        store_graph(graph)
    assert "report the architecture" in caught.value.do
