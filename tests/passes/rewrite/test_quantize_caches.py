"""Caches of bytes, and queries and keys that are mixed for those of int8."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.kv_rows import FP8, INT8
from specc.kernels import ops
from specc.passes.facts import caches_are_quantized
from specc.passes.lower.cpu.phases import cpu_phases
from specc.passes.lower.cuda.phases import cuda_phases, launches_per_layer
from specc.passes.pipeline import Phases, Pipeline
from specc.passes.program import Program, bind_args
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.rewrite.quantize_caches import QuantizeCaches
from tests.models import VOCAB, build_model
from tests.passes.modules import Runner, assert_runs_alike, compiled
from tests.passes.rewrite.test_absorb_latent import Latent
from tests.passes.rewrite.test_expand_prompts import run


def quantized(name: str, kind: str = INT8) -> tuple[Program, torch.nn.Module]:
    model = build_model(name)
    program, _ = compiled(model)
    QuantizeCaches(kind).run(program)
    assert caches_are_quantized(program)
    verify_tokenwise(program, "caches")
    return program, model


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_queries_and_keys_are_mixed(name: str) -> None:
    program, _ = quantized(name)
    calls = program.calls(ops.tree_attention)
    assert calls
    for node in calls:
        bound = bind_args(node)
        assert [bound[x].target is ops.hadamard for x in ("q", "k", "v")] == [True, True, False]


def test_fp8_is_not_mixed() -> None:
    program, _ = quantized("llama", FP8)
    assert not program.calls(ops.hadamard)


def test_latents_are_not_mixed() -> None:
    """Their first columns are values, too."""
    _, program, _ = run(Latent, QuantizeCaches(INT8))
    assert not program.calls(ops.hadamard)


@pytest.mark.parametrize("phases", [cpu_phases(64), cuda_phases(64)], ids=["cpu", "cuda"])
@pytest.mark.parametrize(("name", "apart"), [("llama", 0), ("gemma3", 0), ("gpt2", 2)])
def test_what_rotates_rows_mixes_them(name: str, apart: int, phases: Phases) -> None:
    """In one operator, where rows are rotated at all, and to the same numbers."""
    program, model = quantized(name)
    before = Runner(program, model)
    Pipeline(phases).run(program)
    layers = len(program.calls(ops.attend))
    assert len(program.calls(ops.hadamard)) == apart * layers
    turned = program.calls(ops.rope_write, ops.norm_rope_write)
    assert len(turned) == (0 if apart else layers)
    assert all(bind_args(node)["hadamard"] for node in turned)
    assert_runs_alike(before, Runner(program, model), VOCAB)


@pytest.mark.parametrize(("name", "apart"), [("gemma3", 0), ("gpt2", 2)])
def test_what_mixes_rows_launches_nothing(name: str, apart: int) -> None:
    """But where nothing is rotated: one for queries, one for keys."""
    counts = []
    for kind in (FP8, INT8):
        program, _ = quantized(name, kind)
        Pipeline(cuda_phases(64)).run(program)
        counts.append(launches_per_layer(program))
    assert counts[1] == tuple(count + apart for count in counts[0])
