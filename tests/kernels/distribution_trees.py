"""Trees that the distribution suite verifies, built by the operators level by level."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.speculation.tree import TokenTree
from tests.kernels.distribution import Proposals, Propose, State, World, logits_after
from tests.kernels.eager_stage import budget_tree

NGRAM = 3
SHAPES = {
    "chain-3": TokenTree.chain(3),
    "tree-2-2-1": TokenTree.from_widths((2, 2, 1)),
    "tree-3-2": TokenTree.from_widths((3, 2)),
    "irregular": TokenTree((-1, 0, 0, 0, 1, 1, 2, 4, 6)),
}
# children of a node, levels, and nodes that are kept
DYNAMIC = (3, 3, 7)
# nodes of each level that is shared out
BUDGET = (3, 4, 3)


@dataclass(frozen=True)
class Part:
    """One source's tree: tokens and parents [B, N], rows of the draft logits its nodes are from."""

    tokens: Tensor
    parents: Tensor
    q_rows: Sequence[int]
    draft_logits: Sequence[Tensor] = ()


def expand_tree(parents: Sequence[int], batch: int) -> Tensor:
    return torch.tensor(parents, dtype=torch.int32).expand(batch, -1)


def draft_tree(
    operators: Any,
    table: Tensor,
    tree: TokenTree,
    state: State,
    column: int = 0,
    row: int = 0,
    factors: Sequence[float] = (),
    is_told: bool = True,
    after: Callable[[Tensor, int], Tensor] | None = None,
) -> Part:
    """A static tree. Where siblings are fewer than elsewhere in their level, the first ones stay.

    Args:
        operators: namespace.
        column: of the root among the proposals of all sources.
        row: rows of draft logits that other sources have before.
        factors: of the draft's logits, by depth; none are all 1.
        is_told: what verifies gets the logits after that, as it has to.
        after: logits [B, F, V] after tokens [B, F] of a depth; None are those of the table.
    """
    batch = len(state.words)
    tokens = state.last_tokens[:, -1:].repeat(1, tree.num_nodes)
    parents = expand_tree(tree.parents, batch)
    q_rows, levels = [-1] * tree.num_nodes, []
    for depth, level in enumerate(tree.levels[:-1]):
        frontier = [node for node in level if node not in tree.leaves]
        children = [tree.children(node) for node in frontier]
        if after is None:
            own = logits_after(table, tokens, parents, state)[:, frontier].flatten(0, 1)
        else:
            own = after(tokens[:, frontier], depth).flatten(0, 1)
        logits = own * factors[depth] if factors else own
        columns = torch.tensor([column + nodes[0] for nodes in children], dtype=torch.int32)
        found, _ = operators.draft_children(
            logits, max(map(len, children)), state.cache_len, columns, depth,
            state.values, state.words,
        )  # fmt: skip
        found = found.view(batch, len(frontier), -1)
        for place, nodes in enumerate(children):
            for rank, node in enumerate(nodes):
                tokens[:, node] = found[:, place, rank]
                q_rows[node] = row + place
        row += len(frontier)
        levels.append(logits if is_told else own)
    return Part(tokens, parents, q_rows, levels)


def block_tree(operators: Any, table: Tensor, tree: TokenTree, state: State) -> Part:
    """A product of levels: tokens of a depth are drawn once, from a row that knows the root alone.

    What the row of a depth is does not matter: here that of the root, moved by as many tokens.
    """
    batch = len(state.words)
    tokens = state.last_tokens[:, -1:].repeat(1, tree.num_nodes)
    parents = expand_tree(tree.parents, batch)
    root = logits_after(table, tokens, parents, state)[:, 0]
    levels = []
    for depth, level in enumerate(tree.levels[:-1]):
        children = [tree.children(node) for node in level]
        logits = root.roll(depth, dims=1)
        column = torch.tensor([tree.levels[depth + 1][0]], dtype=torch.int32)
        found, _ = operators.draft_children(
            logits, max(map(len, children)), state.cache_len, column, depth,
            state.values, state.words,
        )  # fmt: skip
        for nodes in children:
            tokens[:, list(nodes)] = found[:, : len(nodes)]
        levels.append(logits)
    return Part(tokens, parents, [depth - 1 for depth in tree.depths], levels)


def biased_tree(
    operators: Any, table: Tensor, tree: TokenTree, state: State, column: int = 0
) -> Part:
    """A tree of a block drafter whose logits are those of a depth, and what a token adds to them.

    What depths and tokens add does not matter: here the root's row, moved as in `block_tree`, and
    half of a row that a token has in the draft's table.
    """
    batch = len(state.words)
    root = state.last_tokens[:, -1:].repeat(1, tree.num_nodes)
    start = logits_after(table, root, expand_tree(tree.parents, batch), state)[:, 0]
    added = table.flatten(0, -2)[: table.shape[-1]]

    def after(tokens: Tensor, depth: int) -> Tensor:
        return start.roll(depth, dims=1)[:, None] + 0.5 * added[tokens]

    return draft_tree(operators, table, tree, state, column, after=after)


def dynamic_tree(operators: Any, table: Tensor, state: State) -> Part:
    """Expand the likeliest nodes of each level, then keep the likeliest of all (EAGLE-2)."""
    width, num_levels, num_nodes = DYNAMIC
    batch = len(state.words)
    tokens = state.last_tokens[:, -1:]
    parents = torch.full((batch, 1), -1, dtype=torch.int32)
    scores = torch.zeros(batch, 1)
    frontier = torch.zeros(batch, 1, dtype=torch.int64)
    for depth in range(num_levels):
        size = frontier.shape[1]
        logits = logits_after(table, tokens, parents, state)
        logits = logits.gather(1, frontier[:, :, None].expand(-1, -1, logits.shape[2]))
        columns = torch.arange(size, dtype=torch.int32) * width + tokens.shape[1]
        found, score = operators.draft_children(
            logits.flatten(0, 1), width, state.cache_len, columns, depth,
            state.values, state.words, True,
        )  # fmt: skip
        score = scores.gather(1, frontier)[:, :, None] + score.view(batch, size, width)
        first = tokens.shape[1]
        tokens = torch.cat([tokens, found.view(batch, -1)], dim=1)
        above = frontier.repeat_interleave(width, dim=1).int()
        parents = torch.cat([parents, above], dim=1)
        scores = torch.cat([scores, score.flatten(1)], dim=1)
        frontier = first + score.flatten(1).topk(width, dim=1).indices
    tokens, parents, _ = operators.rerank_tree(tokens, parents, scores, num_nodes)
    return Part(tokens, parents, [-1] * num_nodes)


def lookup_part(operators: Any, state: State, num_tokens: int) -> Part:
    tokens, parents = operators.lookup(
        state.history, state.block_table, state.cache_len, state.last_tokens,
        NGRAM, num_tokens,
    )  # fmt: skip
    return Part(tokens, parents, [-1] * (num_tokens + 1))


def source(
    operators: Any, world: World, index: int, shape: str, state: State, *after: Part
) -> Part:
    """Tree of draft `index`, whose columns and rows of logits follow those of other sources."""
    if shape == "dynamic":
        return dynamic_tree(operators, world.drafts[index], state)
    column = sum(part.tokens.shape[1] for part in after)
    row = sum(len(rows) // len(state.words) for part in after for rows in part.draft_logits)
    return draft_tree(operators, world.drafts[index], SHAPES[shape], state, column, row)


def alone(part: Part, max_depth: int) -> Proposals:
    """One tree: a column of proposals is its node."""
    return Proposals(
        part.tokens, part.parents, max_depth, None, part.q_rows, tuple(part.draft_logits)
    )


def merge(operators: Any, parts: Sequence[Part], max_depth: int) -> Proposals:
    """The union of paths, with all proposals."""
    start = [0, *itertools.accumulate(part.tokens.shape[1] for part in parts)]
    tokens, parents, image, _ = operators.merge_trees(
        torch.cat([part.tokens for part in parts], dim=1),
        torch.cat([part.parents for part in parts], dim=1),
        torch.tensor(start, dtype=torch.int32),
    )
    return Proposals(
        tokens, parents, max_depth, image,
        [row for part in parts for row in part.q_rows],
        [rows for part in parts for rows in part.draft_logits],
    )  # fmt: skip


def voted(operators: Any, parts: Sequence[Part]) -> Part:
    """The chain that most of the sources' chains agree on."""
    chains = torch.stack([part.tokens[:, 1:] for part in parts], dim=1)
    chain = operators.vote_chain(chains, torch.ones(chains.shape[:2]))
    length = chain.shape[1]
    places = torch.arange(-1, length, dtype=torch.int32).repeat(len(chain), 1)
    places[:, 1:][chain < 0] = -1
    tokens = torch.cat([parts[0].tokens[:, :1], chain.clamp(min=0)], dim=1)
    return Part(tokens, places, [-1] * (length + 1))


def depth_of(shape: str) -> int:
    if shape == "budget":
        return len(BUDGET)
    return DYNAMIC[1] if shape == "dynamic" else SHAPES[shape].max_depth


def proposing(combination: str, shape: str) -> Propose:
    """How a step's tree is made: drafts or lookup, of a shape."""
    depth = depth_of(shape)

    def propose(operators: Any, world: World, state: State) -> Proposals:
        if shape == "budget":
            return budget_tree(operators, world.drafts[0], BUDGET, state)
        if combination == "lookup":
            return alone(lookup_part(operators, state, depth), depth)
        first = source(operators, world, 0, shape, state)
        if combination == "one":
            return alone(first, depth)
        if combination == "one-and-lookup":
            # longer than the draft's tree is deep
            found = lookup_part(operators, state, 3)
            return merge(operators, [first, found], 3)
        second = source(operators, world, 1, shape, state, first)
        if combination == "two":
            return merge(operators, [first, second], depth)
        if combination == "two-and-lookup":
            found = lookup_part(operators, state, depth)
            return merge(operators, [first, second, found], depth)
        third = source(operators, world, 2, shape, state, first, second)
        assert combination == "voted", combination
        return alone(voted(operators, [first, second, third]), depth)

    return propose
