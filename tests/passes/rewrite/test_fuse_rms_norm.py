"""Every spelling of RMSNorm becomes one operator; what only looks like one stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.kernels.reference.fused import rms_norm_reference
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.fuse_rms_norm import FuseAddRMSNorm, FuseRMSNorm
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.passes.modules import Runner, Tiny, assert_runs_alike, aten, several_passes, traced
from tests.tiers import only

EPS = 1e-3
LAYOUT = (Normalize, ClassifyMasks, RewriteTreeAttention, SelectLogits)


class Norm(Tiny):
    """`Tiny` with a norm after attention, in the spelling of Llama."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.other = nn.Linear(16, 16)

    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    def norm(self, x):
        return self.weight * self.scaled(x.to(torch.float32)).to(x.dtype)

    def after(self, x, positions):
        return self.norm(x)


class RoundedOnce(Norm):
    """OLMo 2."""

    def norm(self, x):
        return (self.weight * self.scaled(x.to(torch.float32))).to(x.dtype)


class UnitOffset(Norm):
    """Gemma."""

    def norm(self, x):
        return (self.scaled(x.float()) * (1.0 + self.weight.float())).type_as(x)


class UnitOffsetRounded(Norm):
    def norm(self, x):
        return (self.scaled(x.float()) * (self.weight + 1.0).float()).type_as(x)


class Power(Norm):
    """Gemma 3n."""

    def scaled(self, x):
        return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + EPS, -0.5)


class ScaleRounded(Norm):
    def norm(self, x):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
        return x * scale.to(x.dtype) * self.weight


class EpsFirst(Norm):
    def scaled(self, x):
        return torch.rsqrt(EPS + (x * x).mean(dim=2, keepdim=True)) * x


class Narrow(Norm):
    """All of it in the dtype of the model: the operator is more exact."""

    def norm(self, x):
        return self.scaled(x) * self.weight


class Operator(Norm):
    def norm(self, x):
        return F.rms_norm(x, (16,), self.weight, EPS)


class OfHeads(Norm):
    """Qwen 3: heads of a projection, not contiguous; views follow."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def after(self, x, positions):
        heads = self.other(x).view(1, -1, 4, 4).transpose(1, 2)
        return self.norm(heads).transpose(1, 2).view(1, -1, 16)


SPELLINGS = (
    Norm, RoundedOnce, UnitOffset, UnitOffsetRounded, Power, ScaleRounded, EpsFirst, Narrow,
    Operator, OfHeads,
)  # fmt: skip


def run(kind, dtype=torch.float32, *passes):
    """Runners around the passes, program, and their results."""
    torch.manual_seed(0)
    model = kind().to(dtype).eval()
    program, _ = traced(model, *(item() for item in LAYOUT))
    before = Runner(program, model)
    results = [item().run(program) for item in passes or (FuseRMSNorm,)]
    return before, Runner(program, model), program, results


@pytest.mark.default("Norm", "UnitOffset", "Operator")
@pytest.mark.parametrize("kind", only((Norm, UnitOffset, Power, Operator, OfHeads), SPELLINGS))
def test_fires_and_computes_the_same(kind):
    before, after, program, (result,) = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    (node,) = program.calls(ops.rms_norm)
    assert node.args[2:] == (EPS, kind in (UnitOffset, UnitOffsetRounded))
    assert not program.calls(aten.rsqrt.default, aten.mean.dim, aten.rms_norm.default)
    assert_runs_alike(before, after)


@pytest.mark.parametrize("kind", only((RoundedOnce, UnitOffsetRounded), SPELLINGS))
def test_bfloat16_is_as_exact(kind):
    """The norm alone, against the same graph in float64."""
    _, _, program, (result,) = run(kind, torch.bfloat16)
    assert (result.rewrites, result.declined) == (1, [])
    (node,) = program.calls(ops.rms_norm)
    assert {item.meta["val"].dtype for item in (node, *node.args[:2])} == {torch.bfloat16}
    assert not program.calls(aten.rsqrt.default, aten.rms_norm.default)
    torch.manual_seed(0)
    model = kind().to(torch.bfloat16).eval()
    x = torch.randn(1, 64, model.weight.shape[0]).bfloat16()
    with torch.no_grad():
        unfused = model.norm(x)
        fused = rms_norm_reference(x, model.weight, *node.args[2:])
        wide = x.double()
        factor = model.weight.double() + node.args[3]
        exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * factor
    errors = [(item.double() - exact).abs().mean() for item in (fused, unfused)]
    assert errors[0] <= errors[1] * 1.001


class OtherDim(Norm):
    def norm(self, x):
        heads = x.view(1, -1, 4, 4)
        heads = heads * torch.rsqrt(heads.pow(2).mean(-2, keepdim=True) + EPS)
        return heads.view(1, -1, 16) * self.weight


class TwoDims(Norm):
    def norm(self, x):
        heads = x.view(1, -1, 4, 4)
        heads = heads * torch.rsqrt(heads.pow(2).mean((-1, -2), keepdim=True) + EPS)
        return heads.view(1, -1, 16) * self.weight


class DimDropped(Norm):
    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1) + EPS)[..., None]


class EpsComputed(Norm):
    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.weight[0].abs())


class ScaleElsewhere(Norm):
    def norm(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * scale * self.weight + scale


class UnitElsewhere(Norm):
    def norm(self, x):
        unit = self.scaled(x)
        return unit * self.weight + unit


class SquareElsewhere(Norm):
    def norm(self, x):
        square = x.pow(2)
        return square + self.weight * (x * torch.rsqrt(square.mean(-1, keepdim=True) + EPS))


class NoWeight(Norm):
    def norm(self, x):
        return self.other(self.scaled(x))


class WeightOfAll(Norm):
    def norm(self, x):
        return self.scaled(x) * self.weight[0]


class WeightOfTokens(Norm):
    def norm(self, x):
        return self.scaled(x) * self.other(x)


class Wide(Norm):
    def norm(self, x):
        return (self.weight * self.scaled(x.double())).to(x.dtype)


class OtherIsScaled(Norm):
    def norm(self, x):
        return self.other(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


class NoSquare(Norm):
    def scaled(self, x):
        return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + EPS)


class Cube(Norm):
    def scaled(self, x):
        return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS)


class OperatorWithoutWeight(Norm):
    def norm(self, x):
        return F.rms_norm(x, (16,), None, EPS)


class OperatorWithoutEps(Norm):
    def norm(self, x):
        return F.rms_norm(x, (16,), self.weight)


class OperatorOverHeads(Norm):
    def norm(self, x):
        heads = F.rms_norm(x.view(1, -1, 4, 4), (4, 4), self.weight.view(4, 4), EPS)
        return heads.view(1, -1, 16)


@pytest.mark.default(
    "OtherDim-the mean is over dimensions [-2], not over the last alone",
    "EpsComputed-eps is not a constant",
    "SquareElsewhere-a step of the norm, is used elsewhere too",
    "OtherIsScaled-what is scaled is not what was squared",
)
@pytest.mark.parametrize(
    ("kind", "reason"),
    only(
        (OtherDim, EpsComputed, SquareElsewhere, WeightOfTokens, Wide, OtherIsScaled, Cube),
        [
            (OtherDim, r"the mean is over dimensions [-2], not over the last alone"),
            (TwoDims, "the mean is over dimensions [-1, -2], not over the last alone"),
            (DimDropped, "the mean drops its dimension"),
            (EpsComputed, "eps is not a constant"),
            (ScaleElsewhere, "a step of the norm, is used elsewhere too"),
            (UnitElsewhere, "a step of the norm, is used elsewhere too"),
            (SquareElsewhere, "a step of the norm, is used elsewhere too"),
            (NoWeight, "the norm has no weight"),
            (WeightOfAll, "the norm has no weight of [16]: its factor is []"),
            (WeightOfTokens, "the norm has no weight of [16]: its factor is [1, "),
            (Wide, "is torch.float64, which float32 does not hold"),
            (OtherIsScaled, "what is scaled is not what was squared"),
            (NoSquare, "the mean is not one of squares"),
            (Cube, "the mean is not one of squares"),
            (OperatorWithoutWeight, "the norm has no weight"),
            (OperatorWithoutEps, "eps is not a constant"),
            (OperatorOverHeads, "not over the last dimension"),
        ],
    ),
)
def test_is_declined_with_reason(kind, reason):
    before, after, program, (result,) = run(kind)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert reason in declined.reason
    assert not program.calls(ops.rms_norm)
    assert_runs_alike(before, after)


class Layer(Norm):
    def after(self, x, positions):
        return F.layer_norm(x, (16,), self.weight)


def test_layer_norm_is_left_alone():
    _, _, program, (result,) = run(Layer)
    assert (result.rewrites, result.declined) == (0, [])
    assert len(program.calls(aten.layer_norm.default)) == 1


class WideWeight(Norm):
    """bfloat16 rows and a float32 weight."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 13, bias=False)

    def _apply(self, function, recurse=True):
        module = super()._apply(function, recurse)
        self.weight.data = self.weight.data.float()
        return module

    def after(self, x, positions):
        return self.norm(x).to(x.dtype) + x


class WidthKept(WideWeight):
    """The result is as wide as what is normalized: the conversion in front stays."""

    def norm(self, x):
        return torch.sin(self.weight * self.scaled(x.float()))


class Widened(WideWeight):
    def norm(self, x):
        return torch.sin(self.scaled(x) * self.weight)


def test_wide_result_of_wide_rows_is_fused_after_the_conversion():
    before, after, program, (result,) = run(WidthKept, torch.bfloat16)
    assert (result.rewrites, result.declined) == (1, [])
    (node,) = program.calls(ops.rms_norm)
    assert node.args[0].target is aten.to.dtype
    assert node.meta["val"].dtype == torch.float32
    for inputs in several_passes():
        torch.testing.assert_close(after.run(inputs), before.run(inputs))


def test_result_wider_than_its_rows_is_declined():
    """The rows were rounded less than the operator would round its result."""
    _, _, program, (result,) = run(Widened, torch.bfloat16)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert "the result is torch.float32 and what is normalized is torch.bfloat16" in declined.reason
    assert not program.calls(ops.rms_norm)


class SumUsedLater(Norm):
    def after(self, x, positions):
        x = x + self.other(x)
        return x + self.other(self.norm(x))


class TwoNormsOfOneSum(Norm):
    def after(self, x, positions):
        return self.norm(x) + self.other(self.norm(x))


@pytest.mark.parametrize(
    ("kind", "num_norms", "is_later"),
    only(
        (SumUsedLater, TwoNormsOfOneSum),
        [
            (Norm, 0, False),
            (SumUsedLater, 0, True),
            (TwoNormsOfOneSum, 1, True),
            (UnitOffset, 0, False),
        ],
    ),
)
def test_sum_is_fused(kind, num_norms, is_later):
    before, after, program, (_, result) = run(kind, torch.float32, FuseRMSNorm, FuseAddRMSNorm)
    assert (result.rewrites, result.declined) == (1, [])
    (node,) = program.calls(ops.add_rms_norm)
    assert len(program.calls(ops.rms_norm)) == num_norms
    normalized, total = sorted(node.users, key=lambda user: user.args[1])
    assert [user.args[1] for user in (normalized, total)] == [0, 1]
    assert bool(total.users) == is_later
    assert node.args[3:] == (EPS, kind is UnitOffset)
    # the residual stream was there before the block's output
    assert node.args[1] < node.args[0]
    assert_runs_alike(before, after)


def test_sum_in_bfloat16():
    before, after, _, (_, result) = run(SumUsedLater, torch.bfloat16, FuseRMSNorm, FuseAddRMSNorm)
    assert result.rewrites == 1
    for inputs in several_passes():
        torch.testing.assert_close(after.run(inputs), before.run(inputs), rtol=0.03, atol=0.03)


class ScaledSum(Norm):
    def after(self, x, positions):
        return self.norm(torch.add(x, self.other(x), alpha=2))


class Shifted(Norm):
    def after(self, x, positions):
        return self.norm(2.0 * x + 1.0)


class Broadcast(Norm):
    def after(self, x, positions):
        return self.norm(2.0 * x + self.other.bias)


class MixedDtypes(Norm):
    def after(self, x, positions):
        return self.norm(x.bfloat16() + self.other(x))


class WeightAfterTheSum(Norm):
    def norm(self, x):
        return self.scaled(x) * torch.cos(self.weight)


@pytest.mark.parametrize(
    ("kind", "reason"),
    only(
        (ScaledSum, Broadcast),
        [
            (ScaledSum, "the sum is not one of two tensors"),
            (Shifted, "the sum is not one of two tensors"),
            (Broadcast, "the two terms of the sum differ in shape"),
            (MixedDtypes, "the two terms of the sum differ in dtype"),
            (WeightAfterTheSum, "the weight is computed after the sum"),
        ],
    ),
)
def test_sum_is_declined_with_reason(kind, reason):
    before, after, program, (first, result) = run(kind, torch.float32, FuseRMSNorm, FuseAddRMSNorm)
    assert (first.rewrites, result.rewrites) == (1, 0)
    assert [item.reason for item in result.declined] == [reason]
    assert len(program.calls(ops.rms_norm)) == 1
    assert_runs_alike(before, after)


@pytest.mark.parametrize("target", [ops.rms_norm, ops.add_rms_norm])
def test_norm_over_tokens_is_refused(target):
    """The proof that tokens stay apart knows over which dimension the operators compute."""
    passes = (FuseRMSNorm, FuseAddRMSNorm)[: 1 if target is ops.rms_norm else 2]
    _, _, program, _ = run(Norm, torch.float32, *passes)
    verify_tokenwise(program, "test")
    (node,) = program.calls(target)
    for place in range(1 if target is ops.rms_norm else 2):
        with program.graph.inserting_before(node):
            moved = program.graph.call_function(aten.transpose.int, (node.args[place], 1, 2))
        moved.meta["val"] = node.args[place].meta["val"].transpose(1, 2)
        node.update_arg(place, moved)
    with pytest.raises(UnsupportedGraphError, match="mixes tokens outside attention"):
        verify_tokenwise(program, "test")
