"""Ranks of targets whose layers keep states compute together what the whole model computes.

Each rank has heads, or channels, of its own of every state and replay row.
"""

from __future__ import annotations

import math
import re
from functools import cache

import pytest
import torch

from specc.errors import ConfigError
from specc.speculation.plans import SpecPlan
from tests import models
from tests.passes.shard.lockstep import (
    Both,
    Inputs,
    assert_alike,
    prompt_inputs,
    tree_inputs,
    with_states,
)
from tests.tiers import only

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
PROMPTS = [models.prompts()[3], models.prompts()[1]]

both = cache(Both.make)


def passes() -> list[Inputs]:
    """Prompts in two chunks, then a token, a chain and a tree, of which the root is certain."""
    generator = torch.Generator().manual_seed(7)
    counts = [len(prompt) for prompt in PROMPTS]
    made = [with_states(prompt_inputs(PROMPTS), counts)]
    for plan in (SpecPlan.from_widths((1,)), CHAIN, TREE):
        tokens = torch.randint(models.VOCAB, (2, plan.num_nodes), generator=generator)
        made.append(with_states(tree_inputs(plan, tokens, counts), [1, 1]))
        counts = [count + 1 for count in counts]
    return made


@pytest.mark.parametrize("name", only(("qwen3_next_hybrid", "lfm2", "nemotron_h"), models.HYBRIDS))
def test_two_ranks_together_are_the_model(name: str) -> None:
    assert_all_together_are(both(name, 2))


def assert_all_together_are(found: Both) -> None:
    for inputs in passes():
        with torch.inference_mode():
            wanted = found.whole(*inputs)
        assert_alike(found.logits(inputs), wanted)


@pytest.mark.parametrize(
    "name",
    only(
        ("qwen3_next_hybrid", "lfm2", "nemotron_h"),
        models.HYBRIDS,
    ),
)
def test_ranks_share_states(name: str) -> None:
    """Each has half of every state, and of every replay row; states are parts of the whole one."""
    found = both(name, 2)
    for inputs in passes()[:1]:
        with torch.inference_mode():
            found.whole(*inputs)
        found.run_ranks(inputs)
    for whole, *ranks in zip(*found.states, strict=True):
        for part in (0, 1):
            assert ranks[0][part].shape == ranks[1][part].shape
            assert 2 * math.prod(ranks[0][part].shape) == math.prod(whole[part].shape)
        if whole[0].dim() == 4:
            joined = torch.cat([rank[0] for rank in ranks], 1)
            torch.testing.assert_close(joined, whole[0], rtol=1e-4, atol=1e-4)
            assert not torch.equal(ranks[0][0], ranks[1][0])


def test_four_ranks_share_two_key_heads() -> None:
    found = Both.make("qwen3_5", 4, linear_num_key_heads=2, linear_num_value_heads=8)
    assert_all_together_are(found)
    keys = [layer for layer in found.states[1] if layer[0].dim() == 4]
    # of 4 ranks, two have the same key head: k, v, decay and beta
    assert {rows.shape[-1] for _, rows in keys} == {8 + 2 * 16 + 2 + 2}


def test_a_norm_over_all_heads_is_summed_over_ranks() -> None:
    """One number for each token of each layer; and states are shared all the same."""
    found = Both.make("bamba", 2, mamba_n_groups=1)
    assert_all_together_are(found)
    assert [x.bytes_per_token for x in found.plan.collectives].count(4) == 2
    whole, *ranks = ([state.numel() for state, _ in states] for states in found.states)
    assert sum(whole) > sum(ranks[0]) == sum(ranks[1])


def test_norms_over_heads_of_several_ranks_are_told() -> None:
    """Two groups of a gated norm, which four ranks would have to sum over."""
    told = "2 groups of heads of"
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        Both.make("nemotron_h", 4)
    assert "a number of ranks that divides them: 2" in str(caught.value)
