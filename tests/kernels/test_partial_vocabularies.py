"""Drafts that lack some of the target's tokens: their logits are -inf, and outputs the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specc.sampling.rows import Rule
from tests.kernels.distribution import Options, Outcome, Proposals, measure
from tests.kernels.distribution_trees import proposing
from tests.kernels.test_distribution import ANY_TREE, FEW_DRAWS, HARD_WORLD, WORLD, seed_of
from tests.tiers import only

# a tree has more children than the second kind of draft has tokens
LACKING = {"two": (1, 4), "all-but-one": (0, 1, 2, 4, 5)}


def without(world: Any, tokens: tuple[int, ...]) -> Any:
    """The first draft lacks these tokens; others have all."""
    first = world.drafts[0].clone()
    first[..., list(tokens)] = -torch.inf
    return replace(world, drafts=(first, *world.drafts[1:]))


def outcome_of(operators: Any, rule: Rule, shape: str, combination: str, lacking: str) -> Outcome:
    world = without(WORLD, LACKING[lacking])
    seed = seed_of(f"lacking-{rule}-{shape}-{combination}-{lacking}")
    tree = proposing(combination, shape)
    return measure(operators, world, tree, Options(rule, 1.0), seed, FEW_DRAWS)


@pytest.mark.parametrize("rule", only((Rule.SWOR,), Rule), ids=lambda rule: rule.name.lower())
def test_outputs_are_distributed_as_the_target(operators: Any, rule: Rule) -> None:
    for shape, combination, lacking in (
        ("tree-2-2-1", "two", "two"),
        ("tree-3-2", "one", "all-but-one"),
    ):
        outcome = outcome_of(operators, rule, shape, combination, lacking)
        assert outcome.is_lossless, (shape, outcome)
        assert outcome.accepted_per_step > 0.05


@pytest.mark.parametrize("rule", only((Rule.DELTA,), ANY_TREE), ids=lambda rule: rule.name.lower())
def test_trees_that_are_data(operators: Any, rule: Rule) -> None:
    assert outcome_of(operators, rule, "dynamic", "one", "two").is_lossless


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [pytest.param(Rule.MSS, marks=pytest.mark.slow), Rule.SWOR],
    ids=lambda rule: rule.name.lower(),
)
def test_probabilities_of_the_whole_vocabulary_are_refused(operators: Any, rule: Rule) -> None:
    """Children are drawn from what is left; verified with what was there, they lose."""
    tree = proposing("one", "tree-2-2-1")

    def verified_with_all(operators: Any, world: Any, state: Any) -> Proposals:
        found = tree(operators, world, state)
        logits = [torch.where(row.isinf(), 2.0, row) for row in found.draft_logits]
        return replace(found, draft_logits=logits)

    world = without(HARD_WORLD, LACKING["two"])
    for propose, is_right in ((tree, True), (verified_with_all, False)):
        options, seed = Options(rule, 1.0), seed_of(f"whole-{rule}")
        found = measure(operators, world, propose, options, seed, FEW_DRAWS)
        assert found.is_lossless == is_right, found
