"""The oracle of projections by quantized weights: every integer and every rounding is fixed here.

Rows are written as integers, too, so that sums are exact in any order: an implementation has the
bits of this one at any number of rows and threads and with any instructions.

A row x is cut into the groups of columns that share a scale of the weight, or into groups of 128
where the weight has one scale for each output. Of each group, with M = 32639 (16 bits) for bfloat16
rows and M = 8355711 (24 bits) for float32 rows:

    e = the smallest exponent, at least -64, with max |x| ≤ M · 2^e
    X = x · 2^-e rounded to the nearest integer, ties to even

M is the largest sum of two or three signed bytes: 127 · 256 + 127, or 127 · 65536 + 127 · 256 +
127. A bfloat16 whose exponent is not more than 6 below that of its group's largest has no error at
all; others have an error of at most 2^-15 of the largest (float32 rows: 2^-23). What is below 2^-65
counts as zero.

With u, z and s of the weight, C = Σ (u - z) · X over the group, exact in 32 bits for 16-bit rows.
For 24-bit rows X = 256 H + L, L = -128 … 127, and there are two sums, C_H and C_L. Then, each
operation rounded to float32,

    t = float(C), or float(C_H) · 256 + float(C_L)
    y = y + t · (s · 2^e),  group after group from y = 0
    result = y + bias, in the dtype of x
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, unpack

# columns of a row that share an exponent, where the weight has no groups
ROW_GROUP = 128
LEAST_EXPONENT = -64
_MOST = {torch.bfloat16: 32639, torch.float32: 8355711}


def linear_q_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    has_zeros: bool,
) -> Tensor:
    """Project rows by a quantized weight; see above.

    Args:
        input: [M, K] float32 or bfloat16; M may be 0.
        weight: uint8 [blocks, bytes], see `specc.artifact.quantized_layout`.
        bias: [N] in the dtype of the input, or None.
        out_features: N.
        bits: 8 or 4.
        group: columns of a scale, 32, 64 or 128; 0 for one scale an output, of 8 bits.
        has_zeros: groups have zero points of their own, of 4 bits.
    Returns:
        [M, N] in the dtype of the input. A row with a NaN or an infinity is all NaN.
    Source: llama.cpp's products of Q4_0 by rows of Q8_0, here with rows of 16 and 24 bits.
    """
    layout = QuantizedLayout(bits, group, has_zeros)
    levels, scales, zeros = unpack(weight, (out_features, input.shape[1]), layout)
    values, factors = row_integers(input, group or ROW_GROUP)
    y = torch.zeros(input.shape[0], out_features)
    for i, part in enumerate(values):
        first, own = i * (group or ROW_GROUP), i if group else 0
        steps = levels[:, first : first + part.shape[1]].double() - zeros[:, own, None].double()
        # of integers below 2^53, so every order gives these
        if input.dtype == torch.bfloat16:
            total = (part.double() @ steps.T).float()
        else:
            low = (part + 128) % 256 - 128
            high = (part - low) // 256
            total = (high.double() @ steps.T).float() * 256 + (low.double() @ steps.T).float()
        y = y + total * (scales[:, own] * factors[i][:, None])
    return (y if bias is None else y + bias.float()).to(input.dtype)


def row_integers(x: Tensor, group: int) -> tuple[list[Tensor], list[Tensor]]:
    """Integers and scales of rows, for each group of columns.

    Args:
        x: [M, K] float32 or bfloat16.
        group: columns of a group; the last one may have fewer.
    Returns:
        of each group, X [M, columns] int64 and 2^e [M] float32, NaN where a value is not finite.
    """
    most, values, factors = _MOST[x.dtype], [], []
    for part in x.float().split(group, 1):
        largest = part.abs().amax(1)
        finite = largest.isfinite()  # of NaN the maximum is NaN
        fraction, exponent = torch.frexp(torch.where(finite, largest, 0))  # fraction · 2^exponent
        over = fraction.double() * 2.0 ** most.bit_length() > most
        exponent = (exponent - most.bit_length() + over).clamp(min=LEAST_EXPONENT)
        scaled = torch.where(finite[:, None], part, 0) * _power_of_two(-exponent)[:, None]
        values.append(scaled.round().long())
        factors.append(torch.where(finite, _power_of_two(exponent), torch.nan))
    return values, factors


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly; `torch.ldexp` rounds a logarithm."""
    return (exponent.int() + 127 << 23).view(torch.float32)
