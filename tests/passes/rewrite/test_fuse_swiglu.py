"""An activated half times the other half becomes one operator; other products stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.kernels import ops
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.fuse_projections import FuseGateUp
from specc.passes.rewrite.fuse_swiglu import FuseSwiGLU
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.passes.modules import Runner, Tiny, assert_runs_alike, aten, several_passes, traced
from tests.tiers import only

LAYOUT = (Normalize, ClassifyMasks, RewriteTreeAttention, SelectLogits, FuseGateUp)


class Gated(Tiny):
    """Two projections, which FuseGateUp makes one."""

    bias = (False, False)

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 24, bias=self.bias[0])
        self.up = nn.Linear(16, 24, bias=self.bias[1])
        self.both = nn.Linear(16, 48)
        self.down = nn.Linear(24, 16)

    def act(self, x):
        return F.silu(x)

    def multiply(self, x):
        return self.act(self.gate(x)) * self.up(x)

    def after(self, x, positions):
        return x + self.down(self.multiply(x))


class UpTimesGate(Gated):
    """The gate is projected first and multiplied from the right."""

    def multiply(self, x):
        gate = self.gate(x)
        return self.up(x) * self.act(gate)


class GeluTanh(Gated):
    def act(self, x):
        return F.gelu(x, approximate="tanh")


class Gelu(Gated):
    def act(self, x):
        return F.gelu(x)


class Relu(Gated):
    def act(self, x):
        return F.relu(x)


class Chunked(Gated):
    """Phi-3: one projection in the model."""

    def multiply(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return up * self.act(gate)


class Split(Gated):
    def multiply(self, x):
        gate, up = self.both(x).split([24, 24], dim=2)
        return self.act(gate) * up


class Sliced(Gated):
    def multiply(self, x):
        both = self.both(x)
        return self.act(both[..., :24]) * both[..., -24:]


class ProjectionElsewhere(Gated):
    """All of the projection is read again: it stays, and is computed once."""

    def multiply(self, x):
        both = self.both(x)
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate) * up + both[..., 12:36] + gate


@pytest.fixture
def run():
    def run(kind, dtype=torch.float32):
        torch.manual_seed(0)
        model = kind().to(dtype).eval()
        program, _ = traced(model, *(item() for item in LAYOUT))
        before = Runner(program, model)
        result = FuseSwiGLU().run(program)
        return before, Runner(program, model), program, result

    return run


@pytest.mark.default("UpTimesGate-silu", "GeluTanh-gelu_tanh")
@pytest.mark.parametrize(
    ("kind", "name"),
    only(
        (Gated, UpTimesGate, GeluTanh, Chunked),
        [
            (Gated, "silu"),
            (UpTimesGate, "silu"),
            (GeluTanh, "gelu_tanh"),
            (Gelu, "gelu"),
            (Relu, "relu"),
            (Chunked, "silu"),
            (Split, "silu"),
            (Sliced, "silu"),
            (ProjectionElsewhere, "silu"),
        ],
    ),
)
def test_fires_and_computes_the_same(kind, name, run):
    before, after, program, result = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    (node,) = program.calls(ops.act_and_mul)
    assert node.args[1] == name
    assert node.args[0].target is aten.linear.default
    assert not program.calls(aten.silu.default, aten.gelu.default, aten.relu.default)
    assert_runs_alike(before, after)


@pytest.mark.parametrize("kind", [pytest.param(Gated, marks=pytest.mark.slow), GeluTanh])
def test_fires_in_bfloat16(kind, run):
    before, after, program, result = run(kind, torch.bfloat16)
    assert (result.rewrites, result.declined) == (1, [])
    assert program.calls(ops.act_and_mul)[0].meta["val"].dtype == torch.bfloat16
    for inputs in several_passes():
        torch.testing.assert_close(after.run(inputs), before.run(inputs), rtol=0.03, atol=0.03)


class SecondHalfActivated(Gated):
    def multiply(self, x):
        first, second = self.both(x).chunk(2, dim=-1)
        return first * self.act(second)


class UpProjectedFirst(Gated):
    """FuseGateUp concatenates in the order of the graph: up, then gate."""

    def multiply(self, x):
        return self.up(x) * self.act(self.gate(x))


class NotFused(Gated):
    bias = (True, False)


class HalvesOfTwo(Gated):
    def multiply(self, x):
        return self.act(self.both(x)[..., :24]) * self.both(2 * x)[..., 24:]


class SameHalf(Gated):
    def multiply(self, x):
        gate = self.both(x)[..., :24]
        return self.act(gate) * gate


class Overlapping(Gated):
    def multiply(self, x):
        both = self.both(x)
        return self.act(both[..., :24]) * both[..., 12:36]


class OtherDim(Gated):
    """Halves of heads, not of columns."""

    def multiply(self, x):
        gate, up = self.both(x).view(1, -1, 4, 12).chunk(2, dim=2)
        return (self.act(gate) * up).reshape(1, -1, 24)


class Strided(Gated):
    def multiply(self, x):
        both = self.both(x)
        return self.act(both[..., ::2]) * both[..., 1::2]


class GateElsewhere(Gated):
    def multiply(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        gate = self.act(gate)
        return gate * up + gate


class Wider(Gated):
    def multiply(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return (self.act(gate) * up.double()).to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "reason"),
    only(
        (SecondHalfActivated, HalvesOfTwo, Overlapping, GateElsewhere),
        [
            (SecondHalfActivated, "the activation is on the second half"),
            (UpProjectedFirst, "the activation is on the second half"),
            (NotFused, "gate and up are not halves of one tensor"),
            (HalvesOfTwo, "gate and up are not halves of one tensor"),
            (SameHalf, "gate and up are columns (0, 24) and (0, 24) of 48, not halves"),
            (Overlapping, "gate and up are columns (0, 24) and (12, 36) of 48, not halves"),
            (OtherDim, "gate and up are not halves of one tensor"),
            (Strided, "gate and up are not halves of one tensor"),
            (GateElsewhere, "the activated gate, is used elsewhere too"),
            (Wider, "gate and up are not halves of one tensor"),
        ],
    ),
)
def test_is_declined_with_reason(kind, reason, run):
    before, after, program, result = run(kind)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert reason in declined.reason
    assert not program.calls(ops.act_and_mul)
    assert_runs_alike(before, after)


class Plain(Gated):
    def multiply(self, x):
        return self.down.bias[0] * self.act(self.gate(x)) + self.up(x) * 0.5


def test_products_without_a_gate_are_left_alone(run):
    _, _, _, result = run(Plain)
    assert result.rewrites == 0
    assert all("halves" in item.reason for item in result.declined)
