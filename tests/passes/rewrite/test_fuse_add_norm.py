"""Norm, product and what follows become one operator, where nothing else reads between them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import Pipeline
from tests.models import POSITIONS, VOCAB, build_model
from tests.passes.modules import Runner, assert_runs_alike, compiled, reasons, rewrites

NORMS = (ops.add_norm_linear, ops.add_norm_gate_up, ops.add_norm_rope_write)


def lower(model):
    program, _ = compiled(model)
    before = Runner(program, model)
    pipeline = Pipeline(cuda_phases(POSITIONS))
    pipeline.run(program)
    counts = tuple(len(program.calls(target)) for target in NORMS)
    return before, Runner(program, model), program, pipeline, counts


class Reading(nn.Module):
    """Wraps a feed-forward layer, and reads its input again."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 0.5 * x


class Shuffled(nn.Module):
    """A projection whose heads are in another order."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        heads = self.inner(x).view(*x.shape[:-1], 2, 2, 16)
        return heads.transpose(-3, -2).reshape(*x.shape[:-1], 64)


class Wide(nn.Module):
    """A feed-forward layer of one product, without a gate."""

    def __init__(self, inner):
        super().__init__()
        self.up, self.down = inner.up_proj, inner.down_proj

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def test_a_norm_that_is_read_twice_stays():
    model = build_model("llama")
    layer = model.model.layers[0]
    layer.mlp = Reading(layer.mlp)
    before, after, _, pipeline, counts = lower(model)
    assert counts == (0, 1, 1)
    assert reasons(pipeline, "FuseAddNorm") == [
        *["the norm is not read by one linear layer alone"] * 2
    ]
    assert_runs_alike(before, after, VOCAB)


@pytest.mark.slow
def test_a_product_without_a_gate():
    model = build_model("llama")
    layer = model.model.layers[1]
    layer.mlp = Wide(layer.mlp)
    before, after, _, _, counts = lower(model)
    assert counts == (1, 1, 1)
    assert_runs_alike(before, after, VOCAB)


@pytest.mark.slow
def test_heads_in_another_order_are_not_written():
    """Of shapes alone the projection could be one of q, k and v in their order."""
    model = build_model("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = Shuffled(attention.q_proj)
    before, after, program, _, counts = lower(model)
    assert counts[2] == 0
    # the first layer's are in order
    assert len(program.calls(ops.embed_norm_rope_write)) == 1
    assert len(program.calls(ops.rope_write)) == 1
    assert_runs_alike(before, after, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def test_biases_and_dtypes_are_kept(name):
    model = build_model(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    _, _, program, pipeline, counts = lower(model)
    assert counts == (0, 2, 1)
    assert rewrites(pipeline, "FuseAddNorm") == 3
    (call,) = program.calls(ops.add_norm_rope_write)
    assert (call.args[6] is not None) == (name == "qwen2")
    assert [value.dtype for value in call.meta["val"]] == [torch.bfloat16] * 2
