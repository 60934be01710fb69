"""`specc::block_conv`: a convolution along the rows of a block, whose factors are the row's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.kernels.operator import NoRule, OfHeads, Operator


def block_conv_reference(x: Tensor, base: Tensor, factors: Tensor, places: Tensor) -> Tensor:
    """Add up rows of a block, each channel by itself, from a row back to T - 1 rows before it.

    With j the number of row i in its block, which lies in one piece, and g = d / G channels that
    share a factor:

        out[i, c] = Σ_t (base[t, c] + factors[i, t, c // g]) · x[i - t, c]   over t < T, t ≤ j

    So nothing of another block, another sequence or the context is read.

    Args:
        x: [Nt, d] rows of a pass.
        base: [T, d] in the type of x.
        factors: [Nt, T, G] in the type of x, any strides; G divides d.
        places: [Nt, 1] int32, -1 - j; of rows of no block -1, and of padding anything below 0.
    Returns:
        [Nt, d] in the type of x, summed in float32.
    Source: `GroupedDynamicCausalConv` of DFlash 2, z-lab/dflash.
    """
    number = -1 - places
    rows, wide = torch.zeros_like(x, dtype=torch.float32), x.float()
    size = x.shape[1] // factors.shape[2]
    for tap in range(len(base)):
        before = F.pad(wide, (0, 0, tap, 0))[: len(wide)]
        own = base[tap].float() + factors[:, tap].float().repeat_interleave(size, 1)
        rows = rows + torch.where(number >= tap, own * before, 0.0)
    return rows.to(x.dtype)


def _block_conv_fake(x: Tensor, base: Tensor, factors: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(x.shape)


BLOCK_CONV = Operator(
    "block_conv(Tensor x, Tensor base, Tensor factors, Tensor places) -> Tensor",
    reference=block_conv_reference,
    fake=_block_conv_fake,
    # it reads the block's own rows before, and `places` says where these end
    tokens=OfHeads(tables=("x", "places"), of_tokens=("factors",), parameters=("base",)),
    cut=NoRule("a draft that reads hidden states is on one rank, all of it"),
    cpu=True,
)
