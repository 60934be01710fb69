"""Oracles of where a tree's rows lie, and of what is committed once its path is accepted."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_rows_reference(cache_len: Tensor, nodes: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Where nodes of a tree stand in each sequence: node -1 is the token before the root.

    Args:
        cache_len: [B] int32 committed rows; the root's row is the next one.
        nodes: [M] int32 node ids; a node's row is its id after the committed ones.
        depths: [M] int32 depth of each node.
    Returns:
        slot: [B * M] int32 row of each node, -1 where there is none.
        position: [B * M] int64 position of each node, at least 0.
    """
    slot = (cache_len[:, None] + nodes).flatten()
    position = (cache_len[:, None] + depths).flatten().clamp(min=0)
    return slot.int(), position.long()


def commit_rows_reference(
    path: Tensor, cache_len: Tensor, slot_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of a model's cache that a step commits: its path as far as the model was fed it.

    Args:
        path: [B, P] int32 accepted nodes from the root on, then -1.
        cache_len: [B] int32 committed rows; a sequence with fewer than 0 commits nothing.
        slot_of: [N] or [B, N] int32 row after the committed ones in which the model holds each
            node, -1 where it was never fed it.
    Returns:
        source: [B, P] int32 slot of each committed node, -1 from the first node without a row on.
        length: [B] int32 committed rows after the step.
    """
    slots = slot_of.expand(path.shape[0], -1).gather(1, path.clamp(min=0).long())
    is_kept = (path >= 0) & (slots >= 0) & (cache_len >= 0)[:, None]
    is_kept = is_kept.int().cumprod(dim=1).bool()
    source = torch.where(is_kept, slots + cache_len[:, None], -1)
    return source.int(), (cache_len + is_kept.sum(dim=1)).int()


def next_tokens_reference(
    last_tokens: Tensor, output_tokens: Tensor, num_accepted: Tensor
) -> Tensor:
    """The last tokens of each sequence after a step, as many as were known before it.

    Args:
        last_tokens: [B, C] int64 before it, C at least 1.
        output_tokens: [B, P] int64 accepted tokens and the bonus token, then -1.
        num_accepted: [B] int32.
    Returns:
        [B, C] int64; the last is the bonus token.
    """
    run = torch.cat([last_tokens, output_tokens], dim=1)
    places = torch.arange(1, last_tokens.shape[1] + 1, device=run.device)
    return run.gather(1, num_accepted[:, None].long() + places)


def leave_step_reference(
    results: Tensor,
    last_tokens: Tensor,
    cache_len: Tensor,
    num_accepted: Tensor,
    output_tokens: Tensor,
    next_cache_len: Tensor,
    next_last_tokens: Tensor,
    draft_lens: Tensor | None,
) -> None:
    """Leave what the host reads of a step, and the state that the next one starts from.

    Args:
        results: [B, R] int64, mutated: number of accepted tokens, output tokens, committed rows of
            the target, and of each draft; columns after these stay.
        last_tokens: [B, C] int64, mutated.
        cache_len: [B] int32, mutated.
        num_accepted: [B] int32.
        output_tokens: [B, P] int64.
        next_cache_len: [B] int32.
        next_last_tokens: [B, C] int64.
        draft_lens: [drafts, B] int32 or None.
    """
    columns = [num_accepted[:, None], output_tokens, next_cache_len[:, None]]
    if draft_lens is not None:
        columns.append(draft_lens.t())
    found = torch.cat([column.long() for column in columns], dim=1)
    results[:, : found.shape[1]] = found
    last_tokens.copy_(next_last_tokens)
    cache_len.copy_(next_cache_len)


def commit_kv_reference(slab: Tensor, source: Tensor, target: Tensor, block_table: Tensor) -> None:
    """Move accepted rows of all layers to the end of the committed prefix.

    Args:
        slab: [L, 2, blocks, block_size, HK, D], mutated; rows of int8 move with their scales.
            Of rows that hold K and V the second size is 1.
        source: [B, P] int64 slot to read of each move, -1 for none.
        target: [B, P] int64 slot to write of each move, -1 for none.
        block_table: [B, n] int32.

    All rows are read before any is written: sources and targets may overlap.
    """
    block_size = slab.shape[3]
    live = (source >= 0) & (target >= 0) & (source != target)
    sequence = live.nonzero()[:, 0]

    def rows(slots: Tensor) -> Tensor:
        slots = slots[live].long()
        return block_table[sequence, slots // block_size].long() * block_size + slots % block_size

    # a slab of no layer has no size that could be told from the others
    flat = slab.view(*slab.shape[:2], slab.shape[2] * slab.shape[3], *slab.shape[4:])
    flat[:, :, rows(target)] = flat[:, :, rows(source)]
