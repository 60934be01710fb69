"""A trace with copies of equal layers is the trace of all of them, node by node."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specc.artifact.graph_io import graph_to_json
from specc.passes.frontend import equal_layers, hf_model
from specc.passes.frontend import trace as trace_module
from specc.passes.frontend.equal_layers import groups_of_layers, is_same
from specc.passes.frontend.repeat_layers import Counts, equal_layers_once
from specc.passes.frontend.trace import trace
from specc.passes.pipeline import Pipeline
from specc.passes.program import Program, module_path
from tests import models
from tests.tiers import only

# the adapters of Zamba2 are by number of a layer, which `longer_config` does not say
HYBRIDS = tuple(name for name in models.HYBRIDS if name != "zamba2")
ALL = (
    *models.ARCHITECTURES, *models.MORE_ARCHITECTURES, *HYBRIDS, *models.ROTARY_VARIANTS,
    "gemma3-tied",
)  # fmt: skip
FEW = ("llama", "gemma3", "mixtral")


def longer_config(name: str) -> Any:
    """A tiny model with every kind of layer twice at least, where its configuration can say so."""
    kinds = getattr(models.tiny_config(name), "layer_types", None)
    try:
        if kinds:
            twice = list(kinds) * 2
            return models.tiny_config(name, num_hidden_layers=len(twice), layer_types=twice)
        return models.tiny_config(name, num_hidden_layers=4)
    except (ValueError, TypeError):
        return models.tiny_config(name)


def on_meta(name: str) -> nn.Module:
    try:
        return hf_model.build_on_meta(longer_config(name), torch.float32)
    except Exception:  # of layers that its configuration describes one by one
        return hf_model.build_on_meta(models.tiny_config(name), torch.float32)


def both_ways(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[Program, Program, Counts]:
    """Traces with copies and without, and how many layers were traced and copied in the first."""
    seen: list[Counts] = []

    @contextlib.contextmanager
    def counted(given: nn.Module) -> Iterator[Counts]:
        with equal_layers_once(given) as counts:
            yield counts
        seen.append(counts)

    @contextlib.contextmanager
    def in_full(given: nn.Module) -> Iterator[None]:
        yield

    programs = []
    for how in (in_full, counted):
        monkeypatch.setattr(trace_module, "equal_layers_once", how)
        programs.append(trace(model, "target"))
    return programs[1], programs[0], seen[0]


def described(program: Program) -> list[Any]:
    nodes = program.graph.nodes
    places = [(node.name, module_path(node), str(node.meta.get("val"))) for node in nodes]
    # messages of assertions, which are no operators of a program, name nodes that are gone
    places += [(str(x.target), str(x.args)) for x in nodes if "assert" not in str(x.target)]
    values = {name: value.tolist() for name, value in program.constants.items()}
    return [places, program.weights, values, program.runtime_inputs]


def rewritten(program: Program) -> Any:
    Pipeline().run(program)
    return graph_to_json(program.graph), program.weights, program.layers, program.caches


def assert_same_trace(first: Program, second: Program) -> None:
    assert described(first) == described(second)


def assert_same(first: Program, second: Program) -> None:
    assert_same_trace(first, second)
    assert rewritten(first) == rewritten(second)


@pytest.mark.parametrize("name", only(FEW, ALL))
def test_copies_are_what_a_trace_of_every_layer_has(name, monkeypatch):
    copied, full, counts = both_ways(on_meta(name), monkeypatch)
    assert_same(copied, full)
    if name in FEW:
        assert counts.copied > 0


def llama(change: Any = lambda layers: None) -> nn.Module:
    model: Any = hf_model.build_on_meta(longer_config("llama"), torch.float32)
    change(model.model.layers)
    return model


def other_attribute(layers):
    layers[2].self_attn.scaling = 0.5


def other_shape(layers):
    layers[2].mlp = copy.deepcopy(layers[2].mlp)
    for name, shape in (("gate_proj", (80, 64)), ("up_proj", (80, 64)), ("down_proj", (64, 80))):
        projection = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        setattr(layers[2].mlp, name, projection)


def other_tensors(layers):
    layers[2].mlp.up_proj.weight = layers[2].mlp.gate_proj.weight


def other_class(layers):
    class Own(LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) * 2.0

    layers[2].__class__ = Own


def other_bias(layers):
    layers[2].mlp.down_proj.bias = nn.Parameter(torch.empty(64, device="meta"))


@pytest.mark.parametrize(
    "change", [other_attribute, other_shape, other_tensors, other_class, other_bias]
)
def test_a_layer_that_is_another_is_traced(change, monkeypatch):
    model = llama(change)
    copied, full, counts = both_ways(model, monkeypatch)
    assert (counts.traced, counts.copied) in ((2, 2), (1, 2))  # one of another class is not counted
    assert_same_trace(copied, full)


def replaced_forward(layers):
    forward = layers[1].mlp.forward
    layers[1].mlp.forward = lambda x: forward(x) * 3.0


def hooked(layers):
    layers[1].mlp.register_forward_hook(lambda module, given, result: result * 3.0)


def shared(layers):
    layers[2] = layers[1]


def shared_part(layers):
    layers[2].mlp = layers[1].mlp


@pytest.mark.parametrize("change", [replaced_forward, hooked, shared, shared_part])
def test_layers_that_may_do_more_are_all_traced(change, monkeypatch):
    model = llama(change)
    assert groups_of_layers(model) == []
    copied, full, counts = both_ways(model, monkeypatch)
    assert counts.copied == 0
    assert_same_trace(copied, full)


class _Counting(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        type(self).calls += 1
        return x * self.weight * self.calls


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(_Counting() for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids, position_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_modules_of_somebody_else_are_all_traced():
    """They may count, as these do: what they multiply by is another number in each call."""
    model = _Model()
    assert groups_of_layers(model) == []
    _Counting.calls = 0
    program = trace(model, "target")
    assert _Counting.calls == 3
    factors = [x.args[1] for x in program.calls(torch.ops.aten.mul.Tensor)]
    assert [x for x in factors if isinstance(x, int)] == [1, 2, 3]


class _Converting(nn.Module):
    """Its second argument has this type already: afterwards it is what the conversion made."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x, scale):
        return x * scale.to(torch.float32) * self.weight


class _SharesAnArgument(_Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Converting() for _ in range(3))

    def forward(self, input_ids, position_ids):
        x, scale = self.embedding(input_ids), position_ids.unsqueeze(-1) * 0.5
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x)


def test_what_a_layer_converts_is_converted_for_the_next_one(monkeypatch):
    libraries = (*equal_layers._LIBRARIES, f"{__name__}.")
    monkeypatch.setattr(equal_layers, "_LIBRARIES", libraries)
    copied, full, counts = both_ways(_SharesAnArgument().eval(), monkeypatch)
    assert (counts.traced, counts.copied) == (1, 2)
    assert_same_trace(copied, full)


def test_a_traced_model_is_as_it_was():
    model = llama()
    before = [dict(vars(module)) for module in model.modules()]
    kinds = {type(module): set(vars(type(module))) for module in model.modules()}
    trace(model, "target")
    assert [dict(vars(module)) for module in model.modules()] == before
    assert {kind: set(vars(kind)) for kind in kinds} == kinds
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]


def test_values_are_the_same_if_nothing_tells_them_apart():
    one = object()
    for value in (1, 0.5, "a", None, torch.float16, (1, [2]), {"a": (1,)}, {1, 2}, one):
        assert is_same(value, copy.copy(value) if value is not one else one)
    for first, second in ((1, True), (1, 1.0), ([1], (1,)), ({"a": 1}, {"a": 2}), (one, object())):
        assert not is_same(first, second)
    assert not is_same({"a": 1, "b": 2}, {"b": 2, "a": 1})
