"""Trees of which some nodes are dead: walked as the smaller tree, and lossless by which rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.reference.accept import accept_reference
from specc.sampling.rows import Rule
from specc.speculation.live_nodes import DEAD
from tests.kernels.distribution import Options, Proposals, Propose, State, World, measure
from tests.kernels.distribution_trees import SHAPES, Part, alone, draft_tree
from tests.kernels.slow_sampling import values_of, words_of
from tests.kernels.test_distribution import (
    ANY_TREE,
    HARD_WORLD,
    MARGINS,
    WORLD,
    check,
    few_and_many,
    seed_of,
)
from tests.tiers import checkered


class Trees:
    """Trees of seven nodes, of which any first ones may be live.

    Args:
        temperature: likewise.
    """

    batch = 32
    parents = torch.tensor([-1, 0, 0, 0, 1, 1, 4], dtype=torch.int32)
    q_rows = torch.tensor([-1, 0, 0, 0, -1, -1, -1], dtype=torch.int32)

    def __init__(self, rule: Rule, temperature: float) -> None:
        generator = torch.Generator().manual_seed(int(rule) + 5)
        self.logits = torch.randn((self.batch, 7, 5), generator=generator)
        self.draft = torch.randn((self.batch, 5), generator=generator)
        self.tokens = torch.randint(0, 5, (self.batch, 7), generator=generator)
        self.values = values_of(self.batch, temperature=temperature)
        self.words = words_of(rule, self.batch)
        self.words[:, 0] += torch.arange(self.batch)

    def walk(self, accept: Any, count: int, live: int) -> tuple[Tensor, Tensor, Tensor]:
        """Through `count` nodes, of which those after `live` are dead and have no logits."""
        tokens, logits = self.tokens[:, :count].clone(), self.logits[:, :count].clone()
        # the last token of the vocabulary has the place -1
        tokens[:, live:] = DEAD
        logits[:, live:] = torch.nan
        return accept(
            logits.flatten(0, 1), tokens, self.parents[:count].expand(self.batch, -1), 3, None,
            self.q_rows[:count], [self.draft], self.values, self.words,
            torch.full((self.batch,), 7, dtype=torch.int32), torch.zeros(0, 4).int(),
            torch.zeros(self.batch, 0).int(),
        )  # fmt: skip


rules_and_temperatures = pytest.mark.parametrize(
    ("rule", "temperature"),
    [(rule, temperature) for rule in Rule for temperature in (0.0, 1.1)],
    ids=lambda value: value.name.lower() if isinstance(value, Rule) else str(value),
)


@pytest.mark.default("coupled-0.0", "mss-1.1", "swor-1.1")
@rules_and_temperatures
def test_trees_whose_last_nodes_are_dead_are_the_smaller_trees(rule, temperature):
    """A token below 0 is never entered and never tried."""
    trees = Trees(rule, temperature)
    for live in (4, 2):
        found, wanted = (trees.walk(accept_reference, count, live) for count in (7, live))
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        assert 0 < int(found[1].sum()) < trees.batch
    # the whole tree goes further
    whole, cut = (trees.walk(accept_reference, 7, live)[1] for live in (7, 4))
    assert int(whole.sum()) > int(cut.sum())


@pytest.mark.default("coupled-0.0", "mss-1.1")
@rules_and_temperatures
def test_native_walks_end_before_dead_nodes(operators, rule, temperature):
    trees = Trees(rule, temperature)
    for live in range(1, 8):
        found, wanted = (
            trees.walk(accept, 7, live) for accept in (operators.accept, accept_reference)
        )
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def cut_at(shape: str, choose: Callable[[Part, State], Tensor]) -> Propose:
    """A tree of which each sequence has some first nodes alone: the others are dead."""

    def propose(operators: Any, world: World, state: State) -> Proposals:
        part = draft_tree(operators, world.drafts[0], SHAPES[shape], state)
        live = choose(part, state)
        is_dead = torch.arange(part.tokens.shape[1]) >= live[:, None]
        tree = alone(part, SHAPES[shape].max_depth)
        return replace(tree, tokens=tree.tokens.masked_fill(is_dead, DEAD))

    return propose


@pytest.mark.default("delta-chain-3-60000")
@few_and_many
@pytest.mark.parametrize(
    ("rule", "shape"),
    checkered([pytest.param(rule, id=rule.name.lower()) for rule in Rule], ["tree-3-2", "chain-3"]),
)
def test_live_nodes_that_do_not_look_at_draws(operators, rule, shape, num_draws):
    """What a step shows may say how many of the next step's nodes are verified: any number."""
    count = SHAPES[shape].num_nodes

    def choose(part: Part, state: State) -> Tensor:
        # a function of what was emitted before: the last token, and how much there is
        return 1 + (state.last_tokens[:, -1] * 3 + state.cache_len) % count

    tree = cut_at(shape, choose)
    options = Options(rule, 1.0, top_p=0.9)
    outcome = measure(operators, WORLD, tree, options, seed_of(f"live-{rule}-{shape}"), num_draws)
    check(outcome, num_draws=num_draws)


@pytest.mark.default("swor-60000")
@few_and_many
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name.lower())
def test_live_nodes_that_look_at_draws(operators, rule, num_draws):
    """Cut where the draft was not sure of what it drew: refused, but for rules of any tree."""

    def choose(part: Part, state: State) -> Tensor:
        scores = part.draft_logits[0].softmax(dim=1).gather(1, part.tokens[:, 1:2])
        return torch.where(scores[:, 0] > 0.3, 4, 1)

    tree = cut_at("chain-3", choose)
    seed = seed_of(f"seen-{rule}")
    outcome = measure(operators, HARD_WORLD, tree, Options(rule, 1.0), seed, num_draws)
    if rule in ANY_TREE:
        assert outcome.is_lossless, outcome
    else:
        assert outcome.chi_square > MARGINS[num_draws] * outcome.chi_square_bound, outcome
