"""Schemes that look like speculative sampling and change the distribution.

Each misuses the operators in one way, and stands beside the lossless form of the same tree: the
statistic has to refuse the one and pass the other. Trees have one level, so that nothing but the
scheme is at work, where it is one of a level. The last five are what drafters with conditional
scores, estimates of acceptance, iterated proposals and random inputs may get wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from specc.kernels.reference.processing import process_reference
from specc.kernels.reference.sampling import gumbel_reference
from specc.passes.step import draft_budget
from specc.sampling.rows import Rule, Value, Word
from specc.speculation.tree import TokenTree
from tests.kernels.distribution import Proposals, Propose, State, World
from tests.kernels.distribution_trees import Part, alone, draft_tree, merge, voted
from tests.kernels.eager_stage import budget_tree

# nodes of the levels that are shared out
_SHARED = (3, 4, 4)
# operators, world, state, whether it is done wrongly → tree
Build = Callable[[Any, World, State, bool], Proposals]


@dataclass(frozen=True)
class Scheme:
    """A tree, and the rule that verifies it.

    Args:
        build: of it.
        rule: that verifies it.
        temperature: of the sequences.
        is_deep: it does harm below the first level alone, so to few of the sequences.
    """

    build: Build
    rule: Rule = Rule.MSS
    temperature: float = 1.0
    is_deep: bool = False

    def proposing(self, is_wrong: bool) -> Propose:
        return lambda operators, world, state: self.build(operators, world, state, is_wrong)


def _star(operators: Any, world: World, state: State, width: int, *others: Part) -> Part:
    """Children of the root from the next draft."""
    column = sum(part.tokens.shape[1] for part in others)
    tree = TokenTree.from_widths((width,))
    table = world.drafts[len(others)]
    return draft_tree(operators, table, tree, state, column, len(others))


def _confidence(part: Part, state: State) -> Tensor:
    """[B, N - 1] probability that the draft gives to each child."""
    scores = process_reference(part.draft_logits[0], state.values, state.words)
    return scores.softmax(dim=1).gather(1, part.tokens[:, 1:])


def _in_order(part: Part, order: Tensor) -> Part:
    """The children [B, k] in another order."""
    tokens = torch.cat([part.tokens[:, :1], part.tokens[:, 1:].gather(1, order)], dim=1)
    return replace(part, tokens=tokens)


def _dropped(tree: Proposals, is_dropped: Tensor) -> Proposals:
    """Without some columns of proposals, [B, T]."""
    image = tree.image
    if image is None:
        image = torch.arange(tree.tokens.shape[1], dtype=torch.int32).expand_as(tree.tokens)
    return replace(tree, image=torch.where(is_dropped, -1, image))


def _repeats(tree: Proposals) -> Tensor:
    """[B, T]: columns whose node an earlier column has proposed."""
    assert tree.image is not None
    is_same = tree.image[:, :, None] == tree.image[:, None, :]
    return is_same.tril(-1).any(dim=2) & (tree.image > 0)


def _most_likely(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """The likeliest children, verified as if they had been drawn."""
    words = state.words.clone()
    words[:, Word.RULE] = Rule.DELTA
    part = _star(operators, world, replace(state, words=words), 2)
    return alone(part if is_wrong else replace(part, q_rows=[-1] * 3), 1)


def _sorted(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Independent draws, the likeliest tried first."""
    part = _star(operators, world, state, 3)
    if is_wrong:
        part = _in_order(part, _confidence(part, state).sort(dim=1, descending=True).indices)
    return alone(part, 1)


def _shuffled(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Draws without replacement, tried in another order than drawn."""
    part = _star(operators, world, state, 3)
    if is_wrong:
        part = _in_order(part, torch.rand(len(part.tokens), 3).argsort(dim=1))
    return alone(part, 1)


def _pruned(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Four draws without replacement, of which the two likeliest are kept, or the first two."""
    part = _star(operators, world, state, 4)
    place = torch.arange(4).expand(len(part.tokens), -1)
    if is_wrong:
        # place of each child by descending confidence
        place = _confidence(part, state).argsort(dim=1, descending=True).argsort(dim=1)
    is_dropped = torch.cat([torch.zeros_like(place[:, :1], dtype=torch.bool), place >= 2], dim=1)
    return _dropped(alone(part, 1), is_dropped)


def _unique(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Independent draws, each token tried once."""
    tree = merge(operators, [_star(operators, world, state, 4)], 1)
    return _dropped(tree, _repeats(tree)) if is_wrong else tree


def _merged_once(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Two drafts, the second's proposal left out where it is the first's."""
    first = _star(operators, world, state, 1)
    tree = merge(operators, [first, _star(operators, world, state, 1, first)], 1)
    return _dropped(tree, _repeats(tree)) if is_wrong else tree


def _majority(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """The token that most of three drafts drew, verified as if the first had drawn it."""
    parts: list[Part] = []
    for _ in range(3):
        parts.append(_star(operators, world, state, 1, *parts))
    chain = voted(operators, parts)
    if is_wrong:
        chain = replace(chain, q_rows=parts[0].q_rows, draft_logits=parts[0].draft_logits)
    return alone(chain, 1)


def _other_temperature(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Drawn at one temperature, verified at another."""
    values = state.values.clone()
    if is_wrong:
        values[:, Value.TEMPERATURE] *= 0.6
    return alone(_star(operators, world, replace(state, values=values), 1), 1)


def _by_tokens(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """A level whose nodes are kept for what was drawn, as where the best of a tree are: nodes lose
    the draws that the draft found unlikely.
    """
    if not is_wrong:
        return budget_tree(operators, world.drafts[0], _SHARED, state)

    def words_of_tokens(g: Any) -> Any:
        return g["sampling_words"]

    with mock.patch.object(draft_budget, "_words_of_counts", words_of_tokens):
        return budget_tree(operators, world.drafts[0], _SHARED, state)


def _of_root(table: Tensor, state: State) -> Tensor:
    """[B, V] of a draft after the root."""
    return table[state.last_tokens[:, -2], state.last_tokens[:, -1]]


def _scored(operators: Any, state: State, logits: Tensor, told: Tensor, width: int) -> Proposals:
    """Children of the root, drawn from logits [B, V], and verified as if from others."""
    tree = TokenTree.from_widths((width,))
    part = draft_tree(operators, logits, tree, state, after=lambda tokens, depth: logits[:, None])
    return alone(replace(part, draft_logits=[told]), 1)


def _candidates(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """The best tokens of a row alone may follow, verified as if all might."""
    logits = _of_root(world.drafts[0], state)
    chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, :3]
    own = torch.full_like(logits, -torch.inf).scatter(1, chosen, logits.gather(1, chosen))
    return _scored(operators, state, own, logits if is_wrong else own, 2)


def _backbone(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Drawn by what the token before adds to a row, verified as if by the row alone."""
    row = _of_root(world.drafts[0], state)
    added = world.drafts[1][0][state.last_tokens[:, -1]]
    return _scored(operators, state, row + added, row if is_wrong else row + added, 2)


def _stale(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """Iterated proposals (Jacobi): the second token was drawn after what an earlier pass had in
    the first place, and is verified as if after the first token of the path in hand.
    """
    table, root = world.drafts[0], state.last_tokens[:, -1:]
    # of a pass that knows no token of the block, with the noise of the same place
    guess = draft_tree(
        operators, table, TokenTree.chain(1), state,
        after=lambda tokens, depth: _of_root(table, state).roll(1, dims=1)[:, None],
    )  # fmt: skip
    before = guess.tokens[:, 1:]

    def after(tokens: Tensor, depth: int) -> Tensor:
        if not depth:
            return _of_root(table, state)[:, None]
        return table[root, before if is_wrong else tokens]

    part = draft_tree(operators, table, TokenTree.chain(2), state, after=after)
    told = [part.draft_logits[0], table[root[:, 0], part.tokens[:, 1]]]
    return alone(replace(part, draft_logits=told), 2)


def _sure(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """A child is left out where the draft is not sure: of the child, or of any token at all."""
    part = _star(operators, world, state, 1)
    sure = _confidence(part, state)
    if not is_wrong:
        scores = process_reference(part.draft_logits[0], state.values, state.words)
        sure = scores.softmax(dim=1).amax(dim=1, keepdim=True)
    is_dropped = torch.cat([torch.zeros_like(sure, dtype=torch.bool), sure < 0.4], dim=1)
    return _dropped(alone(part, 1), is_dropped)


def _random_input(operators: Any, world: World, state: State, is_wrong: bool) -> Proposals:
    """A draft that reads a random token, drawn by the noise that verification draws with."""
    seed, place = state.words[:, Word.SEED, None], state.cache_len.long()[:, None] + 1
    ids = torch.arange(world.target.shape[-1])
    seed = seed if is_wrong else seed + (1 << 40)
    read = gumbel_reference(seed, place, ids).argmax(dim=1)
    logits = _of_root(world.drafts[0], state) + 2 * world.drafts[1][0][read]
    return _scored(operators, state, logits, logits, 2)


SCHEMES = {
    "top-k-with-softmax-q": Scheme(_most_likely),
    "iid-sorted-by-q": Scheme(_sorted),
    "swor-in-random-order": Scheme(_shuffled, Rule.SWOR),
    "swor-pruned-by-confidence": Scheme(_pruned, Rule.SWOR),
    "iid-without-duplicates": Scheme(_unique),
    "merged-duplicate-dropped": Scheme(_merged_once),
    "vote-with-one-drafts-q": Scheme(_majority),
    "q-at-another-temperature": Scheme(_other_temperature),
    "budget-by-drawn-tokens": Scheme(_by_tokens, is_deep=True),
    "budget-by-drawn-tokens-swor": Scheme(_by_tokens, Rule.SWOR, is_deep=True),
    "candidates-with-q-of-all": Scheme(_candidates),
    "candidates-with-q-of-all-swor": Scheme(_candidates, Rule.SWOR),
    "score-with-q-of-the-row": Scheme(_backbone),
    "iterated-with-stale-q": Scheme(_stale, is_deep=True),
    "left-out-by-what-was-drawn": Scheme(_sure),
    "random-input-of-verification": Scheme(_random_input),
}
