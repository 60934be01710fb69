"""The smallest Triton kernel, to ask whether such an operator enters a .pt2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double_kernel(x, out, size, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, 2 * tl.load(x + o, mask=o < size), mask=o < size)
