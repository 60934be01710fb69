"""Padded programs whose caches hold latents compute what the flat ones compute."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specc.artifact.backends import facts_of
from specc.artifact.cache_rows import CacheRows
from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.pipeline import Pipeline
from specc.passes.program import bind_args
from specc.passes.rewrite.padded import padded_program
from specc.passes.rewrite.require_supported import RequireAttention
from tests import models
from tests.flat_passes import PADDING, causal_pass, first_level, random_tree, tree_pass
from tests.onnx_models import BothPrograms, latent_phases, lowered, write_onnx
from tests.passes.shard.lockstep import assert_alike
from tests.passes.shard.padded_lockstep import PaddedRanks
from tests.traces import trace_once

# of keys, of the part that heads share, of values, and of the latent
WIDTHS = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 20}
ROWS = CacheRows(front=2, slots=100, scratch=74)
CHOOSER = random.Random(6)
PASSES = (
    causal_pass([0, 30], [21, 21], [0, 1]),
    causal_pass([21, 51, 5], [1, 1, 1], [0, 1, 2]),
    first_level([0, 1, 40], 3, [0, 1, 2]),
    tree_pass([21, 51], [random_tree(CHOOSER, 9) for _ in range(2)], [0, 1]),
    tree_pass([3, PADDING], [random_tree(CHOOSER, 66) for _ in range(2)], [2, 3]),
)


@pytest.mark.parametrize(
    "name",
    [
        "minicpm3",
        pytest.param("deepseek_v2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
    ],
)
def test_passes_equal_those_of_the_flat_program(name: str, tmp_path: Path) -> None:
    """By the graph itself, and by onnxruntime."""
    pair = lowered(name, ROWS, has_latents=True, **WIDTHS)
    directory = tmp_path / "onnx"
    write_onnx(pair, directory)
    for place in (None, directory):
        both = BothPrograms(pair, place, 4)
        for inputs in PASSES:
            both.compare(inputs, 2e-5)
    layers = pair.padded.calls(ops.masked_attention)
    assert len(layers) == len(pair.flat.layers) == 2
    # one cache of each layer, which is read as it is
    assert list(pair.padded.caches.values()) == [(0, "k"), (1, "k")]
    for node in layers:
        bound = bind_args(node)
        assert bound["k"] is bound["v"]
        assert bound["k"].target is ops.cache_write
        assert bound["k"].meta["val"].shape[1::2] == (1, 28)


def test_heads_of_ranks_share_the_latent() -> None:
    found = PaddedRanks("minicpm3", 2, phases=latent_phases(), **WIDTHS)
    assert {found.cut.placeholder(name).meta["val"].shape[1] for name in found.cut.caches} == {1}
    for inputs in (found.prompt(), found.tree()):
        wanted, written = found.run_whole(inputs)
        passed = found.run_graphs(inputs)
        parts = [logits for logits, _ in passed]
        assert_alike(torch.cat(parts, 1) if found.plan.cuts_vocabulary else parts[0], wanted)
        for _, own in passed:
            assert all(torch.allclose(own[x], value, atol=2e-5) for x, value in written.items())
        found.caches = written


def test_who_refuses_latents() -> None:
    model = models.build_model("minicpm3", **WIDTHS)
    program = trace_once(model, "target")
    Pipeline(latent_phases()).run(program)
    RequireAttention(facts_of("onnx")).run(program)
    with pytest.raises(UnsupportedAttentionError, match="keys of 28 columns and values of 20"):
        RequireAttention(facts_of("tensorrt")).run(program)


def test_another_model_than_that_of_the_flat_program() -> None:
    """Where the padded program has no latent, none is looked for in other keys."""
    model = models.build_model("minicpm3", **WIDTHS)
    flat = trace_once(model, "target")
    Pipeline(latent_phases()).run(flat)
    other = models.build_model("llama", num_hidden_layers=2)
    with pytest.raises(UnsupportedAttentionError, match="keys have no part that heads share"):
        padded_program(other, flat, ROWS.total)
