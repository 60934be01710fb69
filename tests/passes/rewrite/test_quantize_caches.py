"""Caches of bytes, and queries and keys that are mixed for those of int8."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.kv_rows import FP8, INT8
from specc.kernels import ops
from specc.passes.facts import caches_are_quantized
from specc.passes.lower.cpu.phases import cpu_phases
from specc.passes.pipeline import Pipeline
from specc.passes.program import Program, bind_args
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.rewrite.quantize_caches import QuantizeCaches
from tests.models import VOCAB, build_model
from tests.passes.modules import Runner, assert_runs_alike, compiled
from tests.passes.rewrite.test_absorb_latent import Latent
from tests.passes.rewrite.test_expand_prompts import run


def quantized(
    name: str, kind: str = INT8, transforms: bool = True
) -> tuple[Program, torch.nn.Module]:
    model = build_model(name)
    program, _ = compiled(model)
    QuantizeCaches(kind, transforms).run(program)
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


@pytest.mark.parametrize(("kind", "transforms"), [(FP8, True), (INT8, False)])
def test_neither_fp8_nor_other_devices_mix(kind: str, transforms: bool) -> None:
    program, _ = quantized("llama", kind, transforms)
    assert not program.calls(ops.hadamard)


def test_latents_are_not_mixed() -> None:
    """Their first columns are values, too."""
    _, program, _ = run(Latent, QuantizeCaches(INT8, True))
    assert not program.calls(ops.hadamard)


@pytest.mark.parametrize(("name", "apart"), [("llama", 0), ("gpt2", 2)])
def test_what_rotates_rows_mixes_them(name: str, apart: int) -> None:
    """In one operator, where rows are rotated at all, and to the same numbers."""
    program, model = quantized(name)
    before = Runner(program, model)
    Pipeline(cpu_phases(64)).run(program)
    layers = len(program.calls(ops.attend))
    assert len(program.calls(ops.hadamard)) == apart * layers
    turned = program.calls(ops.rope_write)
    assert len(turned) == (0 if apart else layers)
    assert all(bind_args(node)["hadamard"] for node in turned)
    assert_runs_alike(before, Runner(program, model), VOCAB)
