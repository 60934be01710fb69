"""What a program under `--batch-invariant` computes with on CUDA, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.artifact.kv_rows import INT8
from specc.compiler.backends.cuda import BACKEND
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.lower.cuda.phases import launches_per_layer
from specc.passes.pipeline import Pipeline
from specc.passes.rewrite.fuse_add_norm import FuseAddNorm
from specc.passes.rewrite.quantize_caches import QuantizeCaches
from tests.models import VOCAB, build_model
from tests.passes.modules import (
    Runner,
    Tiny,
    assert_runs_alike,
    compiled,
)

# model → products and attention that are put in, and launches a layer
FIXED = {
    "llama": (9, 2, 9),
    "gemma3": (13, 3, 11),
    "qwen3": (9, 2, 9),
    "gpt2": (9, 2, 18),
    "gpt_neox": (9, 2, 11),
    "opt": (9, 2, 12),
    "phi": (9, 2, 17),
}


def lower(model: nn.Module) -> tuple:
    program, _ = compiled(model)
    before = Runner(program, model)
    pipeline = Pipeline(BACKEND.invariant_phases(BACKEND.phases(256)))
    pipeline.run(program)
    return before, Runner(program, model), program, pipeline


@pytest.mark.default("llama", "gpt2")
@pytest.mark.parametrize("name", FIXED)
def test_every_sum_has_an_order(name: str) -> None:
    before, after, program, _ = lower(build_model(name))
    found = program.calls(ops.invariant_linear), program.calls(ops.invariant_attend)
    assert (*map(len, found), launches_per_layer(program)[0]) == FIXED[name]
    assert not program.calls(ops.skinny_linear, ops.attend)
    assert_runs_alike(before, after, VOCAB)


def test_other_targets_keep_their_joined_products() -> None:
    phases = BACKEND.phases(256)
    assert any(FuseAddNorm in passes for _, passes in phases)
    assert not any(FuseAddNorm in passes for _, passes in BACKEND.invariant_phases(phases))


class Summed(Tiny):
    """Something of torch that adds up columns."""

    def __init__(self, compute) -> None:
        super().__init__()
        self.compute = compute
        self.factor = nn.Parameter(torch.rand(16, 16))

    def after(self, x, positions):
        return self.compute(self, x)


@pytest.mark.parametrize(
    ("compute", "what"),
    [
        (lambda self, x: x.softmax(-1), "aten.softmax.int"),
        (lambda self, x: x / x.sum(-1, keepdim=True), "aten.sum.dim_IntList"),
        (lambda self, x: x - x.mean(-1, keepdim=True), "aten.mean.dim"),
        (lambda self, x: x @ (self.factor * self.factor), "aten.matmul.default"),
        (lambda self, x: x.cumsum(-1), "aten.cumsum.default"),
    ],
    ids=["softmax", "sum", "mean", "computed", "cumsum"],
)
def test_sums_of_torch_are_refused(compute, what: str) -> None:
    with pytest.raises(ConfigError, match=f"--batch-invariant, and {what}") as raised:
        lower(Summed(compute))
    assert "--backend cpu" in raised.value.do


def test_maxima_are_not() -> None:
    _, _, program, _ = lower(Summed(lambda self, x: x - x.amax(-1, keepdim=True)))
    assert len(program.calls(ops.invariant_attend)) == 1


def test_norms_of_other_widths_are_refused() -> None:
    """A lone row of theirs is compiled otherwise than several."""
    with pytest.raises(ConfigError, match="--batch-invariant, and a norm of 72 columns"):
        lower(build_model("llama", hidden_size=72, head_dim=16))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_of_few_tokens_at_a_time(name: str) -> None:
    """Those that every token takes, too."""
    before, after, program, _ = lower(build_model(name))
    assert len(program.calls(ops.invariant_experts)) == len(program.calls(ops.route)) == 2
    assert not program.calls(ops.experts)
    assert_runs_alike(before, after, VOCAB)


def test_mixtures_without_kernels_of_few_launches_are_refused() -> None:
    for sizes, what in (((18, 17), "17 experts of a token"), ((513, 2), "a router of 513 experts")):
        options = dict(zip(("num_local_experts", "num_experts_per_tok"), sizes, strict=True))
        with pytest.raises(ConfigError, match=f"--batch-invariant, and {what}"):
            lower(build_model("mixtral", num_hidden_layers=1, **options))


def test_quantized_caches_are_refused() -> None:
    program, _ = compiled(build_model("llama"))
    QuantizeCaches(INT8).run(program)
    with pytest.raises(ConfigError, match="--batch-invariant, and quantized caches") as raised:
        Pipeline(BACKEND.invariant_phases(BACKEND.phases(256))).run(program)
    assert "--kv-cache-dtype" in raised.value.do
