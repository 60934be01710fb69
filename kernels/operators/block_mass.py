"""`specc::block_mass`: how much attention the blocks of a sequence get.

Self-drafts choose by it the blocks that they read.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.kernels.operator import NoRule, OfHeads, Operator, nothing
from specc.kernels.reference.core import rows_of_slots
from specc.kernels.reference.kv_rows import read_rows
from specc.speculation.tree import WORD_BITS

# queries of a sequence that vote, at most
MOST_VOTERS = 32


def block_mass_reference(
    q: Tensor,
    k_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    mass: Tensor,
    *,
    scale: float,
) -> None:
    """Add to each block of a sequence the attention that the last queries of a pass give it.

    The first eight arguments are those of `tree_attention_reference`, whose keys are in the cache
    by now; so is the scale.

    Args:
        q: [H, Nt, D] queries.
        k_cache: [blocks, block_size, HK, D], or of int8 with D + 4 columns.
        q_start: [B + 1] int32.
        position: [Nt] int64.
        slot: [Nt] int32, -1 is a dead token, which does not vote.
        cache_len: [B] int32.
        ancestors: [Nt, W] int64, or None for a causal pass.
        block_table: [B, n] int32.
        mass: [M, C] float32, mutated; row b is that of sequence b, so M is at least B. Column c is
            that of column c of its block table: blocks of a prefix are shared, so their ids say
            nothing about a sequence. A row whose first element is below 0 stays as it is: nobody
            votes. C = 0 is nobody at all.
        scale: factor of the scores.

    A vote is the softmax over all rows that a query sees, so the votes of a query are 1 in all;
    they are summed over heads and over the last 32 live queries of a sequence.

    Raises:
        ValueError: a sequence has more blocks in use than columns, or no row.

    Source: the observation window of SnapKV, arXiv:2404.14469 §4, by block and over all heads.
    """
    if mass.shape[1] == 0:
        return
    if mass.shape[0] < len(cache_len):
        raise ValueError(f"found {mass.shape[0]} rows of mass, needed {len(cache_len)}")
    size, num_kv_heads = k_cache.shape[1:3]
    flat = k_cache.view(-1, *k_cache.shape[2:])
    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        live = torch.arange(first, last)[(slot[first:last] >= 0).cpu()].tolist()
        if not live or not mass[b, 0] >= 0:
            continue
        length = int(slot[live].max()) + 1
        if -(-length // size) > mass.shape[1]:
            raise ValueError(
                f"found {mass.shape[1]} columns of mass, needed {-(-length // size)}:"
                f" one for each block of sequence {b}"
            )
        voters = live[-MOST_VOTERS:]
        columns = torch.arange(length, device=q.device)
        if ancestors is None:
            allowed = columns <= position[voters, None]
        else:
            node = (columns - cache_len[b]).clamp(min=0)
            bits = ancestors[voters][:, node // WORD_BITS] >> (node % WORD_BITS)
            allowed = (columns < cache_len[b]) | (bits & 1).bool()
        keys = read_rows(flat[rows_of_slots(block_table[b], columns, size)])
        keys = keys.permute(1, 2, 0).repeat_interleave(q.shape[0] // num_kv_heads, dim=0)
        scores = (q[:, voters].float() @ keys) * scale  # [H, voters, length]
        votes = torch.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1)
        mass[b].index_add_(0, columns // size, votes.sum((0, 1)))


BLOCK_MASS = Operator(
    "block_mass(Tensor q, Tensor k_cache, Tensor q_start, Tensor position, Tensor slot,"
    " Tensor cache_len, Tensor? ancestors, Tensor block_table, Tensor(a!) mass, *, float scale)"
    " -> ()",
    reference=block_mass_reference,
    fake=nothing,
    tokens=OfHeads(("q",)),
    cut=NoRule("inserted after the cut, where a rank has all heads"),
    cuda="block_mass:block_mass",
    cpu=True,
)
