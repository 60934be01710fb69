"""Every architecture after the CUDA phases: what was fused, the same numbers, how many launches."""

from __future__ import annotations

import pytest
import torch

from specc.kernels import ops
from specc.passes.lower.cuda.phases import launches, launches_per_layer
from tests import models
from tests.models import build_model
from tests.passes.modules import (
    Runner,
    Tiny,
    assert_runs_alike,
    aten,
    compiled,
    reasons,
    rewrites,
    several_passes,
)
from tests.passes.modules import lower_for_cuda as lower
from tests.tiers import every

PASSES = ("FuseRMSNorm", "FuseAddRMSNorm", "FuseSwiGLU", "FuseRopeWrite", "SplitTreeAttention")
# model → what each of these rewrites; products that take a norm along: with nothing after them,
# with a gate, with a rotation; whether the first layer takes the embedding along, and the head the
# last norm; and launches a layer
FUSED = {
    "llama": ((5, 4, 2, 2, 0), (0, 2, 1), (1, 1), 5),
    "mistral": ((5, 4, 2, 2, 0), (0, 2, 1), (1, 1), 5),
    "qwen2": ((5, 4, 2, 2, 0), (0, 2, 1), (1, 1), 5),
    # three layers of six norms, two of them of a block's output; a window
    "gemma3": ((19, 6, 3, 3, 0), (2, 3, 0), (0, 1), 8),
    # and a norm of q and of k
    "qwen3": ((9, 4, 2, 2, 0), (1, 2, 0), (0, 1), 6),
    "gemma3-tied": ((19, 6, 3, 3, 0), (2, 3, 0), (0, 1), 8),
    "phi": ((0, 0, 0, 2, 0), (0, 0, 0), (0, 0), 17),
    "phi3": ((5, 4, 2, 2, 0), (0, 2, 1), (1, 1), 5),
    "gpt2": ((0, 0, 0, 0, 2), (0, 0, 0), (0, 0), 18),
    "opt": ((0, 0, 0, 0, 2), (0, 0, 0), (0, 0), 12),
    "gpt_neox": ((0, 0, 0, 2, 0), (0, 0, 0), (0, 0), 11),
    # routers and experts read one norm
    "mixtral": ((5, 4, 2, 2, 0), (0, 0, 1), (1, 1), 6),
    "qwen3_moe": ((9, 4, 2, 2, 0), (1, 0, 0), (0, 1), 7),
    "llama-llama3": ((5, 4, 2, 2, 0), (0, 2, 1), (1, 1), 5),
    "llama-linear": ((5, 4, 2, 2, 0), (0, 2, 1), (1, 1), 5),
    "llama-yarn": ((5, 4, 2, 2, 0), (0, 2, 1), (1, 1), 5),
}
# whose gates are in `specc.experts` in the end
MIXTURES = ("mixtral", "qwen3_moe")
# whose layers have norms of q and k, which `rope_write` takes along
HEAD_NORMS = ("gemma3", "gemma3-tied", "qwen3", "qwen3_moe")
PRODUCTS = (ops.add_norm_linear, ops.add_norm_gate_up, ops.add_norm_rope_write)
OPERATORS = (ops.rms_norm, ops.add_rms_norm, ops.act_and_mul, ops.rope_write, ops.write_kv)


def in_bfloat16(model):
    """Parameters alone, as a model is built for a compilation: rotary frequencies stay wide."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model


# what is fused is what is fused of a Llama, spelled the same
LIKE_LLAMA = ("mistral", "llama-llama3", "llama-linear")
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in (*LIKE_LLAMA, "gemma3-tied") else [])
    for name in FUSED
]


def test_every_architecture_is_listed():
    assert set(FUSED) == {*models.ARCHITECTURES, *models.ROTARY_VARIANTS, "gemma3-tied"}


@pytest.mark.parametrize("name", every(2, CASES))
def test_fused_program_runs_alike(name):
    before, after, program, pipeline = lower(build_model(name))
    counts, products, (embeds, heads), per_layer = FUSED[name]
    assert tuple(rewrites(pipeline, kind) for kind in PASSES) == counts
    num_norms, num_adds, num_gates, num_ropes, num_split = counts
    assert rewrites(pipeline, "FuseAddNorm") == sum(products)
    assert (rewrites(pipeline, "FuseEmbedNorm"), rewrites(pipeline, "FuseNormHead")) == (
        embeds,
        heads,
    )
    assert tuple(len(program.calls(target)) for target in PRODUCTS) == products
    _, gated, rotated = products
    num_mixtures = len(program.layers) if name in MIXTURES else 0
    assert rewrites(pipeline, "FuseExperts") == len(program.calls(ops.experts)) == num_mixtures
    assert not program.calls(ops.grouped_mm)
    num_heads = len(program.layers) if name in HEAD_NORMS else 0
    assert (
        rewrites(pipeline, "FuseHeadNorm") == len(program.calls(ops.norm_rope_write)) == num_heads
    )
    present = (num_norms - num_adds - embeds - 2 * num_heads, num_adds - sum(products) - heads)
    present += (num_gates - gated - num_mixtures, num_ropes - rotated - embeds - num_heads)
    present += (num_split,)
    assert tuple(len(program.calls(target)) for target in OPERATORS) == present
    assert len(program.calls(ops.attend)) == len(program.layers)
    assert not program.calls(aten.rsqrt.default, aten.neg.default, ops.tree_attention)
    assert launches_per_layer(program) == (per_layer,) * (len(program.layers) - 1)
    declined = reasons(pipeline, "FuseRopeWrite")
    assert declined == ["no rotary embedding before attention"] * num_split
    assert_runs_alike(before, after, models.VOCAB)


# float32 runs with all in the default tier
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3", "gpt_neox"))]
)
def test_fused_bfloat16_is_as_exact(name):
    """Against float32 with the same weights: rounding once is no worse than rounding each step.

    The ratio of errors scatters by a tenth from seed to seed, to both sides of one.
    """
    model = in_bfloat16(build_model(name))
    before, after, program, pipeline = lower(model)
    assert tuple(rewrites(pipeline, kind) for kind in PASSES) == FUSED[name][0]
    assert {program.placeholder(name).meta["val"].dtype for name in program.caches} == {
        torch.bfloat16
    }
    exact = Runner(compiled(build_model(name))[0], _rounded(name))
    errors = torch.zeros(2)
    for inputs in several_passes(models.VOCAB):
        want = exact.run(inputs)
        found = [runner.run(inputs).float() for runner in (before, after)]
        torch.testing.assert_close(*found, rtol=0.05, atol=0.05 * float(want.abs().max()))
        errors += torch.stack([(item - want).abs().mean() for item in found])
    assert errors[1] <= 1.25 * errors[0]


def _rounded(name):
    """The model in float32 with weights that bfloat16 holds."""
    model = build_model(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


def test_layer_of_a_llama_is_five_launches():
    """Four projections, two of which take along what is next to them, and attention."""
    _, _, program, _ = lower(build_model("llama", num_hidden_layers=3))
    assert launches_per_layer(program) == (5, 5)
    nodes = [node.target for node in launches(program)]
    first = nodes.index(ops.attend)
    assert nodes[first + 1 : first + 6] == [
        ops.skinny_linear,
        ops.add_norm_gate_up,
        ops.skinny_linear,
        ops.add_norm_rope_write,
        ops.attend,
    ]


def test_a_pass_of_a_llama_is_two_launches_besides_its_layers():
    """A row of the rotary table for each token, and what starts the first layer, and the head."""
    _, _, program, pipeline = lower(build_model("llama", num_hidden_layers=3))
    assert [node.target for node in launches(program)] == [
        aten.embedding.default, ops.embed_norm_rope_write, ops.attend,
        ops.skinny_linear, ops.add_norm_gate_up, ops.skinny_linear,
        ops.add_norm_rope_write, ops.attend,
        ops.skinny_linear, ops.add_norm_gate_up, ops.skinny_linear,
        ops.add_norm_rope_write, ops.attend,
        ops.skinny_linear, ops.add_norm_gate_up, ops.skinny_linear, ops.add_norm_head,
    ]  # fmt: skip
    assert rewrites(pipeline, "TabulateRotary") == 1


def test_launches_before_fusion():
    program, _ = compiled(build_model("llama"))
    assert launches_per_layer(program) == (31,)


class Copies(Tiny):
    """A view, a conversion to the same dtype and a reshape in place launch nothing; a copy does."""

    def after(self, x, positions):
        heads = x.view(1, -1, 4, 4).to(torch.float32).reshape(1, -1, 16)
        return heads.view(1, -1, 4, 4).transpose(2, 3).reshape(1, -1, 16)


def test_only_what_writes_is_a_launch():
    plain, _ = compiled(Tiny())
    program, _ = compiled(Copies())
    assert len(launches(program)) == len(launches(plain)) + 1


def test_cache_writes_survive_dead_code_elimination():
    _, after, program, _ = lower(build_model("gpt2", n_layer=1))
    program.graph.eliminate_dead_code()
    assert len(program.calls(ops.write_kv)) == 1
    assert any(node.target is ops.write_kv for node in after.graph_module.graph.nodes)
