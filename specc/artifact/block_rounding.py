"""How a weight is rounded to ggml's blocks: q4_k, q5_k, q6_k, q4_0, q5_0 and q8_0.

Of each group the scale, and where the format has one the minimum, are searched by squared error.
Then the scales of a block are rounded themselves, as its header has them, and levels are the
nearest to what that stands for. Sums that choose are exact, as in `rounding.py`.

Source: searches by squared error as of ggml's `make_qx_quants` and `make_qkx2_quants`, without
their weights; https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specc.artifact.block_formats import FORMATS, BlockFormat
from specc.artifact.integers import Integers

# of the largest |w| of a group, in sums that choose: see `rounding.py`
_UNITS = 1 << 13
# values whose search is under way at one time
_VALUES_AT_ONCE = 1 << 17
# parts of a range that it is tried with, as llama.cpp does: (15 + n / 10) / 15 of it and the like
_TRIES = 20


def round_to_blocks(weight: Tensor, name: str) -> Integers:
    """Round a weight [N, K], K a multiple of the block's columns, to one of ggml's formats.

    Args:
        weight: finite.
        name: of a format in `ROUNDED`.
    Raises:
        ValueError: another format.
    Returns:
        levels [N, K] and headers [N, blocks, bytes], as `Integers` has them of ggml's blocks.
    """
    if name not in ROUNDED:
        raise ValueError(f"nothing is rounded to {name}")
    own, (outputs, columns) = FORMATS[name], weight.shape
    headers = torch.empty(outputs, columns // own.columns, own.header_bytes, dtype=torch.uint8)
    levels = torch.empty(outputs, columns, dtype=torch.uint8)
    step = max(1, _VALUES_AT_ONCE // max(1, columns))
    for first in range(0, outputs, step):
        part = weight[first : first + step].float()
        # [blocks, groups of a block, columns of a group]
        values = part.reshape(-1, own.columns // own.group, own.group)
        header = ROUNDED[name](values, own)
        headers[first : first + step] = header.view(len(part), -1, own.header_bytes)
        levels[first : first + step] = _nearest(values, header, own).view(len(part), columns)
    return Integers(levels, headers)


def _nearest(values: Tensor, headers: Tensor, own: BlockFormat) -> Tensor:
    """Levels of values [blocks, groups, columns] that are nearest, by their headers."""
    scales, minima = own.factors(headers.unsqueeze(1))
    scales = scales.unsqueeze(-1)
    if minima is not None:
        values = values + minima.unsqueeze(-1)
    steps = (values / torch.where(scales == 0, 1, scales)).round_() + own.middle
    return steps.clamp_(0, (1 << own.bits) - 1).to(torch.uint8)


def _with_minima(values: Tensor, own: BlockFormat) -> Tensor:
    """Headers of q4_k and q5_k: scales and minima of 6 bits, and factors of both in fp16."""
    scales, minima = _search_pairs(values, (1 << own.bits) - 1)
    factor, least = (item.amax(1, keepdim=True).div(63).half() for item in (scales, minima))
    scales, minima = (
        (item / torch.where(unit == 0, 1, unit).float()).round_().clamp_(0, 63).to(torch.uint8)
        for item, unit in ((scales, factor), (minima, least))
    )
    parts = (
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
    )
    return torch.cat([_bytes(factor), _bytes(least), *parts], 1)


def _with_signs(values: Tensor, own: BlockFormat) -> Tensor:
    """Headers of q6_k: scales of 8 bits with a sign, and their factor in fp16."""
    scales = _search_scales(values, own.middle)
    factor = scales.abs().amax(1, keepdim=True).div(127).half()
    unit = torch.where(factor == 0, 1, factor).float()
    signed = (scales / unit).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([_bytes(factor), signed.view(torch.uint8)], 1)


def _searched(values: Tensor, own: BlockFormat) -> Tensor:
    """Headers of q4_0 and q5_0: a scale in fp16."""
    return _bytes(_search_scales(values, own.middle).half())


def _by_ends(values: Tensor, own: BlockFormat) -> Tensor:
    """Headers of q8_0: the scale in fp16 that puts the largest |w| at 127."""
    return _bytes(values.abs().amax(-1).div(127).half())


def _search_scales(values: Tensor, middle: int) -> Tensor:
    """Scales [blocks, groups] of levels -middle … middle - 1, see `rounding.search_scales`."""
    shares, largest = _shares(values)
    whole = (shares * _UNITS).round_()
    places = shares.abs().argmax(0, keepdim=True)
    end = shares.gather(0, places).squeeze(0)
    end = torch.where(end == 0, 1, end)
    best, scales = torch.full_like(end, -1), torch.zeros_like(end)
    for number in range(_TRIES + 1):
        for sign in (-1, 1):
            top = sign * (middle - 1 + number / 10)
            steps = shares.mul(top / end).round_().clamp_(-middle, middle - 1)
            along, squares = (whole * steps).sum(0), (steps * steps).sum(0).clamp_(min=1)
            gain = along * along / squares
            is_better = gain > best
            best = torch.where(is_better, gain, best)
            scales = torch.where(is_better, along / squares / _UNITS, scales)
    return (scales * largest).view(values.shape[:2])


def _search_pairs(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and minima [blocks, groups], both 0 or more, of levels 0 … most.

    With levels q the best line through w is s = (n Σwq - Σw Σq) / (n Σq² - (Σq)²) and
    m = (s Σq - Σw) / n; where that m is below 0, m is 0 and s = Σwq / Σq².
    """
    shares, largest = _shares(values)
    whole, count = (shares * _UNITS).round_(), len(shares)
    low, high = shares.amin(0).clamp_(max=0), shares.amax(0)
    spread = torch.where(high > low, high - low, 1)
    total = whole.sum(0)
    best = torch.full_like(low, -1)
    scales, minima = torch.zeros_like(low), torch.zeros_like(low)
    for number in range(_TRIES + 1):
        factor = (most - 1 + number / 10) / spread
        steps = ((shares - low) * factor).round_().clamp_(0, most)
        along, sums, squares = (whole * steps).sum(0), steps.sum(0), (steps * steps).sum(0)
        slope, spread_of = count * along - total * sums, count * squares - sums * sums
        scale = slope / torch.where(spread_of == 0, 1, spread_of)
        least = (scale * sums - total) / count
        gain = slope * scale / count + total * total / count
        is_bare = least < 0
        bare = along / squares.clamp(min=1)
        scale = torch.where(is_bare, bare, scale)
        gain = torch.where(is_bare, along * bare, gain)
        least = least.masked_fill(is_bare, 0)
        is_better = (gain > best) & (scale >= 0)
        best = torch.where(is_better, gain, best)
        scales = torch.where(is_better, scale, scales)
        minima = torch.where(is_better, least, minima)
    shape = values.shape[:2]
    return (scales * largest / _UNITS).view(shape), (minima * largest / _UNITS).view(shape)


def _shares(values: Tensor) -> tuple[Tensor, Tensor]:
    """Groups as columns [columns of a group, M], in units of the largest of each, and these."""
    groups = values.reshape(-1, values.shape[-1])
    largest = groups.abs().amax(-1)
    unit = torch.where(largest == 0, 1, largest).unsqueeze(-1)
    return (groups / unit).t().contiguous(), largest


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


# format → what makes headers [blocks, bytes] of values [blocks, groups, columns]
ROUNDED: dict[str, Callable[[Tensor, BlockFormat], Tensor]] = {
    "q4_0": _searched,
    "q5_0": _searched,
    "q8_0": _by_ends,
    "q4_k": _with_minima,
    "q5_k": _with_minima,
    "q6_k": _with_signs,
}
