"""Passes of flat tokens as padded batches: [B, N] tokens, a mask, and a row to write to.

Everything here is arithmetic on tensors of one device without a host read, so that a graph of the
device can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specc.artifact.cache_rows import CacheRows, Reach
from specc.speculation.tree import WORD_BITS

# a slot so far below zero belongs to no sequence: see `step_buffers.PADDING`
_NO_SEQUENCE = -(1 << 20)


class PaddedBatch(NamedTuple):
    """Inputs of one padded pass.

    Args:
        tokens: [B, N] int64.
        positions: [B, N] int64.
        write_index: [B] int64 cache row of each sequence's first token.
        logit_rows: [R] int64.
        masks: of each reach of layers, [B, 1, N, L] bool.
    """

    tokens: Tensor
    positions: Tensor
    write_index: Tensor
    logit_rows: Tensor
    masks: Mapping[Reach, Tensor]


def padded_batch(
    rows: CacheRows,
    reaches: Sequence[Reach],
    tokens: Tensor,
    positions: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    logit_rows: Tensor,
    length: int | None = None,
) -> PaddedBatch:
    """A pass of as many tokens for each sequence, in slots that follow each other.

    A token with a negative slot, or of a sequence that takes no part (slots far below zero), is
    computed and attends to itself alone; what it writes lies in the rim.

    Args:
        reaches: of the model's layers, each once.
        tokens: [B, N] int64.
        positions: [B, N] int64.
        slot: [B, N] int32; slot[b, n] is slot[b, 0] + n.
        cache_len: [B] int32.
        ancestors: [B, N, W] int64, or None for a causal pass.
        logit_rows: [R] int64 rows of B * N.
        length: L, rows of the cache that there are; None is all of `rows`.
    """
    first = slot[:, 0].long()
    write_index = torch.where(
        first < _NO_SEQUENCE, rows.front + rows.slots, (first + rows.front).clamp(min=0)
    )
    masks = attention_masks(
        rows, reaches, positions, slot, write_index, cache_len, ancestors, length
    )
    return PaddedBatch(tokens, positions.clamp(min=0), write_index, logit_rows, masks)


def attention_masks(
    rows: CacheRows,
    reaches: Sequence[Reach],
    positions: Tensor,
    slot: Tensor,
    write_index: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    length: int | None = None,
) -> dict[Reach, Tensor]:
    """Of each reach, [B, 1, N, L]: what each token attends to.

    That is what `specc::tree_attention` lets it: its prefix and its ancestors in the tree, or,
    without ancestors, everything up to its position. No token attends to nothing.
    """
    device, num_tokens = slot.device, slot.shape[1]
    row = torch.arange(length or rows.total, device=device)
    column = row - rows.front
    live = (slot >= 0)[..., None]
    # [B, N, L], of tokens without a slot the row that they write to
    own = row == (write_index[:, None] + torch.arange(num_tokens, device=device))[..., None]
    distance = column - positions[..., None]
    if ancestors is None:
        in_prefix: Tensor | None = None
        allowed = (column >= 0) & (distance <= 0)
    else:
        lengths = cache_len[:, None].long()
        in_prefix = ((column >= 0) & (column < lengths))[:, None]
        node = column - lengths
        width = ancestors.shape[2] * WORD_BITS
        in_region = ((node >= 0) & (node < width))[:, None]
        node = node.clamp(0, width - 1)
        word = (node // WORD_BITS)[:, None].expand(-1, num_tokens, -1)
        bits = ancestors.gather(2, word) >> (node % WORD_BITS)[:, None]
        allowed = in_prefix | (in_region & (bits & 1).bool())
        if any(reach.chunk for reach in reaches):
            # of the nodes of a path, how many come after each of them, which slots do not say
            on_path = allowed & ~in_prefix
            after = on_path.flip(-1).cumsum(-1).flip(-1) - 1
            distance = torch.where(in_prefix, distance, -after)
    masks = {}
    for reach in reaches:
        near = allowed
        if reach.window:
            # of a tree, only the prefix is farther away than its depth
            inside = distance > -reach.window
            near = allowed & (inside if in_prefix is None else inside | ~in_prefix)
        if reach.chunk:
            near = near & (distance >= -(positions % reach.chunk)[..., None])
        masks[reach] = torch.where(live, near, own)[:, None]
    return masks


def named_inputs(given: PaddedBatch) -> dict[str, Tensor]:
    """Inputs of a pass under their names in the program, without the caches."""
    named = {key: getattr(given, key) for key in PaddedBatch._fields if key != "masks"}
    return named | {reach.mask_input: mask for reach, mask in given.masks.items()}


def named_caches(caches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Each layer's k and v cache under its name in the program.

    A value that lies in its key's row has no cache of its own: its first element is the key's.
    """
    return {
        f"{part}_cache_{layer}": tensor
        for layer, pair in enumerate(caches)
        for part, tensor in zip("kv", pair, strict=True)
        if part == "k" or tensor.data_ptr() != pair[0].data_ptr()
    }
