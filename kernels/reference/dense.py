"""Oracle of attention as models call it: dense, with sinks and a softcap."""

from __future__ import annotations

import torch
from torch import Tensor


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores that a softcap keeps within -softcap … softcap; 0 is no softcap.

    Source: Gemma 2, arXiv:2408.00118 §2.
    """
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def softmax_beside(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax over the last dimension, to which each head adds a score that has no value.

    Args:
        scores: [..., keys] float32, -inf where a key is not seen.
        sink_logits: [...] broadcast to the dimensions before keys, or None.
    Returns:
        as `scores`; each row adds up to less than 1 where there are sinks.
    Source: gpt-oss, arXiv:2508.10925 §2.2; arXiv:2309.17453.
    """
    if sink_logits is None:
        return torch.softmax(scores, dim=-1)
    beside = sink_logits.float().expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.softmax(torch.cat([scores, beside], dim=-1), dim=-1)[..., :-1]


def position_bias(
    slopes: Tensor, keys: Tensor, tokens: Tensor, rounded_scale: float | None
) -> Tensor:
    """What scores get for how far a key is from a token.

    The distance is exact, so there is one rounding, and none for what is near: models that add
    slope · position of the key round to half a unit of that product's last place.

    Args:
        slopes: [H] float32.
        keys: [T, S] or [S] positions.
        tokens: [T, 1] positions.
        rounded_scale: what products of slopes and positions are multiplied by, where positions
            and products were rounded to bfloat16; None where nothing is rounded.
    Returns:
        [H, T, S] float32.
    Source: ALiBi, arXiv:2108.12409 §3.
    """
    slopes = slopes[:, None, None]
    if rounded_scale is None:
        return slopes * (keys - tokens).float()
    ends = ((slopes * x.bfloat16().float()).bfloat16().float() for x in (keys, tokens))
    return (next(ends) - next(ends)) * rounded_scale


def dense_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sink_logits: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with groups, sinks and a softcap.

    Args:
        query: [B, H, T, D].
        key: [B, HK, T, D]; HK divides H, head h reads key head h // (H / HK).
        value: [B, HK, T, DV].
        attn_mask: broadcast to [B, H, T, T]: bool, True is seen, or added to the scores; None is
            causal.
        sink_logits: [H] score of each head that takes a share of the softmax and has no value.
        scale: factor of the scores.
        softcap: see `capped`; after the scale, before the mask; 0 is none.
    Returns:
        [B, H, T, DV] in the dtype of the query.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = (item.float().repeat_interleave(group, 1) for item in (key, value))
    scores = capped(query.float() @ keys.transpose(2, 3) * scale, softcap)
    if attn_mask is None:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    else:
        scores = scores + attn_mask
    own = None if sink_logits is None else sink_logits[:, None]
    return (softmax_beside(scores, own) @ values).to(query.dtype)
