"""The oracle of projections by quantized weights: every integer and every rounding is fixed here.

Rows are written as integers, too, so that sums are exact in any order: an implementation has the
bits of this one at any number of rows and threads and with any instructions.

A row x is cut into the groups of columns that share a scale of the weight, or into groups of 128
where the weight has one scale for each output. Its integers have 16 bits where it is bfloat16, and
24 where it is float32, or float16, which devices have; `row_bits` asks for fewer. Of each group,
with M = 32639 (16 bits) or M = 8355711 (24 bits):

    e = the smallest exponent, at least -64, with max |x| ≤ M · 2^e
    X = x · 2^-e rounded to the nearest integer, ties to even;  r = 2^e

M is the largest sum of two or three signed bytes: 127 · 256 + 127, or 127 · 65536 + 127 · 256 +
127. A bfloat16 whose exponent is not more than 6 below that of its group's largest has no error at
all; others have an error of at most 2^-15 of the largest (24 bits: 2^-23). What is below 2^-65
counts as zero.

8 bits are too few for a power of two to decide how they are used. There, each operation rounded to
float32, and X = r = 0 where max |x| is below 2^-64,

    X = x · (127 / max |x|) rounded to the nearest integer, ties to even;  r = max |x| / 127

whose error is at most 1/254 of the largest: what llama.cpp (Q8_0), OpenVINO and onnxruntime
(accuracy level 4) do with rows.

With u, z and s of the weight, C = Σ (u - z) · X over the group, exact in 32 bits for rows of 8 and
16 bits. For 24-bit rows X = 256 H + L, L = -128 … 127, and there are two sums, C_H and C_L. Then,
each operation rounded to float32,

    t = float(C), or float(C_H) · 256 + float(C_L)
    y = y + t · (s · r),  group after group from y = 0
    result = y + bias, in the dtype of x

Of ggml's blocks, groups of a row have 32 columns, and those of a weight 32 or 16: two of a weight
then have one e and r. Where a group has a minimum m, z is 0, and with S = Σ X, exact, there follows
on y + t · (s · r), each operation rounded to float32,

    y = y - m · (float(S) · r)

mxfp4 is the same: in place of u - z stands twice the value of e2m1, an integer from -12 to 12, and
in place of s its half. nvfp4 is, too, with s = the group's e4m3 · the output's factor, rounded; of
a row 32 columns share a factor.

fp8 is not: as integers, values of e4m3 have 18 bits, and their products with those of a row would
take two sums more than 32 bits hold, twice the instructions of float32, which has no error to
begin with: rows stay as they are, and what is fixed is the order. Over a group (128 columns where
the weight has one scale an output), in the order of columns, each step rounded once,

    t = fma(x, v / 256, t) from t = 0
    y = y + t · (s · 256)

so that a row's bits depend on nothing but the row here, too. v / 256 is what half precision makes
of the bits of e4m3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, unpack

# columns of a row that share a factor, where the weight has no groups
ROW_GROUP = 128
# least columns that do
ROW_GROUPS = 32
LEAST_EXPONENT = -64
_MOST = {8: 127, 16: 32639, 24: 8355711}


def linear_q_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    has_zeros: bool,
    is_float: bool = False,
    row_bits: int = 0,
    format: str = "",
) -> Tensor:
    """Project rows by a quantized weight; see above.

    Args:
        input: [M, K] float32, bfloat16 or float16; M may be 0. Only padded programs, which are
            not run but written, have more dimensions before K.
        weight: uint8 [blocks, bytes], see `specc.artifact.quantized_layout`.
        bias: [N] in the dtype of the input, or None.
        out_features: N.
        bits: 8 or 4; of ggml's blocks, 2 to 8.
        group: columns of a scale, 32, 64 or 128; 0 for one scale an output, of 8 bits; 16 of nvfp4;
            of ggml's blocks, 16 or 32.
        has_zeros: groups have zero points of their own, of integers.
        is_float: the weight is fp8 (8 bits), or mxfp4 or nvfp4 (4 bits).
        row_bits: of the integers of rows, 8, 16 or, of float32, 24; 0 is 16 for bfloat16, else 24.
            Rows by fp8 are not integers.
        format: of ggml's blocks, whose bits and group the weight has, or `fragments`; empty for
            others.
    Returns:
        [M, N] in the dtype of the input. A row with a NaN or an infinity is all NaN; by fp8 it is
        what float32 makes of it.
    Source: llama.cpp's products of Q4_0 by rows of Q8_0, here with rows of 8, 16 and 24 bits.
    """
    layout = QuantizedLayout(bits, group, has_zeros, is_float, format)
    levels, scales, zeros = unpack(weight, (out_features, input.shape[1]), layout)
    width, minima = max(group or ROW_GROUP, ROW_GROUPS), None
    if is_float and bits == 8:
        y = _by_fp8(input, layout.values(levels), scales, width)
        return (y if bias is None else y + bias.float()).to(input.dtype)
    if layout.blocks is not None:
        steps = layout.blocks.steps(levels).double()
        scales, minima = layout.blocks.factors(scales)
    else:
        wide = zeros.repeat_interleave(group or input.shape[1], 1)[:, : input.shape[1]]
        steps = layout.values(levels).double() - wide
    if is_float:
        steps, scales = 2 * steps, layout.scales(scales) / 2
    row_bits = row_bits or bits_of_rows(input.dtype)
    values, factors = row_integers(input, width, row_bits)
    y = torch.zeros(input.shape[0], out_features)
    for i, whole in enumerate(values):
        factor = factors[i][:, None]
        for j, part in enumerate(whole.split(group or width, 1)):
            first = i * width + j * (group or width)
            own = first // group if group else 0
            part_of_w = steps[:, first : first + part.shape[1]]
            # of integers below 2^53, so every order gives these
            if row_bits < 24:
                total = (part.double() @ part_of_w.T).float()
            else:
                low = (part + 128) % 256 - 128
                high = (part - low) // 256
                total = (high.double() @ part_of_w.T).float() * 256 + (
                    low.double() @ part_of_w.T
                ).float()
            y = y + total * (scales[:, own] * factor)
            if minima is not None:
                y = y - minima[:, own] * (part.sum(1, keepdim=True).float() * factor)
    return (y if bias is None else y + bias.float()).to(input.dtype)


def grouped_mm_q_reference(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    out_features: int,
    bits: int,
    group: int,
    has_zeros: bool,
    is_float: bool = False,
    row_bits: int = 0,
    format: str = "",
) -> Tensor:
    """Project each run of rows by its expert's quantized weight.

    Every row has the bits that `linear_q_reference` gives it: how many others its expert has, and
    where its run begins, do not matter.

    Args:
        x: [M, K] float32 or bfloat16, rows sorted by expert.
        weight: uint8 [E · blocks, bytes], the blocks of one expert after those of the other.
        ends: [E] int32, E ≥ 1, ascending; expert e owns rows ends[e - 1] … ends[e] - 1.
        out_features: N, of each expert.
        bits: of a level; this and the rest are as of `linear_q_reference`.
        group: columns of a scale.
        has_zeros: groups have zero points of their own.
        is_float: the weights are fp8, mxfp4 or nvfp4.
        row_bits: of the integers of rows.
    Returns:
        [M, N] in the dtype of x; rows from ends[E - 1] on are zero.
    """
    out, first = x.new_zeros(x.shape[0], out_features), 0
    numbers = (out_features, bits, group, has_zeros, is_float, row_bits, format)
    blocks = weight.shape[0] // max(1, len(ends))
    for own, last in zip(weight.split(blocks or 1), ends.tolist(), strict=False):
        if last > first:
            out[first:last] = linear_q_reference(x[first:last], own, None, *numbers)
        first = last
    return out


def bits_of_rows(dtype: torch.dtype) -> int:
    """Of the integers of rows of this type, where nobody asks for fewer."""
    return 16 if dtype == torch.bfloat16 else 24


def row_integers(x: Tensor, group: int, bits: int) -> tuple[list[Tensor], list[Tensor]]:
    """Integers and scales of rows, for each group of columns.

    Args:
        x: [M, K] float32, bfloat16 or float16.
        group: columns of a group; the last one may have fewer.
        bits: of an integer, 8, 16 or 24.
    Returns:
        of each group, X [M, columns] int64 and r [M] float32, NaN where a value is not finite.
    """
    most, values, factors = _MOST[bits], [], []
    for part in x.float().split(group, 1):
        largest = part.abs().amax(1)
        finite = largest.isfinite()  # of NaN the maximum is NaN
        if bits == 8:
            is_zero = ~finite | (largest < 2.0**LEAST_EXPONENT)
            # not `most / …`, which torch rounds twice
            inverse = torch.full_like(largest, most) / torch.where(is_zero, torch.inf, largest)
            values.append((torch.where(finite[:, None], part, 0) * inverse[:, None]).round().long())
            factors.append(torch.where(finite, torch.where(is_zero, 0, largest / most), torch.nan))
            continue
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


def _by_fp8(input: Tensor, values: Tensor, scales: Tensor, width: int) -> Tensor:
    """Y [M, N] of rows [M, K], values [N, K] of e4m3 and scales [N, 1 or groups]."""
    groups = -(-values.shape[1] // width)
    more = (0, groups * width - values.shape[1])
    x, v = (torch.nn.functional.pad(item.float(), more) for item in (input, values / 256))
    x, v = x.view(len(x), 1, groups, width), v.view(1, len(v), groups, width)
    total = torch.zeros(len(input), len(values), groups)
    for column in range(width):
        total = _fma(x[..., column], v[..., column], total)
    y = torch.zeros(total.shape[:2])
    for group in range(groups):
        y = y + total[..., group] * (scales[:, min(group, scales.shape[1] - 1)] * 256)
    return y


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Round a · b + c once, to float32; a · b has to be exact in float64.

    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms
    using rounding to odd, 2008.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    # what is lost must not decide a tie: the last bit of an inexact sum is odd
    image = total.view(torch.int64)
    is_even = (image & 1 == 0) & (error != 0) & error.isfinite()
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(is_even, image + away, image).view(torch.float64).float()
