"""Greedy output of further architectures equals `transformers.generate`, token for token.

As tests/runtime/test_lossless.py, for the architectures of tests/more_models.py: with off, a chain
and a tree, for all prompts in one batch and for one alone. The default tier has those in which the
compiler meets something of its own, each with a tree; the slow tier has them all.
"""

from __future__ import annotations

import pytest

from tests import models, more_models
from tests.lossless import PLANS, Zoo, run_case
from tests.tiers import every

NUM_TOKENS = 32
# off, chain-4, tree-2-2-1
CHOSEN = (PLANS[0], PLANS[2], PLANS[3])


@pytest.mark.default("mpt")
@pytest.mark.parametrize("name", every(6, more_models.COVERING))
def test_trees_equal_generate(zoo: Zoo, name: str) -> None:
    engine = zoo.engine(name, prefill_chunk=7)
    outcome = run_case(zoo, name, engine, "tree-2-2-1", models.prompts(), NUM_TOKENS)
    # a tree of which nothing is ever accepted says little
    assert outcome.stats.mean_acceptance_length > 1.2
    assert_varied(zoo, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", more_models.CONFIGS)
def test_greedy_equals_generate(zoo: Zoo, name: str) -> None:
    engine = zoo.engine(name, prefill_chunk=7)
    for plan in CHOSEN:
        prompts = models.prompts()
        for batch in (prompts, [prompts[CHOSEN.index(plan) + 1]]):
            outcome = run_case(zoo, name, engine, plan.name, batch, NUM_TOKENS)
        assert plan.max_depth == 0 or outcome.stats.mean_acceptance_length > 1.2
    assert_varied(zoo, name)


def assert_varied(zoo: Zoo, name: str) -> None:
    """An output of few tokens would hide almost any mistake."""
    tokens = [zoo.reference(name, prompt, NUM_TOKENS).tokens for prompt in models.prompts()]
    assert sum(len(set(line)) for line in tokens) / len(tokens) > 8
