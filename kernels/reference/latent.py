"""Oracle of attention over keys and values that a pass expands from cached latents."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.kernels.reference.core import attend_reference, rows_of_slots


def attend_expanded_reference(
    absorbed: Tensor,
    q: Tensor,
    k_cache: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    sink_logits: Tensor | None = None,
    *,
    most_rows: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Attend to what latents expand to, for sequences with many tokens in the pass.

    Of the others `absorbed` is the result. Keys of head h are [c · up_k[h]ᵀ, shared], and values
    c · up_v[h]ᵀ, of rows [c, shared] of the cache, which hold those of this pass, too. They are
    rounded to the dtype of q, as a cache of expanded rows would hold them.

    Args:
        absorbed: [H, Nt, DV] outputs of attention over latents.
        q: [H, Nt, n + r] queries, as they meet expanded keys.
        k_cache: [blocks, block_size, 1, R + r] in the dtype of q.
        up_k: [H, n, R].
        up_v: [H, DV, R].
        q_start: as of `tree_attention_reference`, like all that is not named here.
        position: [Nt] int64.
        slot: [Nt] int32; outputs of dead tokens are zero.
        cache_len: [B] int32.
        ancestors: [Nt, W] int64, or None.
        block_table: [B, n] int32.
        sink_logits: [H], or None.
        most_rows: sequences with more tokens than this are attended to here; at least 1.
        scale: factor of the scores.
        softcap: 0 is none.
    Returns:
        [H, Nt, DV] in the dtype of q, laid out as [Nt, H, DV].
    Source: DeepSeek-V2, arXiv:2405.04434 §2.1: keys and values as they are before absorption.
    """
    num_heads, num_tokens, value_dim = absorbed.shape
    out = q.new_empty(num_tokens, num_heads, value_dim).transpose(0, 1)
    out.copy_(absorbed)
    rank = up_k.shape[2]
    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        if last - first <= most_rows:
            continue
        length = int(slot[first:last].max()) + 1
        if length <= 0:
            out[:, first:last] = 0
            continue
        columns = torch.arange(length, device=q.device)
        rows = rows_of_slots(block_table[b], columns, k_cache.shape[1])
        latent, shared = k_cache.flatten(0, 2)[rows].split_with_sizes(
            [rank, k_cache.shape[3] - rank], -1
        )
        # [S, H, n], [S, H, DV]
        own, values = (
            torch.matmul(latent, up.transpose(1, 2)).transpose(0, 1) for up in (up_k, up_v)
        )
        keys = torch.cat([own, shared[:, None].expand(-1, num_heads, -1)], -1)
        # one block, which holds the whole sequence
        out[:, first:last] = attend_reference(
            q[:, first:last],
            keys[None],
            values[None].contiguous(),
            torch.tensor([0, last - first], dtype=torch.int32, device=q.device),
            position[first:last],
            slot[first:last],
            cache_len[b : b + 1],
            None if ancestors is None else ancestors[first:last],
            block_table.new_zeros(1, 1),
            sink_logits,
            scale=scale,
            softcap=softcap,
        )
    return out
