"""Weights of random levels, scales and zero points, in any layout that kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, pack


def whole_columns(k: int, layout: QuantizedLayout) -> int:
    """So many columns, or as many more as fill blocks of ggml."""
    return k if layout.blocks is None else -(-k // layout.blocks.columns) * layout.blocks.columns


def random_weight(n: int, k: int, layout: QuantizedLayout) -> Tensor:
    if (own := layout.blocks) is not None:
        levels = torch.randint(0, 1 << own.bits, (n, k), dtype=torch.uint8)
        headers = torch.randint(0, 256, (n, k // own.columns, own.header_bytes)).to(torch.uint8)
        # scales in fp16, some of them subnormal; there, and in iq4_xs alone, more bits of others
        spread = torch.exp2(torch.randint(-18, 4, (n, k // own.columns, 2)).float())
        halves = (torch.randn(spread.shape) * spread).half().view(torch.uint8)
        count = 4 if own.has_minimum else 2
        headers[..., :count] = halves[..., :count]
        return pack(levels, headers, None, layout)
    groups = layout.num_groups(k)
    levels = torch.randint(0, 1 << layout.bits, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << layout.bits, (n, groups)) if layout.has_zeros else None
    scales = torch.randn(n, groups)
    if layout.kind == "mxfp4":
        scales = torch.exp2(torch.randint(-9, 9, (n, groups)).float())
    if layout.kind == "nvfp4":
        codes = torch.randint(0, 127, (n, groups)).to(torch.uint8)
        scales = torch.cat([torch.randn(n, 1), codes.view(torch.float8_e4m3fn).float()], 1)
    if layout.is_float and layout.bits == 8:
        levels = torch.where(levels & 127 == 127, 3, levels)
    return pack(levels, scales, zeros, layout)
