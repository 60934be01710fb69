"""Tensors without data that `launches` calls operators with."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
I32, I64 = torch.int32, torch.int64


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(num_tokens: int, num_heads: int, size: int, dtype: torch.dtype) -> Tensor:
    """Heads [H, Nt, D] of a fused projection of 16 heads."""
    fused = meta(num_tokens, 16 * size, dtype=dtype)[:, : num_heads * size]
    return fused.view(num_tokens, num_heads, size).transpose(0, 1)
