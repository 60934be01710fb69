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


@pytest.fixture(scope="module")
def operators(native_operators: Any) -> Any:
    return native_operators


@pytest.mark.parametrize("temperature", [0.0, 1.1])
@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name.lower())
def test_trees_whose_last_nodes_are_dead_are_the_smaller_trees(operators, rule, temperature):
    """A token below 0 is never entered and never tried, whatever the logits after it are."""
    generator = torch.Generator().manual_seed(int(rule) + 5)
    batch, live = 48, 4
    tree = torch.tensor([-1, 0, 0, 0, 1, 1, 4], dtype=torch.int32)
    logits = torch.randn((batch, 7, 5), generator=generator)
    draft = torch.randn((batch, 5), generator=generator)
    tokens = torch.randint(0, 5, (batch, 7), generator=generator)
    q_rows = [-1, 0, 0, 0, -1, -1, -1]
    values, words = values_of(batch, temperature=temperature), words_of(rule, batch)
    words[:, 0] += torch.arange(batch)

    def walk(count: int, dead: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = tokens[:, :count].clone()
        own[:, dead:] = DEAD
        arguments = (
            rows[:, :count].flatten(0, 1), own, tree[:count].expand(batch, -1), 3, None,
            torch.tensor(q_rows[:count], dtype=torch.int32), [draft], values, words,
            torch.full((batch,), 7, dtype=torch.int32), torch.zeros(0, 4).int(),
            torch.zeros(batch, 0).int(),
        )  # fmt: skip
        found, native = accept_reference(*arguments), operators.accept(*arguments)
        assert all(torch.equal(one, other) for one, other in zip(found, native, strict=True))
        return found

    unseen = logits.clone()
    unseen[:, live:] = torch.nan
    # the last token of the vocabulary has the place -1
    for dead, smaller in ((live, live), (2, 2)):
        found, wanted = walk(7, dead, unseen), walk(smaller, smaller, logits)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        assert 0 < int(found[1].sum()) < batch
    # the whole tree goes further
    assert int(walk(7, 7, logits)[1].sum()) > int(walk(7, live, logits)[1].sum())


def cut_at(shape: str, choose: Callable[[Part, State], Tensor]) -> Propose:
    """A tree of which each sequence has some first nodes alone: the others are dead."""

    def propose(operators: Any, world: World, state: State) -> Proposals:
        part = draft_tree(operators, world.drafts[0], SHAPES[shape], state)
        live = choose(part, state)
        is_dead = torch.arange(part.tokens.shape[1]) >= live[:, None]
        tree = alone(part, SHAPES[shape].max_depth)
        return replace(tree, tokens=tree.tokens.masked_fill(is_dead, DEAD))

    return propose


@few_and_many
@pytest.mark.parametrize("shape", ["chain-3", "tree-3-2"])
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name.lower())
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
