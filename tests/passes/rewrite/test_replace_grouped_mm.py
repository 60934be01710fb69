"""The grouped matmul of transformers' mixtures becomes specc's own, with the same numbers."""

from __future__ import annotations

import pytest
import torch

from specc.kernels import ops
from specc.passes.frontend.trace import trace
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.replace_grouped_mm import ReplaceGroupedMM, has_no_foreign_ops
from tests.models import build_model
from tests.passes.modules import Tiny, assert_same_numbers, aten, compiled, rewrites


@pytest.mark.default("mixtral-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_fires_and_computes_the_same(name, dtype):
    """Traced on the meta device, as the compiler does: there, experts are counted with histc.

    In bfloat16 transformers calls torch's own grouped product.
    """
    model = build_model(name, num_hidden_layers=1).to(dtype)
    with torch.device("meta"):
        on_meta = type(model)(model.config).eval().to(dtype)
    program = trace(on_meta, "target")
    Normalize().run(program)
    assert has_no_foreign_ops(program) == (dtype == torch.bfloat16)
    result = ReplaceGroupedMM().run(program)
    # gate-up, down, and one count of tokens
    assert (result.rewrites, result.declined) == (3, [])
    assert len(program.calls(ops.grouped_mm)) == 2
    assert not program.calls(aten.histc.default)
    assert not program.calls(aten._grouped_mm.default)
    assert has_no_foreign_ops(program)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert_same_numbers(program, model, rtol=tolerance, atol=tolerance)


class Histogram(Tiny):
    """Counts features in ten bins of unequal integers: not a count of experts."""

    def after(self, x, positions):
        return x * torch.histc(x, bins=10, min=-2, max=3).sum()


def test_other_histograms_are_declined():
    program = trace(Histogram().eval(), "target")
    Normalize().run(program)
    result = ReplaceGroupedMM().run(program)
    assert result.rewrites == 0
    assert "does not count integers" in result.declined[0].reason
    assert len(program.calls(aten.histc.default)) == 1


class FloatHistogram(Tiny):
    """Bins of floats with the edges of a count: comparison for equality would be wrong."""

    def after(self, x, positions):
        return x * torch.histc(x, bins=4, min=0, max=3).max()


def test_histograms_of_floats_are_declined():
    model = FloatHistogram().eval()
    program = trace(model, "target")
    Normalize().run(program)
    result = ReplaceGroupedMM().run(program)
    assert (result.rewrites, len(result.declined)) == (0, 1)
    assert "between integers" in result.declined[0].reason


class CountsOfPositions(Tiny):
    def after(self, x, positions):
        return x * torch.histc(positions.float(), bins=4, min=0, max=3).max()


def test_integers_as_floats_are_counted():
    model = CountsOfPositions().eval()
    program = trace(model, "target")
    Normalize().run(program)
    result = ReplaceGroupedMM().run(program)
    assert (result.rewrites, result.declined) == (1, [])
    assert_same_numbers(program, model)


def test_dense_model_has_nothing_to_replace():
    _, pipeline = compiled(Tiny())
    assert rewrites(pipeline, "ReplaceGroupedMM") == 0
