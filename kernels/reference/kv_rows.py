"""Oracle of rows of K and V as caches hold them: in the type of the model, or as codes."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.kv_rows import SCALE_BYTES, holds_quantized

# type of the codes' bits → what the largest value of a row becomes. Of int8, codes are -127 … 127,
# so that a row and its negative have the same ones; of fp8, what e4m3 has as its largest number
MOST_CODE = {torch.int8: 127, torch.uint8: 448}
# rows whose largest value is below this are rows of zeros: their factor could be infinite
LEAST = 1e-30


def store_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a cache of this type holds them.

    Of int8: codes round(x · (127 / max |x|)), ties to even, then the scale max |x| / 127, a
    float32 in four bytes. Of uint8: the same with 448, and the nearest numbers of e4m3, ties to
    even. A row is one token's K or V of one KV head, so its bytes do not depend on the pass that
    writes it, nor on how heads are cut for ranks.

    Args:
        rows: [..., D] floating-point.
    Returns:
        [..., D] of that type; of int8 and uint8 [..., D + 4]. A row with NaN or infinity becomes
        codes 0 with such a scale, which reads as NaN.
    """
    if dtype not in MOST_CODE:
        return rows.to(dtype)
    wide = rows.float()
    most = wide.abs().amax(dim=-1, keepdim=True)
    is_zero = most < LEAST
    # two tensors: a number divided by a tensor is multiplied with a rounded reciprocal
    largest = torch.full_like(most, MOST_CODE[dtype])
    scaled = torch.where(is_zero | ~most.isfinite(), 0.0, wide * (largest / most))
    if dtype == torch.int8:
        codes = scaled.round().clamp(-largest, largest).to(torch.int8)
    else:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.where(is_zero, 0.0, most / largest)
    scale_bytes = scale.flatten().view(dtype).view(*codes.shape[:-1], SCALE_BYTES)
    return torch.cat([codes, scale_bytes], dim=-1)


def read_rows(rows: Tensor) -> Tensor:
    """Values of rows of a cache, as attention takes them.

    Args:
        rows: [..., D] floating-point, or [..., D + 4] int8 or uint8.
    Returns:
        [..., D] float32.
    """
    if not holds_quantized(rows.dtype):
        return rows.float()
    codes = rows[..., :-SCALE_BYTES]
    # a copy: four bytes anywhere are no float32
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).flatten()
    values = codes if rows.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return values.float() * scale.view(torch.float32).view(*codes.shape[:-1], 1)


def hadamard_reference(x: Tensor) -> Tensor:
    """Rows times Sylvester's Hadamard matrix, normalized: an orthogonal one, its own inverse.

    Queries and keys that are both multiplied have the scores that they had, and a column of keys
    that is far larger than the others is spread over all, so that a scale for the row suits it.

    Args:
        x: [..., D]; where D is no power of two, as many columns as the largest that divides it are
            multiplied at a time.
    Returns:
        [..., D], computed in float32: doubling distances, then the factor.
    Source: QuaRot, arXiv:2404.00456 §4 (cached keys).
    """
    columns = x.shape[-1]
    size = columns & -columns
    rows, distance = x.float(), 1
    while distance < size:
        one, other = rows.unflatten(-1, (-1, 2, distance)).unbind(-2)
        rows = torch.stack([one + other, one - other], -2).flatten(-3)
        distance *= 2
    return (rows * size**-0.5).to(x.dtype)


def columns_of(cache: Tensor) -> int:
    """D of a cache [..., D], or of int8 or uint8 [..., D + 4]."""
    return cache.shape[-1] - (SCALE_BYTES if holds_quantized(cache.dtype) else 0)
