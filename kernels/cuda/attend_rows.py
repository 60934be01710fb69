"""Rows of heads in Triton: of D columns, in tiles of BD."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(p, o_d, D: tl.constexpr, BD: tl.constexpr):
    """What pointers [rows, BD] point to; columns from D on are zeros."""
    # a mask is spared where heads fill their tile
    if D == BD:
        return tl.load(p)
    else:
        return tl.load(p, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def load_keys(p, o_d, m_key, D: tl.constexpr, BD: tl.constexpr, IS_MASKED: tl.constexpr):
    """Rows [rows, BD] at pointers [rows, 1]; where masked, zeros of keys that are not there."""
    if IS_MASKED:
        return tl.load(p + o_d[None, :], mask=m_key[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        return load_rows(p + o_d[None, :], o_d, D, BD)
