"""Oracle of rows of K and V as caches hold them: in the type of the model, or as int8."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.kv_rows import SCALE_BYTES

# codes are -127 … 127, so that a row and its negative have the same ones
_MOST = 127
# rows whose largest value is below this are rows of zeros: their factor would be infinite
_LEAST = 1e-30


def store_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a cache of this type holds them.

    Of int8: codes round(x · (127 / max |x|)), ties to even, then the scale max |x| / 127, a
    float32 in four bytes. A row is one token's K or V of one KV head, so its bytes do not depend
    on the pass that writes it, nor on how heads are cut for ranks.

    Args:
        rows: [..., D] floating-point.
    Returns:
        [..., D] of that type; of int8 [..., D + 4]. A row with NaN or infinity becomes codes 0
        with such a scale, which reads as NaN.
    """
    if dtype != torch.int8:
        return rows.to(dtype)
    wide = rows.float()
    most = wide.abs().amax(dim=-1, keepdim=True)
    is_zero = most < _LEAST
    # two tensors: a number divided by a tensor is multiplied with a rounded reciprocal
    largest = torch.full_like(most, _MOST)
    factor = torch.where(is_zero | ~most.isfinite(), 0.0, largest / most)
    codes = (torch.nan_to_num(wide) * factor).round().clamp(-_MOST, _MOST).to(torch.int8)
    scale = torch.where(is_zero, 0.0, most / largest)
    scale_bytes = scale.flatten().view(torch.int8).view(*codes.shape[:-1], SCALE_BYTES)
    return torch.cat([codes, scale_bytes], dim=-1)


def read_rows(rows: Tensor) -> Tensor:
    """Values of rows of a cache, as attention takes them.

    Args:
        rows: [..., D] floating-point, or [..., D + 4] int8.
    Returns:
        [..., D] float32.
    """
    if rows.dtype != torch.int8:
        return rows.float()
    codes = rows[..., :-SCALE_BYTES]
    # a copy: four bytes anywhere are no float32
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).flatten()
    return codes.float() * scale.view(torch.float32).view(*codes.shape[:-1], 1)


def columns_of(cache: Tensor) -> int:
    """D of a cache [..., D], or of int8 [..., D + 4]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)
