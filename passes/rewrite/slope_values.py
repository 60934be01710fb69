"""Whether what is added to scores is what slopes add."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.passes.program import Slopes

# beside a bias, what hides a key is at or below this, and what is added is far above it
HIDDEN = -6e4
_MOST_BIAS = 3e4


def misfit(values: Tensor, slopes: Slopes, scale: float, first: int = 0) -> float:
    """Largest difference of a mask and what slopes add, over what rounding explains.

    A row may be shifted as a whole: its softmax is the same. Of models that add slope · position
    of the key, rows are.

    Args:
        values: [..., T, T], broadcast to heads and rows, that are added to scores.
        scale: of scores.
        first: position of the first key, which only what is rounded depends on.
    Returns:
        above 1 where they differ; infinite where values are too large to tell from hidden keys.
    """
    unit, most = torch.finfo(values.dtype).eps, 0.0
    for head, value in enumerate(by_head(values, len(slopes.values))):
        value = value.float()
        places = torch.arange(first, first + value.shape[0])
        hidden = (value <= HIDDEN) | (places[None] > places[:, None])
        own = value.diagonal()[:, None]
        if slopes.rounds:
            ends = (slopes.values[head].bfloat16() * places.bfloat16()).float() * scale
            wanted = ends[None] - ends[:, None]
        else:
            wanted = slopes.values[head] * (places[None] - places[:, None])
        explained = 2 * unit * (value.abs() + own.abs() + wanted.abs()) + 1e-30
        error = ((value - own - wanted).abs() / explained).masked_fill(hidden, 0.0)
        if (value.masked_fill(hidden, 0.0).abs() > _MOST_BIAS).any():
            return float("inf")
        most = max(most, float(error.max()))
    return most


def by_head(values: Tensor, num_heads: int) -> Tensor:
    """[H, T, T] of what is broadcast to that."""
    width = values.shape[-1]
    heads = values.expand(*values.shape[:-2], width, width).reshape(-1, width, width)
    return heads.expand(num_heads, width, width)
