"""Oracles of rows of any width in a paged slab: hidden states that a later pass reads.

A slab is paged as K and V are, by the same block tables: what a token writes lies at the slot of
its K and V, so rows move, are shared and are computed again with these.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.kernels.reference.core import rows_of_slots


def write_rows_reference(
    x: Tensor, slab: Tensor, q_start: Tensor, slot: Tensor, block_table: Tensor
) -> None:
    """Write a row of each in-flight token to a paged slab.

    Args:
        x: [Nt, W] in the dtype of the slab.
        slab: [blocks, block_size, W], mutated.
        q_start: [B + 1] int32; sequence b owns tokens q_start[b] … q_start[b + 1] - 1.
        slot: [Nt] int32 row of its sequence that each token is written to; -1 is a dead token,
            which writes nothing, as one that no sequence owns.
        block_table: [B, n] int32 block ids of each sequence, in slot order.
    """
    flat = slab.view(-1, slab.shape[2])
    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        slots = slot[first:last].long()
        live = slots >= 0
        rows = rows_of_slots(block_table[b], slots[live], slab.shape[1])
        flat[rows] = x[first:last][live]


def take_rows_reference(
    slab: Tensor, slots: Tensor, q_start: Tensor, block_table: Tensor
) -> Tensor:
    """Read rows of a paged slab, some for each in-flight token.

    Args:
        slab: [blocks, block_size, W].
        slots: [Nt, K] int32 rows of its sequence that each token reads; -1 is none.
        q_start: [B + 1] int32, as of `write_rows_reference`.
        block_table: [B, n] int32, likewise.
    Returns:
        [Nt, K, W] in the dtype of the slab; zeros for -1, and for tokens that no sequence owns.
    """
    flat = slab.view(-1, slab.shape[2])
    out = slab.new_zeros(*slots.shape, slab.shape[2])
    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        own = slots[first:last].long()
        live = own >= 0
        rows = rows_of_slots(block_table[b], own[live], slab.shape[1])
        out[first:last][live] = torch.index_select(flat, 0, rows)
    return out
