"""Ranks in lockstep: what all of them compute together is what the whole model computes."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from specc.artifact.kv_rows import AUTO
from specc.artifact.mla_cache import LATENT
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.rewrite.absorb_latent import AbsorbLatent
from specc.passes.rewrite.expand_prompts import ExpandPrompts
from specc.speculation.plans import SpecPlan
from tests import models
from tests.passes.shard.lockstep import Both, assert_alike, prompt_inputs, tree_inputs
from tests.traces import trace_once

ARCHITECTURES = (*models.ARCHITECTURES, "gemma3-tied")
CHAIN, TREE = SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((3, 2, 1))
PROMPTS = [models.prompts()[3], models.prompts()[1]]


# copied heads of keys, fused projections, biases of sums, parallel residuals, sinks, slopes; the
# others are shapes of these, and `test_sharded.py` of the fused programs cuts some of them, too
QUICK = {(name, 2) for name in ("llama", "gpt2", "opt", "phi", "phi3", "gpt_oss", "mpt")}
QUICK |= {("llama", 4)}

both = cache(Both.make)


def cases(*names: str) -> list[ParameterSet]:
    return [
        pytest.param(name, n, marks=() if (name, n) in QUICK else pytest.mark.slow)
        for name in names
        for n in (2, 4)
    ]


# sinks and slopes are cut with their heads; softcaps and narrow values are not cut
@pytest.mark.default("llama-2", "phi-2", "phi3-2", "opt-2", "mpt-2")
@pytest.mark.parametrize(
    ("name", "num_ranks"), cases(*ARCHITECTURES, "gpt_oss", "gemma2", "deepseek_v3", "mpt")
)
def test_all_ranks_together_are_the_model(name: str, num_ranks: int) -> None:
    """A prompt, then a token, a chain and a tree over the rows that it left."""
    assert_all_together_are(both(name, num_ranks))


def assert_all_together_are(models_: Both) -> None:
    generator = torch.Generator().manual_seed(7)
    committed = [len(prompt) for prompt in PROMPTS]
    passes = [prompt_inputs(PROMPTS)]
    for plan in (SpecPlan.from_widths((1,)), CHAIN, TREE):
        tokens = torch.randint(models.VOCAB, (2, plan.num_nodes), generator=generator)
        passes.append(tree_inputs(plan, tokens, committed))
    for inputs in passes:
        with torch.inference_mode():
            wanted = models_.whole(*inputs)
        assert_alike(models_.logits(inputs), wanted)


# heads whose rotary parts are interleaved, and complex numbers
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_ranks_have_heads_of_one_latent(name: str, num_ranks: int) -> None:
    """Wk, Wv and queries are cut by heads; rows of the latent are whole on each rank."""
    # wider than what it is expanded to, by a little
    model = models.build_model(name, kv_lora_rank=20)
    absorb = partial(AbsorbLatent, LATENT, AUTO)
    whole = trace_once(model, "target")
    expand = ("prompts", (ExpandPrompts,))
    Pipeline((*PHASES[:3], ("latent", (absorb,)), *PHASES[3:], expand)).run(whole)
    # prompts are attended to over what latents expand to, too
    assert len(whole.calls(ops.attend_expanded)) == 2
    for node in whole.calls(ops.tree_attention, ops.attend_expanded):
        node.kwargs = {**node.kwargs, "most_rows": min(map(len, PROMPTS)) - 1}
    found = Both.of(model, num_ranks, whole=whole)
    for keys, values in (layer for caches in found.caches for layer in caches):
        assert (keys.shape[2:], values.shape[2:]) == ((1, 28), (1, 20))
        assert keys.data_ptr() == values.data_ptr()
    for cut in found.plan.weights:
        if "kv_b_proj" in cut.key or "q_b_proj" in cut.key:
            assert cut.local_shape[0] * num_ranks == cut.shape[0]
    assert_all_together_are(found)


@pytest.mark.parametrize(("name", "num_ranks"), cases(*ARCHITECTURES))
def test_sums_and_bytes_are_as_few_as_they_can_be(name: str, num_ranks: int) -> None:
    found = both(name, num_ranks)
    layers = len(found.caches[0])
    # the two branches of a parallel residual are summed together
    each = 1 if name in ("phi", "gpt_neox") else 2
    assert [item.layer for item in found.plan.collectives] == sorted(
        [0, *range(1, layers + 1), *(range(1, layers + 1) if each == 2 else ())]
    )
    assert {item.bytes_per_token for item in found.plan.collectives} == {64 * 4}
    # counted while a pass runs
    found.run_ranks(prompt_inputs(PROMPTS))
    tokens = sum(map(len, PROMPTS))
    assert found.sums == [item.bytes_per_token * tokens for item in found.plan.collectives]
    for rank, program in enumerate(found.ranks):
        taken = {
            cut.key: cut.take(torch.empty(cut.shape), rank).numel() * 4
            for cut in found.plan.weights
        }
        assert sum(taken.values()) == found.plan.local_bytes
        assert program.weights.keys() >= taken.keys()
    share = found.plan.local_bytes * num_ranks / found.plan.whole_bytes
    # two heads of keys and values are copied for four ranks
    assert share < (1.05 if num_ranks == 2 or name in ("phi", "gpt2", "opt", "gpt_neox") else 1.15)
    assert found.plan.local_vocab_size * num_ranks == found.plan.vocab_size == models.VOCAB


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_has_the_heads_of_its_caches(num_ranks: int) -> None:
    """What ranks have written, side by side, is what the whole model has."""
    found = both("llama", num_ranks)
    inputs = prompt_inputs(PROMPTS)
    with torch.inference_mode():
        found.whole(*inputs)
    found.run_ranks(inputs)
    copies = max(1, num_ranks // 2)
    for layer, wanted in enumerate(found.caches[0]):
        for part in (0, 1):
            pieces = [caches[layer][part] for caches in found.caches[1:]]
            for rank, piece in enumerate(pieces):
                assert torch.equal(piece, pieces[rank // copies * copies])
            joined = torch.cat(pieces[::copies], 2)
            assert torch.allclose(joined, wanted[part], atol=1e-5)


def test_heads_with_slopes_are_cut() -> None:
    found = both("mpt", 2)
    heads = [caches[0][0].shape[2] for caches in found.caches]
    assert heads == [12, 6, 6]
    rows = {
        item.name: [item.value(rank).tolist() for rank in (0, 1)] for item in found.plan.constants
    }
    assert rows["rows_of_slopes"] == [list(range(6)), list(range(6, 12))]


def test_a_vocabulary_is_padded_and_its_padding_never_wins() -> None:
    """129 tokens on 4 ranks are 33 columns each, the last 3 of which no token has."""
    found = Both.make("qwen3", 4, vocab_size=129, num_hidden_layers=1)
    assert (found.plan.local_vocab_size, found.plan.vocab_size) == (33, 129)
    inputs = prompt_inputs(PROMPTS)
    with torch.inference_mode():
        wanted = found.whole(*inputs)
    logits = found.logits(inputs)
    assert_alike(logits, wanted)
    assert logits.shape[1] == 132
    assert logits[:, 129:].max() == -torch.inf


@pytest.mark.default("llama-4-changes3-5")
@pytest.mark.parametrize(
    ("name", "num_ranks", "changes", "num_sums"),
    [
        # between the table and the layers: a product from one width to another, and back
        ("opt", 2, {"word_embed_proj_dim": 32, "do_layer_norm_before": False}, 6),
        pytest.param("opt", 4, {"word_embed_proj_dim": 32}, 6, marks=pytest.mark.slow),
        # one head of keys is whole on every rank
        pytest.param("gemma3", 2, {"num_key_value_heads": 1}, 7, marks=pytest.mark.slow),
        ("llama", 4, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, 5),
        pytest.param("gpt_neox", 2, {"use_parallel_residual": False}, 5, marks=pytest.mark.slow),
    ],
)
def test_other_shapes(name: str, num_ranks: int, changes: dict[str, Any], num_sums: int) -> None:
    found = Both.make(name, num_ranks, **changes)
    inputs = prompt_inputs(PROMPTS)
    with torch.inference_mode():
        wanted = found.whole(*inputs)
    assert_alike(found.logits(inputs), wanted)
    assert len(found.plan.collectives) == num_sums


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param(
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "6 attention heads of model.layers.0.self_attn",
            marks=pytest.mark.slow,
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            "3 key and value heads of model.layers.0.self_attn",
        ),
        pytest.param(
            {"intermediate_size": 90},
            "90 inner features of model.layers.0.mlp.down_proj.weight [64, 90]",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["heads", "kv-heads", "inner"],
)
def test_what_cannot_be_divided_is_told_before_anything_is_cut(
    changes: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{told} in target, for 4 ranks")) as error:
        Both.make("qwen3", 4, num_hidden_layers=1, **changes)
    assert "a number of ranks that divides them: " in str(error.value)
