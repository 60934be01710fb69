"""Shapes of graphs before they run: what cannot run, or would take too much, is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from specc.errors import EngineError
from specc.runtime.backends.eager import rehearsal as module
from specc.runtime.backends.eager.rehearsal import Rehearsal
from tests.rehearsed_once import CHECK

aten = torch.ops.aten


def graph_of(*calls: tuple[Any, ...]) -> fx.Graph:
    """Calls one after the other, each of what the one before it returned; all are returned."""
    graph = fx.Graph()
    last, made = graph.placeholder("x"), []
    for target, *args in calls:
        last = graph.call_function(target, (last, *args))
        made.append(last)
    graph.output(made)
    return graph


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_BYTES", 1000)
    monkeypatch.setattr(module, "_TIMES", 0)
    monkeypatch.setattr(Rehearsal, "check", CHECK)


def test_shapes_are_those_of_a_run():
    graph = graph_of((aten.view.default, [3, 4]), (aten.sum.dim_IntList, [0], True))
    made = Rehearsal("g", graph).run([torch.ones(12, device="meta")])
    assert [tuple(value.shape) for value in made] == [(3, 4), (1, 4)]
    assert all(value.device.type == "meta" for value in made)


def test_what_cannot_run_names_the_node():
    graph = graph_of((aten.neg.default,), (aten.view.default, [5]))
    with pytest.raises(
        EngineError, match=r"view_default of g cannot run: RuntimeError: shape"
    ) as e:
        Rehearsal("g", graph).check([torch.ones(12)])
    assert e.value.do


def test_what_is_alive_is_counted_once():
    """Views take nothing, what is dead takes nothing any more."""
    views = [(aten.view.default, [100])] * 50
    Rehearsal("g", graph_of((aten.add.Tensor, 1), *views)).check([torch.ones(100)])
    graph = graph_of(*[(aten.add.Tensor, 1)] * 50)
    (output,) = graph.find_nodes(op="output")
    output.args = (output.args[0][-1],)
    Rehearsal("g", graph).check([torch.ones(100)])


def test_what_takes_too_much():
    graph = graph_of((aten.repeat.default, [3]))
    with pytest.raises(EngineError, match=r"values of 1\.2 KiB at a time; at most 1000 bytes"):
        Rehearsal("g", graph).check([torch.ones(100)])
    graph = graph_of(*[(aten.add.Tensor, 1)] * 3)
    with pytest.raises(EngineError, match=r"1\.2 KiB at a time"):
        Rehearsal("g", graph).check([torch.ones(100)])


def test_larger_inputs_are_looked_at():
    graph = graph_of((aten.repeat.default, [4]))
    rehearsal = Rehearsal("g", graph)
    for size in (10, 60, 20):
        rehearsal.check([torch.ones(size)])
    with pytest.raises(EngineError, match="at a time"):
        rehearsal.check([torch.ones(100)])
    # what was refused is refused again
    with pytest.raises(EngineError, match="at a time"):
        rehearsal.check([torch.ones(100)])


def test_inputs_as_large_as_before_are_not(monkeypatch):
    rehearsal = Rehearsal("g", graph_of((aten.neg.default,)))
    rehearsal.check([torch.ones(5, 7)])
    rehearsal.check([torch.ones(6, 3)])
    monkeypatch.setattr(rehearsal, "run", lambda inputs: pytest.fail("they were"))
    for shape in ((5, 7), (1, 1), (6, 7)):
        rehearsal.check([torch.ones(shape)])


class _Doubles(nn.Module):
    def rehearse(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])


@pytest.mark.parametrize("size", [100, 150])
def test_models_are_asked(size):
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_module("model", (x,))
    graph.output([made, graph.call_function(aten.neg.default, (x,))])
    rehearsal = Rehearsal("g", graph, {"model": _Doubles()})
    if size == 100:
        with pytest.raises(EngineError, match=r"1\.2 KiB at a time"):
            rehearsal.check([torch.ones(size)])
    # of a model that does not know, nothing is known
    Rehearsal("g", graph, {"model": nn.Identity()}).check([torch.ones(size)])


def test_places_are_given_the_device():
    graph = graph_of((aten.zeros_like.default,))
    (node,) = graph.find_nodes(op="call_function", target=aten.zeros_like.default)
    node.kwargs = {"device": torch.device("cpu"), "dtype": torch.int64}
    (made,) = Rehearsal("g", graph).run([torch.ones(3, device="meta")])
    assert (made.device.type, made.dtype) == ("meta", torch.int64)
