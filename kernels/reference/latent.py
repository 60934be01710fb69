"""Oracles of what is beside cached latents: keys and values expanded from them, and rotations."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.kernels.reference.core import attend_reference, rows_of_slots, write_kv_reference

# which columns a rotation turns together: one of each half; neighbors, which stay neighbors; and
# neighbors of which the first ones come before the second ones then
PAIRS = ("halves", "neighbors", "apart")


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


def rope_write_latent_reference(
    q: Tensor,
    q_rest: Tensor,
    latent: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    pairs: str,
) -> Tensor:
    """Rotate what queries and keys have beside latents, and write the keys to the cache.

    Args:
        q: [H, Nt, R] queries against latents, any strides with a contiguous last dimension; so are
            the next three.
        q_rest: [H, Nt, P], P even.
        latent: [1, Nt, R].
        shared: [1, Nt, P], the part of keys that all heads share.
        cos: [Nt, P]; each half of it is of one column of each pair.
        sin: [Nt, P].
        k_cache: [blocks, block_size, 1, R + P], mutated.
        v_cache: its first R columns, which are written along.
        q_start: [B + 1] int32, as of `tree_attention_reference`; so are the last two.
        slot: [Nt] int32; dead tokens are rotated and not written.
        block_table: [B, n] int32.
        pairs: one of `PAIRS`.
    Returns:
        [H, Nt, R + P], queries and what is rotated of them, laid out as [Nt, H, R + P].
    Source: DeepSeek-V2, arXiv:2405.04434 §2.1.3.
    """
    keys = torch.cat([latent, _rotated_pairs(shared, cos, sin, pairs)], dim=-1)
    places = (k_cache, v_cache, q_start, slot, block_table)
    write_kv_reference(keys, latent, *places, values_in_keys=True)
    queries = torch.cat([q, _rotated_pairs(q_rest, cos, sin, pairs)], dim=-1)
    return queries.transpose(0, 1).contiguous().transpose(0, 1)


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, -1) if pairs == "halves" else (wide[..., ::2], wide[..., 1::2])
    (cos, cos2), (sin, sin2) = cos.float().chunk(2, -1), sin.float().chunk(2, -1)
    turned = first * cos - second * sin, second * cos2 + first * sin2
    both = torch.stack(turned, -1).flatten(-2) if pairs == "neighbors" else torch.cat(turned, -1)
    return both.to(x.dtype)
