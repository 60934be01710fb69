"""Oracles of the operators of padded programs: what ONNX and TensorRT have of their own.

Such a program takes [B, N] tokens, and every sequence has one row of each layer's cache
[B, HK, L, D]. These operators are functional: a runtime that binds a cache as input and output
updates it in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.reference.dense import capped


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


def distance_bias_reference(
    mask: Tensor,
    positions: Tensor,
    slopes: Tensor,
    *,
    hidden: float,
    rounded_scale: float = 0.0,
) -> Tensor:
    """What scores get for how far keys are (ALiBi), in place of a mask that names the keys.

    A token sees its whole prefix from some row on and its path in the tree, in this order, so a
    key is as far from it as it sees keys after that one. Rows and slots need not be positions.

    Args:
        mask: [B, 1, N, L] bool; True is attended to.
        positions: [B, N] int64 of the tokens.
        slopes: [H] float32.
        hidden: what scores of all other keys get.
        rounded_scale: what products of slopes and positions are multiplied by, where positions
            and products are rounded to bfloat16; 0 where nothing is rounded.
    Returns:
        [B, H, N, L] float32.
    Source: ALiBi, arXiv:2108.12409 §3.
    """
    seen = mask.float()
    after = seen.sum(-1, keepdim=True) - seen.cumsum(-1)
    slopes = slopes[:, None, None]
    if rounded_scale:
        tokens = positions[:, None, :, None].float()
        keys, own = (
            (slopes * x.bfloat16().float()).bfloat16().float() for x in (tokens - after, tokens)
        )
        bias = (keys - own) * rounded_scale
    else:
        bias = slopes * -after
    return torch.where(mask, bias, hidden)


def masked_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, softcap: float = 0.0
) -> Tensor:
    """Attend to the rows that a mask names.

    Args:
        q: [B, H, N, D].
        k: [B, HK, L, D]; HK divides H.
        v: [B, HK, L, D].
        mask: [B, 1, N, L] bool; True is attended to. Or [B, H, N, L] floating-point, which is
            added to the scores: a key with the least number of its dtype is not attended to.
        scale: factor of the scores.
        softcap: see `capped`; before anything is added; 0 is none.
    Returns:
        [B, H, N, D] in the dtype of q; softmax and accumulation are in float32. A token that
        attends to nothing gets zeros.
    Source: operator Attention of ONNX opset 24.
    """
    batch, num_heads, num_tokens, head_dim = q.shape
    num_kv_heads, length = k.shape[1], k.shape[2]
    queries = q.float().reshape(batch, num_kv_heads, -1, head_dim)
    scores = capped((queries @ k.float().transpose(2, 3)) * scale, softcap)
    scores = scores.view(batch, num_heads, num_tokens, length)
    if mask.is_floating_point():
        scores, mask = scores + mask.float(), mask > torch.finfo(mask.dtype).min
    probs = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1).nan_to_num(0.0)
    # rows that nobody sees may hold anything, and 0 · NaN is NaN
    seen = mask[:, :1].any(dim=2)[..., None]
    values = v.float().masked_fill(~seen, 0.0)
    out = probs.view(batch, num_kv_heads, -1, length) @ values
    return out.view(batch, num_heads, num_tokens, -1).to(q.dtype)
