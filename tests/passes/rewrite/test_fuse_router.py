"""A mixture's router becomes one operator where its choice and its weights are surely the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.kernels import ops
from specc.passes.pipeline import Pipeline
from specc.passes.rewrite.fuse_experts import FuseExperts
from specc.passes.rewrite.fuse_router import FuseRouter
from specc.passes.rewrite.fuse_swiglu import FuseSwiGLU
from tests import models
from tests.models import build_model
from tests.passes.modules import Runner, assert_runs_alike, aten, compiled, reasons, rewrites
from tests.passes.modules import lower_for_cuda as lower
from tests.passes.rewrite.test_fuse_experts import Mixture

# model and changes → arguments after the parameters, bias and correction as whether they are there
ROUTERS = {
    "mixtral": ({}, (False, False, "softmax", 2, True, 0.0, 1.0, 1, 1, 1)),
    "qwen3_moe": ({}, (False, False, "softmax", 2, False, 0.0, 1.0, 1, 1, 1)),
    "qwen3_moe-normalized": (
        {"norm_topk_prob": True},
        (False, False, "softmax", 2, True, 0.0, 1.0, 1, 1, 1),
    ),
    "gpt_oss": ({}, (True, False, "chosen", 2, False, 0.0, 1.0, 1, 1, 1)),
    "granitemoe": ({}, (False, False, "chosen", 2, False, 0.0, 1.0, 1, 1, 1)),
    "glm4_moe": ({}, (False, True, "sigmoid", 2, True, 1e-20, 1.5, 2, 1, 2)),
    "minimax_m2": ({}, (False, True, "sigmoid", 2, True, 0.0, 1.0, 1, 1, 1)),
    "deepseek_v2": ({}, (False, False, "softmax", 2, False, 0.0, 1.5, 2, 1, 1)),
    "deepseek_v2-greedy": (
        {"topk_method": "greedy"},
        (False, False, "softmax", 2, False, 0.0, 1.5, 1, 1, 1),
    ),
    "deepseek_v3": ({}, (False, True, "sigmoid", 2, True, 1e-20, 1.5, 2, 1, 2)),
}
# of a router's own; Granite divides its logits, too
LEFT = (
    aten.topk.default, aten.softmax.int, aten.sigmoid.default, aten.gather.default,
    aten.masked_fill.Scalar,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_router_is_one_operator(name, dtype):
    changes, wanted = ROUTERS[name]
    model = build_model(name.partition("-")[0], **changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    before, after, program, pipeline = lower(model)
    assert reasons(pipeline, "FuseRouter") == []
    calls = program.calls(ops.route)
    assert rewrites(pipeline, "FuseRouter") == len(calls) == len(program.calls(ops.experts)) > 0
    assert not program.calls(*LEFT)
    for call in calls:
        x, weight, *more = call.args
        # after those what every token takes, of models that have it
        assert (tuple(item is not None for item in more[:2]), *more[2:10]) == (
            wanted[:2],
            *wanted[2:],
        )
        # what widens the router's product of other types is gone
        assert x.meta["val"].dtype == weight.meta["val"].dtype == dtype
        assert weight.target in program.weights
        assert x.target not in (aten.to.dtype, aten.linear.default)
    # caches of latent attention are not those of this runner
    if dtype == torch.float32 and "deepseek" not in name:
        assert_runs_alike(before, after, models.VOCAB)


class Router(Mixture):
    """Three of twelve experts, of two of four groups; tests override single steps."""

    num_experts, top_k, groups, top_groups = 12, 3, 4, 2
    hidden = -torch.inf

    def __init__(self):
        super().__init__()
        self.correction = nn.Parameter(0.1 * torch.randn(self.num_experts))
        self.other = nn.Linear(16, self.num_experts)

    def score(self, x):
        return self.gate(x).sigmoid()

    def compare(self, scores):
        return scores + self.correction

    def of_groups(self, choice):
        return choice.view(-1, self.groups, 3).topk(2, dim=-1)[0].sum(-1)

    def hide(self, choice):
        best = self.of_groups(choice)
        marks = torch.zeros_like(best).scatter_(1, self.best(best), 1)
        wide = marks.unsqueeze(-1).expand(-1, self.groups, 3).reshape(-1, self.num_experts)
        return choice.masked_fill(~wide.bool(), self.hidden)

    def best(self, of_groups):
        return of_groups.topk(self.top_groups, dim=-1, sorted=False)[1]

    def take(self, scores, choice):
        ids = choice.topk(self.top_k, dim=-1, sorted=False)[1]
        return scores.gather(1, ids), ids

    def finish(self, weights):
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5

    def route(self, x):
        scores = self.score(x)
        weights, ids = self.take(scores, self.hide(self.compare(scores)))
        return self.finish(weights), ids


class OneOfGroup(Router):
    def of_groups(self, choice):
        return choice.view(-1, self.groups, 3).max(dim=-1).values


class Unscaled(Router):
    def finish(self, weights):
        return weights


class Softmax(Router):
    """DeepSeek V2 hides experts with 0, which no score is below."""

    hidden = 0.0

    def score(self, x):
        return self.gate(x).softmax(-1)

    def compare(self, scores):
        return scores


def run(kind):
    torch.manual_seed(5)
    model = kind()
    program, _ = compiled(model)
    before = Runner(program, model)
    pipeline = Pipeline((("mixtures", (FuseSwiGLU, FuseExperts, FuseRouter)),))
    pipeline.run(program)
    assert rewrites(pipeline, "FuseExperts") == 1
    return before, Runner(program, model), program, pipeline


@pytest.mark.parametrize("kind", [Router, OneOfGroup, Unscaled, Softmax])
def test_other_routers_of_groups(kind):
    before, after, program, pipeline = run(kind)
    assert reasons(pipeline, "FuseRouter") == []
    assert not program.calls(*LEFT)
    assert_runs_alike(before, after)


class HiddenByZero(Router):
    """A corrected score may be below 0."""

    hidden = 0.0


class WorstGroups(Router):
    def best(self, of_groups):
        return of_groups.topk(self.top_groups, dim=-1, largest=False)[1]


class ThreeOfGroup(Router):
    def of_groups(self, choice):
        return choice.view(-1, self.groups, 3).topk(3, dim=-1)[0].sum(-1)


class WorstOfGroup(Router):
    def of_groups(self, choice):
        return choice.view(-1, self.groups, 3).topk(2, dim=-1, largest=False)[0].sum(-1)


class GroupsOfOtherScores(Router):
    def of_groups(self, choice):
        return super().of_groups(choice * 2)


class WorstExperts(Router):
    def take(self, scores, choice):
        ids = choice.topk(self.top_k, dim=-1, largest=False)[1]
        return scores.gather(1, ids), ids


class WeighedWithCorrection(Router):
    def take(self, scores, choice):
        return choice.topk(self.top_k, dim=-1)


class WeightsOfOthers(Router):
    def take(self, scores, choice):
        _, ids = super().take(scores, choice)
        return scores.gather(1, (ids + 1) % self.num_experts), ids


class CorrectedTwice(Router):
    def compare(self, scores):
        return torch.add(scores, self.correction, alpha=2)


class CorrectedByTokens(Router):
    def route(self, x):
        scores = self.score(x)
        weights, ids = self.take(scores, self.hide(scores + self.other(x)))
        return self.finish(weights), ids


class ScoresOfTanh(Router):
    def score(self, x):
        return self.gate(x).tanh()


class SoftmaxOverSome(Router):
    """Twice: of logits that are no product's."""

    def score(self, x):
        return self.gate(x).softmax(-1).sigmoid()


class DividedBySquares(Router):
    def finish(self, weights):
        return weights / ((weights * weights).sum(-1, keepdim=True) + 1e-20)


class ScaledFirst(Router):
    """eps is not scaled along."""

    def finish(self, weights):
        weights = weights * 2.5
        return weights / (weights.sum(-1, keepdim=True) + 0.5)


class FewInGroups(Router):
    """A third expert is one of those that are hidden."""

    num_experts, top_k, top_groups = 12, 4, 1


class Chosen(Router):
    """Softmax over the best scores of a sigmoid: no operator has that."""

    def route(self, x):
        weights, ids = self.score(x).topk(self.top_k)
        return weights.softmax(-1), ids


GROUP = "the score of a group is not of its best experts"
HIDDEN = "scores are hidden by something else than a choice of groups"
SUM = "weights are divided by something else than their sum"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (HiddenByZero, "experts of other groups have the score 0.0"),
        (WorstGroups, HIDDEN),
        (ThreeOfGroup, GROUP),
        (WorstOfGroup, GROUP),
        (GroupsOfOtherScores, GROUP),
        (WorstExperts, "ids are not those of a token's best experts"),
        (WeighedWithCorrection, "scores are neither a softmax nor a sigmoid of logits"),
        (WeightsOfOthers, "weights are those of other experts"),
        (CorrectedTwice, "compared is something else than scores and a correction"),
        (CorrectedByTokens, "the correction is computed, not a parameter"),
        (ScoresOfTanh, "scores are neither a softmax nor a sigmoid of logits"),
        (SoftmaxOverSome, "logits are not those of a linear layer"),
        (DividedBySquares, SUM),
        (ScaledFirst, "weights are scaled before they are divided by their sum"),
        (FewInGroups, "the best groups have fewer experts than a token takes"),
        (Chosen, "logits are not those of a linear layer"),
    ],
)
def test_router_is_declined_with_reason(kind, reason):
    before, after, program, pipeline = run(kind)
    assert reasons(pipeline, "FuseRouter") == [reason]
    assert not program.calls(ops.route)
    assert_runs_alike(before, after)
