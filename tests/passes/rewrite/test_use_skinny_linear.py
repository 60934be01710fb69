"""Linear layers that no other pass has taken become operators with kernels for few rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.kernels import ops
from specc.passes.pipeline import Pipeline
from specc.passes.rewrite.use_skinny_linear import UseSkinnyLinear
from tests.passes.modules import (
    VOCAB,
    Runner,
    Tiny,
    assert_runs_alike,
    aten,
    compiled,
    reasons,
    rewrites,
)


def lower(model):
    program, _ = compiled(model)
    before = Runner(program, model)
    pipeline = Pipeline((("few rows", (UseSkinnyLinear,)),))
    pipeline.run(program)
    return before, Runner(program, model), program, pipeline


class Computed(Tiny):
    """A projection by a product of parameters, and one with a bias that is computed."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.rand(16, 16))
        self.shift = nn.Parameter(torch.rand(16))

    def after(self, x, positions):
        x = F.linear(x, self.factor * self.factor)
        return F.linear(x, self.factor, self.shift.exp())


class Wide(Tiny):
    """Of float64, which no kernel multiplies."""

    def after(self, x, positions):
        return F.linear(x.double(), self.o.weight.double()).float()


def test_every_layer_is_taken():
    """With a bias and without one; the numbers stay."""
    before, after, program, pipeline = lower(Tiny())
    # q, k and v are one product before
    assert rewrites(pipeline, "UseSkinnyLinear") == 3 == len(program.calls(ops.skinny_linear))
    assert not program.calls(aten.linear.default)
    assert {len(node.args) for node in program.calls(ops.skinny_linear)} == {3}
    assert sum(node.args[2] is not None for node in program.calls(ops.skinny_linear)) == 1
    assert_runs_alike(before, after, VOCAB)


@pytest.mark.parametrize(("model", "count"), [(Computed, 2), (Wide, 1)])
def test_what_is_computed_stays(model, count):
    before, after, program, pipeline = lower(model())
    assert rewrites(pipeline, "UseSkinnyLinear") == 3
    assert len(program.calls(aten.linear.default)) == count
    found = reasons(pipeline, "UseSkinnyLinear")
    assert len(found) == count
    assert all("computed, not a parameter" in text or "float64" in text for text in found)
    assert_runs_alike(before, after, VOCAB)
