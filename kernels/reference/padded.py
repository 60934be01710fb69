"""Oracles of the operators of padded programs: what ONNX and TensorRT have of their own.

Such a program takes [B, N] tokens, and every sequence has one row of each layer's cache
[B, HK, L, D]. Both operators are functional: a runtime that binds a cache as input and output
updates it in place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cache_write_reference(cache: Tensor, update: Tensor, write_index: Tensor) -> Tensor:
    """A cache with the rows of a pass put into it.

    Args:
        cache: [B, HK, L, D].
        update: [B, HK, N, D]; N ≤ L.
        write_index: [B] int64 row of each sequence's first token; the others follow it.
    Returns:
        [B, HK, L, D], a new tensor.
    Raises:
        IndexError: a row before the cache or after it.
    Source: operator TensorScatter of ONNX opset 24, mode linear.
    """
    rows = write_index[:, None] + torch.arange(update.shape[2])
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= cache.shape[2]):
        raise IndexError(
            f"rows {int(rows.min())} … {int(rows.max())} of a cache of {cache.shape[2]}"
        )
    index = rows[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
    return cache.scatter(2, index, update.to(cache.dtype))


def masked_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attend to the rows that a mask names.

    Args:
        q: [B, H, N, D].
        k: [B, HK, L, D]; HK divides H.
        v: [B, HK, L, D].
        mask: [B, 1, N, L] bool; True is attended to.
        scale: factor of the scores.
    Returns:
        [B, H, N, D] in the dtype of q; softmax and accumulation are in float32. A token that
        attends to nothing gets zeros.
    Source: operator Attention of ONNX opset 24.
    """
    batch, num_heads, num_tokens, head_dim = q.shape
    num_kv_heads, length = k.shape[1], k.shape[2]
    queries = q.float().reshape(batch, num_kv_heads, -1, head_dim)
    scores = (queries @ k.float().transpose(2, 3)) * scale
    scores = scores.view(batch, num_heads, num_tokens, length)
    probs = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1).nan_to_num(0.0)
    # rows that nobody sees may hold anything, and 0 · NaN is NaN
    seen = mask.any(dim=2)[..., None]
    values = v.float().masked_fill(~seen, 0.0)
    out = probs.view(batch, num_kv_heads, -1, length) @ values
    return out.view(batch, num_heads, num_tokens, -1).to(q.dtype)
