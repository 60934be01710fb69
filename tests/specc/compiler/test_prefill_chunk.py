"""How many tokens a prefill pass takes where nobody says it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specc.artifact.backends import facts_of
from specc.artifact.manifest_entries import LimitsEntry
from specc.compiler.backends.registry import compiler_backend
from specc.compiler.context import (
    engine_limits,
    fit_prefill_chunk,
    plan_model_memory,
    tokens_of_passes,
)
from specc.config import CompileConfig
from specc.drafters.block import MOST_ROWS, BlockDraft
from specc.passes.step.tiles import pass_rows
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.tree import WORD_BITS
from tests.passes.modules import Tiny, compiled

# whose passes keep all scores
FACTS = facts_of("onnx")


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return compiled(Tiny().eval())[0]


@pytest.mark.parametrize(
    ("backend", "options", "chunk"),
    [
        pytest.param("cuda", {}, 2048, id="cuda"),
        pytest.param("cpu", {}, 512, id="cpu"),
        pytest.param("eager", {}, 512, id="eager"),
        pytest.param("tensorrt", {}, 512, id="tensorrt"),
        pytest.param("cuda", {"prefill_chunk": 7}, 7, id="asked-for"),
        pytest.param("cuda", {"prefill_chunk": 8192}, 8192, id="more"),
        pytest.param("cuda", {"max_seq_len": 300, "max_batch_size": 3}, 900, id="all-sequences"),
        pytest.param("cuda", {"max_seq_len": 48, "max_batch_size": 2}, 512, id="at-least"),
    ],
)
def test_the_default_follows_the_backend(backend, options, chunk) -> None:
    default = compiler_backend(backend).prefill_chunk
    assert engine_limits([], [OFF], CompileConfig(**options), default).prefill_chunk == chunk


def limits_of(chunk: int) -> LimitsEntry:
    return LimitsEntry(8, 4096, 16, chunk, 1, 512)


def test_a_default_takes_no_more_memory_than_logits_may(program) -> None:
    """Halved until it fits, down to 512; what somebody asks for stays."""
    models = [(program, torch.float32)]
    most = plan_model_memory(program, limits_of(1024), torch.float32, [OFF], FACTS).workspace
    limit_mb = -(-most // (1 << 20))
    assert plan_model_memory(program, limits_of(2048), torch.float32, [OFF], FACTS).workspace > (
        limit_mb << 20
    )
    config = CompileConfig(max_logits_mb=limit_mb)
    assert fit_prefill_chunk(limits_of(2048), config, models, FACTS).prefill_chunk == 1024
    tight = dataclasses.replace(config, max_logits_mb=1)
    assert fit_prefill_chunk(limits_of(2048), tight, models, FACTS).prefill_chunk == 512
    wide = dataclasses.replace(config, max_logits_mb=512)
    assert fit_prefill_chunk(limits_of(2048), wide, models, FACTS).prefill_chunk == 2048
    asked = dataclasses.replace(tight, prefill_chunk=2048)
    assert fit_prefill_chunk(limits_of(2048), asked, models, FACTS).prefill_chunk == 2048


def test_tokens_of_passes() -> None:
    """Of one sequence: those of a chunk of prompts, or of a step where its pass is longer."""
    block = BlockDraft(40, 0)
    chain = SpecPlan.from_widths((1, 1, 1))
    drafted = chain.with_drafters({"draft_0": block})
    assert tokens_of_passes([chain, OFF], 2) == 4
    assert tokens_of_passes([chain, OFF], 32) == 32
    # what a step can have accepted, and the block
    assert tokens_of_passes([drafted, OFF], 32) == 4 + 40
    assert tokens_of_passes([drafted, OFF], 512) == 512


def test_words_of_mixed_drafters_are_for_every_tree_that_an_engine_may_get() -> None:
    """A chain that is tried later is longer than the one that the engine was compiled for."""
    mixed = BlockDraft(33, 0, causal_layers=(0,))
    chains = {n: SpecPlan.from_widths((1,) * n).with_drafters({"draft_0": mixed}) for n in (2, 32)}
    compiled_for = tokens_of_passes([chains[2], OFF], 32)
    assert pass_rows(chains[2], "draft_0") == 2 + 1 + 33
    assert compiled_for == pass_rows(chains[32], "draft_0") == 32 + 1 + 33
    most = BlockDraft(MOST_ROWS, 0, from_anchor=True, causal_layers=(0,))
    longest = SpecPlan.from_widths((1,)).with_drafters({"draft_0": most})
    assert tokens_of_passes([longest, OFF], 32) == 2 * MOST_ROWS + 1 == 2 * WORD_BITS - 1
