"""Experts that each see all tokens read those that chose them alone, with the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.rewrite.route_experts import RouteExperts
from tests.models import build_model
from tests.passes.modules import (
    Tiny,
    assert_same_numbers,
    assert_same_numbers_flat,
    aten,
    compiled,
    reasons,
    rewrites,
)
from tests.traces import trace_once

EXPERTS, INNER = 5, 12


class Mixture(Tiny):
    """Rows are weighted before their experts; all experts have all rows, nearly all of them 0."""

    taken = 2

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(self.width, EXPERTS, bias=False)
        self.up = nn.Parameter(0.5 * torch.randn(EXPERTS, self.width, 2 * INNER))
        self.down = nn.Parameter(0.5 * torch.randn(EXPERTS, INNER, self.width))

    def scores(self, rows: Tensor) -> Tensor:
        logits = self.router(rows)
        values, ids = torch.topk(logits, self.taken, dim=1)
        blank = torch.full_like(logits, float("-inf"))
        return torch.sigmoid(blank.scatter_(1, ids, values).float()).to(logits.dtype)

    def gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * F.silu(gate)

    def added(self, out: Tensor) -> Tensor:
        return out.sum(dim=0)

    def after(self, x, positions):
        rows = x.reshape(-1, self.width)
        scores = self.scores(rows)
        given = rows.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gated = self.gate(torch.bmm(given.view(EXPERTS, -1, self.width), self.up))
        out = torch.bmm(gated, self.down).view(-1, self.width)
        return x + self.added(out.reshape(EXPERTS, -1, self.width)).view(x.shape)


class OneOfThem(Mixture):
    taken = 1


class GeluSplit(Mixture):
    def gate(self, x):
        up, gate = x.split(INNER, dim=2)
        return F.gelu(gate) * up


@pytest.mark.parametrize("kind", [Mixture, OneOfThem, GeluSplit])
def test_tokens_go_to_the_experts_that_they_chose(kind):
    model = kind()
    program, pipeline = compiled(model)
    assert rewrites(pipeline, RouteExperts.__name__) == 1
    assert len(program.calls(ops.grouped_mm)) == 2
    assert not program.calls(aten.bmm.default)
    assert_same_numbers(program, model)
    assert_same_numbers_flat(program, model)


class Softmax(Mixture):
    """Logits of 0 elsewhere: other experts have a weight, too."""

    def scores(self, rows):
        logits = self.router(rows)
        values, ids = torch.topk(logits, self.taken, dim=1)
        return torch.sigmoid(torch.zeros_like(logits).scatter_(1, ids, values))


class ZerosElsewhere(Mixture):
    def scores(self, rows):
        logits = self.router(rows)
        values, ids = torch.topk(logits, self.taken, dim=1)
        return torch.sigmoid(torch.full_like(logits, 0.0).scatter_(1, ids, values))


class OneOfZero(Mixture):
    """An expert of a zero row is not zero."""

    def gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return (up + 1.0) * torch.cos(gate)


class OtherColumns(Mixture):
    """Values of one choice at the places of another one."""

    def scores(self, rows):
        logits = self.router(rows)
        values, _ = torch.topk(logits, self.taken, dim=1)
        _, ids = torch.topk(-logits, self.taken, dim=1)
        blank = torch.full_like(logits, float("-inf"))
        return torch.sigmoid(blank.scatter_(1, ids, values))


class Weighted(Mixture):
    """What experts return is not only added up."""

    def added(self, out):
        return out.mean(dim=0)


class AcrossTokens(Mixture):
    def added(self, out):
        return out.sum(dim=1).sum(dim=0, keepdim=True).expand(out.shape[1], -1)


class AlongColumns(Mixture):
    """Experts normalize their columns: of a row of zeros that is not zero."""

    def gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return up * torch.softmax(gate, dim=-1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Softmax, "not one number"),
        (ZerosElsewhere, "did not choose have a weight"),
        (OneOfZero, "is not zero"),
        (OtherColumns, "that topk chose"),
        (Weighted, "not added up over experts"),
        (AcrossTokens, "not added up over experts"),
        (AlongColumns, "softmax"),
    ],
)
def test_other_mixtures_are_declined(kind, reason):
    """And then refused: tokens that are repeated have no place that the proof follows."""
    pipeline = Pipeline(PHASES)
    with pytest.raises(UnsupportedGraphError):
        pipeline.run(trace_once(kind().eval(), "target"))
    assert reason in " ".join(reasons(pipeline, RouteExperts.__name__))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_llama_4(dtype):
    model = build_model("llama4_text").to(dtype)
    program, pipeline = compiled(model)
    assert rewrites(pipeline, RouteExperts.__name__) == 2
    tolerance = 1e-4 if dtype == torch.float32 else 1e-1
    assert_same_numbers(program, model, rtol=tolerance, atol=tolerance)
