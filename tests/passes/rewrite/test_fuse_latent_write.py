"""Rotations beside latents go into the write of their rows, in every order of pairs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from specc.artifact.kv_rows import AUTO
from specc.artifact.mla_cache import LATENT
from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import FUSE_PHASES, TRACED_PHASES, Pipeline
from specc.passes.program import emit_call
from specc.passes.rewrite.absorb_latent import AbsorbLatent
from specc.passes.rewrite.expand_prompts import ExpandPrompts
from specc.passes.rewrite.fuse_latent_write import FuseLatentWrite
from specc.passes.rewrite.fuse_rope_write import SplitTreeAttention
from specc.passes.rewrite.read_weight_views import ReadWeightViews
from tests import models
from tests.models import build_model
from tests.passes.modules import (
    TOLERANCE,
    VOCAB,
    Runner,
    aten,
    compiled,
    reasons,
    rewrites,
    several_passes,
)
from tests.passes.rewrite.test_absorb_latent import NOPE, RANK, ROPE, Latent

LATENTS = (*TRACED_PHASES, ("latent", (partial(AbsorbLatent, LATENT, AUTO),)), *FUSE_PHASES)
FUSE = "FuseLatentWrite"
# what nothing rotates with any more
LEFT = (aten.view_as_real.default, aten.sub.Tensor, aten.cat.default, ops.write_kv)


def lower(model: nn.Module, *more: type) -> tuple:
    """Runners before and after the phases of CUDA, the program, and the pipeline."""
    program, _ = compiled(model, (*LATENTS, ("prompts", more)))
    before = Runner(program, model)
    pipeline = Pipeline(cuda_phases(models.POSITIONS))
    pipeline.run(program)
    return before, Runner(program, model), program, pipeline


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("minicpm3", "halves"), ("deepseek_v2", "neighbors"), ("deepseek_v3", "apart")],
)
def test_layers_of_models(name: str, pairs: str) -> None:
    before, after, program, pipeline = lower(build_model(name))
    assert reasons(pipeline, FUSE) == []
    calls = program.calls(ops.rope_write_latent)
    assert rewrites(pipeline, FUSE) == len(calls) == len(program.layers)
    assert {call.args[-1] for call in calls} == {pairs}
    # one product leads to the latents of queries and keys
    assert rewrites(pipeline, "FuseLatentDown") == len(program.layers)
    assert not program.calls(*LEFT)
    # one lookup for all layers
    assert rewrites(pipeline, "TabulateRotary") == 1
    assert_latents_alike(before, after, models.VOCAB)


def test_prompts_that_are_expanded_read_the_rotated_columns() -> None:
    before, after, program, pipeline = lower(
        build_model("deepseek_v3", kv_lora_rank=24), ExpandPrompts
    )
    assert rewrites(pipeline, FUSE) == len(program.layers)
    for expanded, write in zip(
        program.calls(ops.attend_expanded), program.calls(ops.rope_write_latent), strict=True
    ):
        assert write in _upstream(expanded.args[1])
    assert not program.calls(aten.sub.Tensor)
    assert_latents_alike(before, after, models.VOCAB)


def assert_latents_alike(before: Runner, after: Runner, vocab: int = VOCAB) -> None:
    """Several passes give the same logits and rows; values are columns of keys."""
    for inputs in several_passes(vocab):
        torch.testing.assert_close(after.run(inputs), before.run(inputs), **TOLERANCE)
    for name in (name for name in before.caches if name.startswith("k_")):
        torch.testing.assert_close(after.caches[name], before.caches[name], **TOLERANCE)


def _upstream(node: torch.fx.Node) -> set[torch.fx.Node]:
    found, stack = {node}, [node]
    while stack:
        stack += (new := [x for x in stack.pop().all_input_nodes if x not in found])
        found.update(new)
    return found


class Rotated(Latent):
    """Neighbors of what is beside the latents are rotated, by tables of each token."""

    def operands(self, x):
        c, shared = self.down(x).split([RANK, ROPE], -1)
        c = self.norm(c)
        own, value = self.expand(c)
        angle = x[:, None, :, : ROPE // 2]
        self.tables = angle.cos(), angle.sin()
        turned = self.rotate_keys(shared[:, None], angle)
        first, rest = self.heads(self.q(x)).split([NOPE, ROPE], -1)
        query = torch.cat([first, self.rotate(rest, self.tables)], -1)
        return query, self.key(own, turned), value

    def rotate(self, x, tables):
        a, b, (cos, sin) = x[..., ::2], x[..., 1::2], tables
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def rotate_keys(self, x, angle):
        return self.rotate(x, self.tables)


def run(kind: type) -> tuple:
    torch.manual_seed(0)
    model = kind().eval()
    program, _ = compiled(model, LATENTS)
    before = Runner(program, model)
    pipeline = Pipeline((("caches", (FuseLatentWrite, SplitTreeAttention)),))
    pipeline.run(program)
    return before, Runner(program, model), program, pipeline


def test_tables_of_other_origin() -> None:
    before, after, program, pipeline = run(Rotated)
    assert reasons(pipeline, FUSE) == []
    assert (rewrites(pipeline, FUSE), rewrites(pipeline, "SplitTreeAttention")) == (1, 0)
    assert program.calls(ops.rope_write_latent)[0].args[-1] == "apart"
    assert_latents_alike(before, after)


class Turned(Rotated):
    """By the opposite angle."""

    def rotate(self, x, tables):
        a, b, (cos, sin) = x[..., ::2], x[..., 1::2], tables
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


class OtherTables(Rotated):
    def rotate_keys(self, x, angle):
        return self.rotate(x, (angle.sin(), angle.cos()))


class OtherPairs(Rotated):
    """Neighbors that stay neighbors, of keys."""

    def rotate_keys(self, x, angle):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(3)


class Every(Rotated):
    """The same columns twice, of which the first ones are no neighbors of the others."""

    def rotate(self, x, tables):
        a, b, (cos, sin) = x[..., 1::2], x[..., ::2], tables
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


FORM = "what heads share is rotated in another form, or not at all"
TABLES = "q and k are rotated by different tables"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Latent, FORM), (Turned, FORM), (OtherTables, TABLES), (OtherPairs, TABLES), (Every, FORM)],
)
def test_others_are_declined_with_reason(kind: type, reason: str) -> None:
    before, after, program, pipeline = run(kind)
    assert reasons(pipeline, FUSE) == [reason]
    assert not program.calls(ops.rope_write_latent)
    assert_latents_alike(before, after)


def test_weights_are_multiplied_where_they_are() -> None:
    """In half precision a CPU's products want rows of a weight side by side."""
    model = build_model("minicpm3").to(torch.bfloat16)
    program, _ = compiled(model, LATENTS)
    copies = program.calls(aten.contiguous.default)
    pipeline = Pipeline((("products", (ReadWeightViews,)),))
    pipeline.run(program)
    assert rewrites(pipeline, "ReadWeightViews") == len(program.layers)
    assert len(copies) - len(program.calls(aten.contiguous.default)) == len(program.layers)


def test_a_copy_that_others_read_stays() -> None:
    program, _ = compiled(build_model("minicpm3").to(torch.bfloat16), LATENTS)
    copy = next(
        node for node in program.calls(aten.contiguous.default) if "slice" in str(node.args[0])
    )
    with program.graph.inserting_after(copy):
        emit_call(program.graph, aten.neg.default, copy)
    pipeline = Pipeline((("products", (ReadWeightViews,)),))
    pipeline.run(program)
    assert rewrites(pipeline, "ReadWeightViews") == len(program.layers) - 1
    assert reasons(pipeline, "ReadWeightViews") == [
        "another than a batch of products reads the copy"
    ]
