"""Stages of a pipeline after the CUDA phases: cut before them, and lowered one by one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from specc.compiler.stages import constants_of, cut_stages
from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases, launches
from specc.passes.pipeline import Pipeline
from specc.passes.program_json import program_to_json
from specc.passes.segments.cut_segments import Segment
from specc.runtime.backends.eager.program import ModelProgram
from tests import models
from tests.passes.lower.cuda.test_sharded import PLANS
from tests.passes.shard.lockstep import (
    assert_alike,
    fused,
    make_caches,
    prompt_inputs,
    tree_inputs,
    whole_weights,
)
from tests.passes.shard.test_lockstep import PROMPTS
from tests.tiers import every, only


@cache
def lowered(name: str) -> tuple[Segment, ...]:
    """Two stages of a model, each of which has been through the phases."""
    stages = cut_stages(fused(models.build_model(name)).copy("target"), 2)
    for stage in stages:
        Pipeline(cuda_phases(models.POSITIONS)).run(stage.program)
    return stages


@pytest.mark.parametrize(
    "name", only(("qwen3", "gpt_neox"), every(3, [*models.ARCHITECTURES, "gemma3-tied"]))
)
def test_lowered_stages_one_after_another_are_the_model(name: str) -> None:
    """A prompt, then a token, a chain and a tree over the rows that it left; caches, too."""
    model = models.build_model(name)
    whole = fused(model)
    weights, caches = whole_weights(model, whole), make_caches(whole)
    constants = constants_of(whole)
    alone = ModelProgram(program_to_json(whole), weights | constants, caches)
    programs, parts = [], []
    for stage in lowered(name):
        parts.append(make_caches(stage.program))
        own = weights | constants_of(stage.program)
        programs.append(ModelProgram(program_to_json(stage.program), own, parts[-1]))
    committed = [len(prompt) for prompt in PROMPTS]
    generator = torch.Generator().manual_seed(5)
    passes = [prompt_inputs(PROMPTS)]
    for plan in PLANS:
        tokens = torch.randint(models.VOCAB, (2, plan.num_nodes), generator=generator)
        passes.append(tree_inputs(plan, tokens, committed))
    for inputs in passes:
        with torch.inference_mode():
            wanted = alone(*inputs)
            hidden = programs[0](*inputs)
            assert_alike(programs[1](*inputs, hidden=hidden), wanted)
    layers = [layer for stage in lowered(name) for layer in stage.layers]
    assert layers == list(range(len(whole.layers)))
    for found, other in zip((pair for part in parts for pair in part), caches, strict=True):
        for mine, theirs in zip(found, other, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


def test_kernels_of_a_stage_are_those_of_the_model() -> None:
    """But at the cut: a sum, a lookup of positions, a norm and a rotation by themselves."""
    whole = fused(models.build_model("llama")).copy("target")
    Pipeline(cuda_phases(models.POSITIONS)).run(whole)
    first, last = (stage.program for stage in lowered("llama"))
    assert first.calls(ops.embed_norm_rope_write)
    assert last.calls(ops.add_norm_head)
    (norm,) = last.calls(ops.rms_norm)
    assert "hidden" in {node.target for node in norm.all_input_nodes}
    assert len(launches(first)) + len(launches(last)) == len(launches(whole)) + 4
