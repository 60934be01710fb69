"""A trace is flat, names its weights as the module does, and computes what the module computes."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from specc.errors import NotCausalLMError, UnsupportedGraphError
from specc.passes.frontend.buffer_values import buffer_values
from specc.passes.frontend.trace import trace
from specc.passes.program import RUNTIME_INPUTS
from tests.passes.modules import (
    Tiny,
    assert_same_numbers,
    dense_logits,
    program_logits,
    random_tokens,
)


class Scaled(Tiny):
    """With a buffer that is computed, as rotary frequencies are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 2.0] * 8), persistent=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def _init_weights(self, module):
        if module is self or isinstance(module, Scaled):
            module.scale.copy_(torch.tensor([0.5, 2.0] * 8))

    def after(self, x, positions):
        return x * self.scale


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return Scaled().eval()


@pytest.fixture(scope="module")
def program(model):
    return trace(model, "target")


def test_inputs_are_weights_constants_and_runtime_inputs(program):
    names = [node.target for node in program.graph.find_nodes(op="placeholder")]
    count = len(program.weights) + len(program.constants)
    assert set(names[:count]) == program.weights.keys() | program.constants.keys()
    assert names[count:] == [*RUNTIME_INPUTS, "geometry"]


def test_weights_have_the_names_shapes_and_dtypes_of_parameters(program, model):
    found = {weight.key: (weight.shape, weight.dtype) for weight in program.weights.values()}
    assert found == {
        name: (tuple(value.shape), value.dtype)
        for name, value in model.named_parameters()
        if name != "unused"
    }
    assert program.num_parameters == sum(p.numel() for p in model.parameters()) - 3


def test_only_tokens_and_positions_share_a_dynamic_size(program):
    sizes = {
        name: [str(size) for size in program.placeholder(name).meta["val"].shape]
        for name in RUNTIME_INPUTS
    }
    assert sizes["tokens"] == sizes["positions"]
    others = [size for name in RUNTIME_INPUTS[2:] for size in sizes[name]]
    assert len({*others, *sizes["tokens"]}) == len(others) + 1
    (output,) = program.graph.find_nodes(op="output")
    shape = output.args[0].meta["val"].shape
    assert (shape[0], str(shape[1]), shape[2]) == (1, sizes["tokens"][0], 13)


def test_same_numbers(program, model):
    assert_same_numbers(program, model)


def test_meta_trace_equals_the_trace_with_weights(program):
    with torch.device("meta"):
        model = Scaled()
    on_meta = trace(model, "target")
    assert [str(node.target) for node in on_meta.graph.nodes] == [
        str(node.target) for node in program.graph.nodes
    ]
    (name,) = on_meta.constants
    assert not on_meta.constants[name].is_meta
    torch.testing.assert_close(on_meta.constants[name], program.constants[name], rtol=0, atol=0)


def test_constant_is_a_copy(model):
    value = buffer_values(model, {"scale"})["scale"]
    value.zero_()
    assert model.scale.any()


class Positional(Tiny):
    """Names its inputs in its own way."""

    def forward(self, ids, where):
        return super().forward(ids, where)


class TupleOutput(Tiny):
    def forward(self, input_ids, position_ids):
        logits = super().forward(input_ids, position_ids)
        return logits, logits.sum()


class HandsOn(Tiny):
    """Does not name `use_cache`, and does what its configuration says where nobody passes it."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(use_cache=True)

    def forward(self, input_ids, position_ids, **kwargs):
        logits = super().forward(input_ids, position_ids)
        return logits * (2.0 if kwargs.get("use_cache", self.config.use_cache) else 1.0)


class UseCache(Tiny):
    def forward(self, input_ids, position_ids, use_cache=True):
        logits = super().forward(input_ids, position_ids)
        return logits * (2.0 if use_cache else 1.0)


@pytest.mark.parametrize("kind", [Positional, pytest.param(TupleOutput, marks=pytest.mark.slow)])
def test_other_signatures_same_numbers(kind):
    module = kind().eval()
    assert_same_numbers(trace(module, "target"), module)


@pytest.mark.parametrize("kind", [UseCache, pytest.param(HandsOn, marks=pytest.mark.slow)])
def test_use_cache_is_off(kind):
    module = kind().eval()
    program, tokens = trace(module, "target"), random_tokens()
    with torch.no_grad():
        want = module(tokens[None], torch.arange(len(tokens))[None], use_cache=False)
    torch.testing.assert_close(program_logits(program, module, tokens), want)


class OneInput(Tiny):
    def forward(self, x):
        return super().forward(x, x)


class IntegerOutput(Tiny):
    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, position_ids).argmax(-1, keepdim=True)


class FlatOutput(Tiny):
    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, position_ids)[0]


class NoTensor(Tiny):
    def forward(self, input_ids, position_ids):
        return 3


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (OneInput, "OneInput.forward cannot be called"),
        (IntegerOutput, "IntegerOutput returns torch.int64"),
        (FlatOutput, "FlatOutput returns torch.float32"),
        (NoTensor, "NoTensor returns no tensor"),
    ],
)
def test_what_is_no_language_model_is_refused(kind, found):
    with pytest.raises(NotCausalLMError) as caught:
        trace(kind().eval(), "target")
    assert caught.value.found.startswith(found)


class LastToken(Tiny):
    def project(self, x):
        return self.head(x[:, -1:])


class TokensFirst(Tiny):
    def project(self, x):
        return self.head(x).transpose(0, 1)


@pytest.mark.parametrize("kind", [pytest.param(LastToken, marks=pytest.mark.slow), TokensFirst])
def test_logits_of_other_shapes_are_refused(kind):
    with pytest.raises(NotCausalLMError):
        trace(kind().eval(), "target")


class DataDependent(Tiny):
    def after(self, x, positions):
        return x if positions.sum() > 3 else 2 * x


class FixedLength(Tiny):
    def after(self, x, positions):
        return x + x[:, :8]


@pytest.mark.parametrize("kind", [DataDependent, FixedLength])
def test_untraceable_models_are_refused_by_name(kind):
    with pytest.raises(UnsupportedGraphError) as caught:
        trace(kind().eval(), "target")
    assert caught.value.found.startswith(f"{kind.__name__} cannot be traced")
    assert "\n" not in caught.value.found


class Unset(Tiny):
    """A buffer that nothing fills where the model has no values, and no checkpoint either."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(16), persistent=False)

    def after(self, x, positions):
        return x * self.table


def test_buffer_without_value_is_refused():
    with torch.device("meta"):
        model = Unset()
    with pytest.raises(UnsupportedGraphError) as caught:
        trace(model, "target")
    assert "table has no value on the meta device" in caught.value.found


class Stored(Tiny):
    """A buffer that checkpoints hold, as those of routers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("correction", torch.ones(16))

    def after(self, x, positions):
        return x * self.correction

    def _init_weights(self, module):
        if module is self:
            module.correction.zero_()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_buffer_of_the_checkpoint_is_a_weight(device):
    with torch.device(device):
        model = Stored()
    program = trace(model, "target")
    assert ("correction",) in {weight.parameters for weight in program.weights.values()}
    assert not program.constants


class Text(nn.Module):
    """A model in a model; its `_init_weights` reads what the outer one does not have."""

    def __init__(self):
        super().__init__()
        self.factor = 3.0
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def _init_weights(self, module):
        if isinstance(module, Text):
            module.scale.fill_(self.factor)


class Outer(Tiny):
    """Has its buffer in a model of its own, as Gemma 3n has."""

    def __init__(self):
        super().__init__()
        self.text = Text()

    def after(self, x, positions):
        return x * self.text.scale

    def _init_weights(self, module):
        raise AttributeError("transformers asks the innermost model")


def test_the_innermost_model_fills_its_buffers():
    with torch.device("meta"):
        on_meta = Outer()
    (value,) = trace(on_meta, "target").constants.values()
    assert value.tolist() == 3.0


class NeighboringPlaces(Tiny):
    """Takes places by lists, which torch makes tensors of, on the device of the model."""

    def after(self, x, positions):
        parts = x.view(1, -1, 4, 4)
        taken = parts[:, :, [-1]] + parts[..., [-2], :] + parts[..., [0]]
        return x + (taken * parts[:, :, [1, 2]].sum(2, keepdim=True)).flatten(2)


def test_neighboring_places_are_slices():
    with torch.device("meta"):
        on_meta = NeighboringPlaces()
    model = NeighboringPlaces().eval()
    assert not trace(on_meta, "target").constants
    assert_same_numbers(trace(model, "target"), model)


class Number(Tiny):
    """As Gemma 3n makes a tensor of a number, and computes with it."""

    def after(self, x, positions):
        share = torch.tensor(0.95, dtype=torch.float32, device=x.device)
        return x * torch.distributions.Normal(0, 1).icdf(share)


def test_numbers_on_the_device_of_an_input_keep_their_values():
    torch.manual_seed(0)
    model, tokens = Number().eval(), random_tokens()
    with torch.device("meta"):
        on_meta = Number()
    program = trace(on_meta, "target")
    assert 0.95 in [round(value.item(), 4) for value in program.constants.values()]
    torch.testing.assert_close(
        program_logits(program, model, tokens)[0],
        dense_logits(model, tokens),
        rtol=1e-5,
        atol=1e-5,
    )


class ScatteredPlaces(Tiny):
    def after(self, x, positions):
        return x + x[..., [3, 1] * 8]


def test_places_without_values_are_refused():
    with torch.device("meta"):
        model = ScatteredPlaces()
    with pytest.raises(UnsupportedGraphError, match="has no values"):
        trace(model, "target")
    given = ScatteredPlaces().eval()
    assert_same_numbers(trace(given, "target"), given)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (AssertionError(), "AssertionError"),
        (ValueError("not enough values\nto unpack"), "ValueError: not enough values"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
    ],
)
def test_errors_of_a_forward(error, found) -> None:
    """Whatever it raises, the model is named, and what it said."""

    class Raising(Tiny):
        def after(self, x, positions):
            raise error

    with pytest.raises(UnsupportedGraphError) as caught:
        trace(Raising(), "target")
    assert caught.value.found == f"Raising cannot be traced: {found}"
