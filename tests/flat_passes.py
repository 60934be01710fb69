"""Inputs of flat passes of every kind, as the runner and steps give them to a model's program."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specc.speculation.tree import TokenTree

# committed rows of a row that belongs to no sequence; see `step_buffers.PADDING`
PADDING = -(1 << 30)

Inputs = dict[str, Tensor | None]


def causal_pass(
    starts: Sequence[int], counts: Sequence[int], blocks: Sequence[int], vocab: int = 128
) -> Inputs:
    """Tokens of several sequences before which `starts` are committed; logits for all."""
    places = [
        torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)
    ]
    return _inputs(places, places, starts, None, blocks, vocab)


def first_level(
    lengths: Sequence[int], num: int, blocks: Sequence[int], vocab: int = 128
) -> Inputs:
    """What a draft's first level feeds: the root and `num - 1` tokens before it.

    A sequence that has no such tokens gets slots below zero for them.
    """
    nodes = torch.arange(1 - num, 1)
    slots = [length + nodes for length in lengths]
    return _inputs([s.clamp(min=0) for s in slots], slots, lengths, None, blocks, vocab)


def tree_pass(
    lengths: Sequence[int],
    trees: Sequence[TokenTree],
    blocks: Sequence[int],
    nodes: Sequence[int] | None = None,
    vocab: int = 128,
) -> Inputs:
    """A tree of each sequence, of equal sizes.

    Args:
        lengths: committed rows of each sequence; PADDING is none.
        nodes: of each tree, those that are fed; None is all.
        vocab: ids are below.
    """
    picked = torch.tensor(list(range(trees[0].num_nodes) if nodes is None else nodes))
    pairs = list(zip(lengths, trees, strict=True))
    positions = [(n + torch.tensor(tree.depths)[picked]).clamp(min=0) for n, tree in pairs]
    slots = [n + picked for n, _ in pairs]
    ancestors = torch.cat([tree.ancestor_words()[picked] for tree in trees])
    return _inputs(positions, slots, lengths, ancestors, blocks, vocab)


def random_tree(chooser: random.Random, num_nodes: int) -> TokenTree:
    return TokenTree((-1, *(chooser.randrange(node) for node in range(1, num_nodes))))


def _inputs(
    positions: Sequence[Tensor],
    slots: Sequence[Tensor],
    lengths: Sequence[int],
    ancestors: Tensor | None,
    blocks: Sequence[int],
    vocab: int,
) -> Inputs:
    counts = torch.tensor([len(places) for places in positions])
    total = int(counts.sum())
    generator = torch.Generator().manual_seed(total + sum(blocks))
    return {
        "tokens": torch.randint(0, vocab, (total,), generator=generator),
        "positions": torch.cat(list(positions)).long(),
        "q_start": torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
        "slot": torch.cat(list(slots)).int(),
        "cache_len": torch.tensor(lengths, dtype=torch.int32),
        "ancestors": ancestors,
        "block_table": torch.tensor(blocks, dtype=torch.int32)[:, None],
        "logit_rows": torch.arange(total),
    }
