"""Oracles of trees that come as data: proposals of lookups and votes, and what a step records."""

from __future__ import annotations

import torch
from torch import Tensor


def image_slots_reference(image: Tensor, slots: Tensor, num_nodes: int) -> Tensor:
    """Where a draft's rows of merged nodes lie.

    Args:
        image: [B, T] int32 merged node of each of the draft's own nodes; what is no node of the
            merged tree, as the -1 of dead ones, has no row.
        slots: [T] or [B, T] int32 row after the draft's committed ones that each own node was fed
            into, -1 for nodes that were never fed.
        num_nodes: N, of the merged tree.
    Returns:
        [B, N] int32 row of each merged node: that of the first own node with a row; else -1.
    """
    rows = []
    for nodes, own in zip(image.tolist(), slots.expand(image.shape).tolist(), strict=True):
        row = [-1] * num_nodes
        for node, slot in zip(nodes, own, strict=True):
            if 0 <= node < num_nodes and row[node] < 0 <= slot:
                row[node] = slot
        rows.append(row)
    found = torch.tensor(rows, dtype=torch.int32, device=image.device)
    return found.view(image.shape[0], num_nodes)


def vote_chain_reference(tokens: Tensor, weights: Tensor) -> Tensor:
    """The majority's chain: from the root on, the heaviest next token of those that agree so far.

    Args:
        tokens: [B, S, L] int64 chains of S drafts; -1 ends a chain.
        weights: [B, S] float32, not negative. Those of equal tokens are added in the order of the
            drafts, in float32: a tie is one of these sums.
    Returns:
        [B, L] int64, then -1; a tie goes to the first draft's token.
    Source: Minions, arXiv:2402.15678 §3.
    """
    batch, num_drafts, length = tokens.shape
    chain = torch.full((batch, length), -1, dtype=torch.int64, device=tokens.device)
    agree = torch.ones(batch, num_drafts, dtype=torch.bool, device=tokens.device)
    for place in range(length):
        own = tokens[:, :, place]
        agree = agree & (own >= 0)
        votes = torch.zeros(batch, num_drafts, dtype=torch.float32, device=tokens.device)
        for s in range(num_drafts):
            is_vote = agree[:, s, None] & (own == own[:, s, None])
            votes += torch.where(is_vote, weights[:, s, None], 0.0)
        # the first of equal maxima
        best = torch.where(agree, votes, -1.0).argmax(dim=1, keepdim=True)
        chain[:, place] = torch.where(agree.any(dim=1), own.gather(1, best)[:, 0], -1)
        agree = agree & (own == chain[:, place, None])
    return chain


def lookup_reference(
    history: Tensor,
    block_table: Tensor,
    cache_len: Tensor,
    last_tokens: Tensor,
    ngram: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Prompt lookup: what followed the last tokens when they came before.

    The context is history up to cache_len and the root token, last_tokens[:, -1]. The longest
    suffix of it of at most `ngram` tokens that ends earlier in it, too, proposes what followed its
    latest such place; where that reaches the end of the context, it goes on with the proposals
    themselves, as a repetition does.

    Args:
        history: [blocks, block_size] int32.
        block_table: [B, n] int32.
        cache_len: [B] int32; nothing is found for a sequence with fewer than 1.
        last_tokens: [B, C] int64, the root last.
        ngram: longest suffix that is looked up, at least 1.
        num_tokens: L, proposals of each sequence, at least 1.
    Returns:
        tokens: [B, L + 1] int64, the root first; 0 where nothing was found.
        parents: [B, L + 1] int32: -1, 0, 1, … of a chain; all -1 where nothing was found.
    Source: prompt lookup decoding (A. Saxena, 2023).
    """
    device = last_tokens.device
    tokens = torch.zeros(len(cache_len), num_tokens + 1, dtype=torch.int64, device=device)
    tokens[:, 0] = last_tokens[:, -1]
    parents = torch.full(tokens.shape, -1, dtype=torch.int32, device=device)
    for b, length in enumerate(cache_len.tolist()):
        if length < 1:
            continue
        places = torch.arange(length, device=device)
        before = _token_of(history, block_table[b], places)
        context = torch.cat([before.long(), last_tokens[b, -1:]])
        # where the last `matched` tokens end earlier in the context
        ends, matched = places, 0
        while matched < ngram:
            longer = ends[ends >= matched]
            longer = longer[context[longer - matched] == context[length - matched]]
            if len(longer) == 0:
                break
            ends, matched = longer, matched + 1
        if matched == 0:
            continue
        last = int(ends[-1])
        step = torch.arange(num_tokens, device=device) % (length - last)
        tokens[b, 1:] = context[last + 1 + step]
        parents[b] = torch.arange(-1, num_tokens, device=device)
    return tokens, parents


def record_tokens_reference(
    history: Tensor,
    block_table: Tensor,
    cache_len: Tensor,
    last_tokens: Tensor,
    output_tokens: Tensor,
    num_accepted: Tensor,
) -> None:
    """Add a step's root and its output to the history: at cache_len, cache_len + 1, …

    The last of these, the bonus token, is the next step's root and may have no row yet: what stands
    after the table, or in no block of the history, is left out.

    Args:
        history: [blocks, block_size] int32, mutated.
        block_table: [B, n] int32.
        cache_len: [B] int32 before the step; a negative one writes nothing.
        last_tokens: [B, C] int64 before the step, the root last.
        output_tokens: [B, P] int64.
        num_accepted: [B] int32; num_accepted + 1 tokens were put out.
    """
    num_blocks, block_size = history.shape
    run = torch.cat([last_tokens[:, -1:], output_tokens], dim=1).int()
    steps = torch.arange(run.shape[1], device=run.device)
    position = cache_len[:, None] + steps
    is_live = (cache_len[:, None] >= 0) & (steps < num_accepted[:, None] + 2)
    is_live &= position < block_table.shape[1] * block_size
    position = torch.where(is_live, position, 0).long()
    blocks = block_table.gather(1, position // block_size).long()
    is_live &= (blocks >= 0) & (blocks < num_blocks)
    rows = blocks * block_size + position % block_size
    history.view(-1)[rows[is_live]] = run[is_live]


def _token_of(history: Tensor, blocks: Tensor, position: Tensor) -> Tensor:
    """Tokens at positions of one sequence."""
    block_size = history.shape[1]
    return history[blocks[position // block_size].long(), position % block_size]
