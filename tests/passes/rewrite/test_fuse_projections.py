"""Linear layers that read one input become one; its weight is the concatenation of theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels import ops
from specc.passes.pipeline import TRACED_PHASES
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.fuse_projections import FuseGateUp, FuseQKV, FuseRecurrent
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.recover_linear import RecoverLinear
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.models import build_model
from tests.passes.modules import (
    Tiny,
    assert_same_numbers_flat,
    aten,
    compiled,
    program_logits,
    random_tokens,
    reasons,
    rewrites,
    traced,
)
from tests.state_session import Sessions
from tests.tiers import only


def run(kind, *first):
    """Module, program, its logits before fusion, and the results of both passes."""
    torch.manual_seed(0)
    model = kind().eval()
    passes = Normalize(), *first, ClassifyMasks(), RewriteTreeAttention(), SelectLogits()
    program, _ = traced(model, *passes)
    before = program_logits(program, model, random_tokens())
    return model, program, before, FuseQKV().run(program), FuseGateUp().run(program)


def keys(program):
    return {weight.key: weight for weight in program.weights.values()}


def slices(program, count):
    found = program.calls(aten.slice.Tensor)[:count]
    assert len({node.args[0] for node in found}) == 1
    return [node.args[2:4] for node in found]


class Biased(Tiny):
    has_bias = True


class NormedHeads(Tiny):
    """Norm and rotation between projection and attention, as in Qwen3."""

    def operands(self, x):
        q, k, v = super().operands(x)
        q, k = (F.layer_norm(item, (self.head_dim,)) for item in (q, k))
        return q, torch.cat([-k[..., 2:], k[..., :2]], -1) + k, v


class CrossedOrder(Tiny):
    """The module calls v, then k, then q."""

    def operands(self, x):
        v, k = self.repeat(self.split(self.v(x))), self.repeat(self.split(self.k(x)))
        return self.split(self.q(x)), k, v


@pytest.mark.parametrize(
    "kind",
    only(
        (Biased, CrossedOrder),
        [Tiny, Biased, NormedHeads, CrossedOrder],
    ),
)
def test_qkv_fires_and_computes_the_same(kind):
    model, program, before, result, _ = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    weight = keys(program)["q.weight+k.weight+v.weight"]
    assert weight.parameters == ("q.weight", "k.weight", "v.weight")
    assert weight.shape == (16 + 8 + 8, 16)
    assert {"q.weight", "k.weight", "v.weight"}.isdisjoint(keys(program))
    assert ("q.bias+k.bias+v.bias" in keys(program)) == (kind is Biased)
    assert sorted(slices(program, 3)) == [(0, 16), (16, 24), (24, 32)]
    after = program_logits(program, model, random_tokens())
    torch.testing.assert_close(after, before)
    assert_same_numbers_flat(program, model)
    assert program.num_parameters == sum(p.numel() for p in model.parameters())


class Turned(Tiny):
    """q, k and v by weights [in, out]."""

    is_mixed = False

    def __init__(self):
        super().__init__()
        self.wq = nn.Parameter(torch.randn(16, 16))
        self.wk = nn.Parameter(torch.randn(8, 16) if self.is_mixed else torch.randn(16, 8))
        self.wv = nn.Parameter(torch.randn(16, 8))
        del self.q, self.k, self.v

    def operands(self, x):
        q, k, v = x @ self.wq, x @ (self.wk.T if self.is_mixed else self.wk), x @ self.wv
        return self.split(q), self.repeat(self.split(k)), self.repeat(self.split(v))


class Mixed(Turned):
    is_mixed = True


def test_weights_that_are_stored_transposed_are_fused():
    model, program, before, result, _ = run(Turned, RecoverLinear())
    assert (result.rewrites, result.declined) == (1, [])
    weight = keys(program)["wq+wk+wv"]
    assert (weight.shape, weight.is_turned) == ((16 + 8 + 8, 16), True)
    torch.testing.assert_close(program_logits(program, model, random_tokens()), before)
    assert_same_numbers_flat(program, model)


def test_weights_that_are_stored_in_different_ways_are_not_fused():
    model, program, _, result, _ = run(Mixed, RecoverLinear())
    assert result.rewrites == 0
    assert "stored transposed and some are not" in result.declined[0].reason
    assert_same_numbers_flat(program, model)


class MixedBias(Tiny):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(self.width, 8)


class WeightElsewhere(Tiny):
    def after(self, x, positions):
        return x + self.v.weight.sum()


class SharedModule(Tiny):
    def __init__(self):
        super().__init__()
        self.v = self.k


class OtherInput(Tiny):
    def operands(self, x):
        q, k, _ = super().operands(x)
        return q, k, self.repeat(self.split(self.v(F.layer_norm(x, (self.width,)))))


class ComputedWeight(Tiny):
    def operands(self, x):
        q, k, _ = super().operands(x)
        return q, k, self.repeat(self.split(F.linear(x, 2 * self.v.weight)))


class FusedAlready(Tiny):
    """One projection for all three, as in Phi-3."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 32, bias=False)

    def operands(self, x):
        q, k, v = self.qkv(x).split([16, 8, 8], -1)
        return self.split(q), self.repeat(self.split(k)), self.repeat(self.split(v))


class Transposed(Tiny):
    """x @ W + b with W [in, out], of which no pass has made a linear layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 32))
        self.offset = nn.Parameter(torch.randn(32))

    def operands(self, x):
        flat = torch.addmm(self.offset, x.view(-1, 16), self.table)
        q, k, v = flat.view(1, -1, 32).split([16, 8, 8], -1)
        return self.split(q), self.repeat(self.split(k)), self.repeat(self.split(v))


@pytest.mark.parametrize(
    ("kind", "reason"),
    only(
        (WeightElsewhere, OtherInput, FusedAlready),
        [
            (MixedBias, "some of the linear layers have a bias and some have none"),
            (WeightElsewhere, "parameter v.weight is used elsewhere too"),
            (SharedModule, "is used elsewhere too"),
            (OtherInput, "the linear layers read different inputs"),
            (ComputedWeight, "mul is computed, not a parameter"),
            (FusedAlready, "one linear layer already computes all of them"),
            (Transposed, "q, k or v does not come from a linear layer"),
        ],
    ),
)
def test_qkv_is_declined_with_reason(kind, reason):
    model, program, _, result, _ = run(kind)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert reason in declined.reason
    assert declined.node == program.calls(ops.tree_attention)[0].name
    assert all(len(weight.parameters) == 1 for weight in program.weights.values())
    assert_same_numbers_flat(program, model)


class Silu(Tiny):
    act = staticmethod(F.silu)
    gate_bias = up_bias = False

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 24, bias=self.gate_bias)
        self.up = nn.Linear(16, 24, bias=self.up_bias)
        self.down = nn.Linear(24, 16)

    def after(self, x, positions):
        return x + self.down(self.act(self.gate(x)) * self.up(x))


class Gelu(Silu):
    act = staticmethod(lambda x: F.gelu(x, approximate="tanh"))


class UpFirst(Silu):
    gate_bias = up_bias = True

    def after(self, x, positions):
        return x + self.down(self.up(x) * self.act(self.gate(x)))


class GateReadTwice(Silu):
    def after(self, x, positions):
        gate = self.gate(x)
        return x + self.down(self.act(gate) * self.up(x)) + self.down(gate)


@pytest.mark.parametrize(
    "kind",
    only(
        (Silu, UpFirst),
        [Silu, Gelu, UpFirst, GateReadTwice],
    ),
)
def test_gate_up_fires_and_computes_the_same(kind):
    model, program, before, _, result = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    names = ("up", "gate") if kind is UpFirst else ("gate", "up")
    assert "+".join(f"{name}.weight" for name in names) in keys(program)
    after = program_logits(program, model, random_tokens())
    torch.testing.assert_close(after, before)
    assert_same_numbers_flat(program, model)


class GateBiasOnly(Silu):
    gate_bias = True


class UpReadsOther(Silu):
    def after(self, x, positions):
        return x + self.down(self.act(self.gate(x)) * self.up(2 * x))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (GateBiasOnly, "a bias and some have none"),
        pytest.param(UpReadsOther, "different inputs", marks=pytest.mark.slow),
    ],
)
def test_gate_up_is_declined_with_reason(kind, reason):
    model, program, _, _, result = run(kind)
    assert result.rewrites == 0
    assert [reason in item.reason for item in result.declined] == [True]
    assert_same_numbers_flat(program, model)


class SelfGated(Silu):
    """x · silu(x) of one layer: nothing to fuse, and nothing to report."""

    def after(self, x, positions):
        gate = self.gate(x)
        return x + self.down(gate * self.act(gate))


def test_one_linear_times_itself_is_left_alone():
    _, _, _, _, result = run(SelfGated)
    assert (result.rewrites, result.declined) == (0, [])


@pytest.mark.default("qwen2-1-1-")
@pytest.mark.parametrize(
    ("name", "qkv", "gate_up", "reason"),
    [
        ("qwen2", 1, 1, ""),
        pytest.param("gpt2", 0, 0, "one linear layer already", marks=pytest.mark.slow),
        ("phi3", 0, 0, "one linear layer already computes all of them"),
    ],
)
def test_real_models(name, qkv, gate_up, reason):
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 1}
    model = build_model(name, **layers)
    program, pipeline = compiled(model)
    assert (rewrites(pipeline, "FuseQKV"), rewrites(pipeline, "FuseGateUp")) == (qkv, gate_up)
    declined = reasons(pipeline, "FuseQKV")
    assert len(declined) == (1 if reason else 0)
    assert all(reason in item for item in declined)
    assert_same_numbers_flat(program, model)


def traced_hybrid(name):
    model = build_model(name)
    program, _ = compiled(model, TRACED_PHASES)
    return model, program


def hybrid_logits(program, model, tokens):
    """Of a prompt in two passes, of which the second begins with states."""
    session = Sessions(program, model)
    return torch.cat([session.prompt([part])[0] for part in (tokens[:5], tokens[5:])])


_QKV, _Z = (f"model.layers.0.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z"))


def test_projections_of_a_recurrence_fire_and_compute_the_same():
    """q, k, v and the gate of the output; decays and beta have fewer outputs than a block."""
    model, program = traced_hybrid("qwen3_5")
    tokens = random_tokens(11).tolist()
    before = hybrid_logits(program, model, tokens)
    result = FuseRecurrent().run(program)
    assert (result.rewrites, result.declined) == (3, [])
    fused = [weight for weight in program.weights.values() if len(weight.parameters) > 1]
    assert {weight.shape for weight in fused} == {(96 + 64, 64)}
    assert fused[0].parameters == (_QKV, _Z)
    narrow = [weight for weight in program.weights.values() if "in_proj_b" in weight.key]
    assert [weight.shape for weight in narrow] == [(4, 64)] * 3
    (first, *_) = (node for node in program.calls(aten.linear.default) if len(node.users) == 2)
    assert sorted(node.args[2:4] for node in first.users) == [(0, 96), (96, 160)]
    torch.testing.assert_close(hybrid_logits(program, model, tokens), before)
    assert FuseRecurrent().run(program).rewrites == 0


def test_projections_of_a_recurrence_in_other_formats_stay():
    """Of a file in which one of them has other integers, or none."""
    _, program = traced_hybrid("qwen3_5")
    program.integers[_Z] = KeptIntegers(QuantizedLayout.named("int8"))
    result = FuseRecurrent().run(program)
    assert (result.rewrites, result.declined) == (2, [])
    assert {_QKV, _Z} <= set(keys(program))


def test_a_recurrence_with_one_projection_is_left_alone():
    _, program = traced_hybrid("lfm2")
    result = FuseRecurrent().run(program)
    assert (result.rewrites, result.declined) == (0, [])
