"""Scales that are a byte each: those of weights in e2m1.

- mxfp4: e8m0, the exponent of float32, for 32 columns; 0 is scale 0.
- nvfp4: e4m3 without sign, for 16 columns, and for each output a factor, float32, that all of its
  scales are multiplied with. Checkpoints have one factor for a matrix; matrices with different ones
  may then lie one after the other.

Source: OCP Microscaling Formats (MX) 1.0, §5.3; NVIDIA, Pretraining Large Language Models with
NVFP4, arXiv:2509.25149, §2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.weight_layout import BLOCK

MXFP4, NVFP4 = "mxfp4", "nvfp4"
# kind → columns of a scale
GROUPS = {MXFP4: 32, NVFP4: 16}
# columns whose scales lie together
TOGETHER = 128
_E4M3 = torch.float8_e4m3fn


def encode(scales: Tensor, kind: str) -> Tensor:
    """Bytes of scales that `check` has let pass, in their shape."""
    if kind == MXFP4:
        return (scales.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return scales.to(_E4M3).view(torch.uint8)


def decode(stored: Tensor, kind: str) -> Tensor:
    """Scales in float32 of their bytes, in their shape."""
    if kind == MXFP4:
        return (stored.int() << 23).view(torch.float32)
    return stored.contiguous().view(_E4M3).float()


def header(scales: Tensor, kind: str) -> Tensor:
    """Scales [blocks · 32, groups] of up to 128 columns as a header, uint8 [blocks, 4 or 8, 32]."""
    groups = TOGETHER // GROUPS[kind]
    found = torch.nn.functional.pad(encode(scales, kind), (0, groups - scales.shape[1]))
    return found.view(-1, BLOCK, groups).transpose(1, 2).contiguous()


def of_header(part: Tensor, kind: str) -> Tensor:
    """Scales [blocks · 32, 4 or 8] float32 of the bytes of headers [blocks, bytes]."""
    parts = part.view(len(part), -1, BLOCK).transpose(1, 2)
    return decode(parts.reshape(len(part) * BLOCK, -1), kind)


def check(scales: Tensor, kind: str) -> None:
    """Raises ValueError: scales that no byte stands for."""
    scales = scales.float()
    if kind == MXFP4:
        is_wrong = (scales.contiguous().view(torch.int32) & 0x807FFFFF) != 0
        needed = "powers of two from 2^-126 to 2^127"
    else:
        is_wrong = (scales.to(_E4M3).float() != scales) | (scales < 0)
        needed = "of e4m3 and not below 0"
    wrong = int((is_wrong | ~scales.isfinite()).sum())
    if wrong:
        raise ValueError(f"{wrong} scales are not {needed}")
