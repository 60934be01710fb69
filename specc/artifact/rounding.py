"""How a weight is rounded to what a layout holds, without data: scales, zero points, levels.

Weights of 4 bits are searched: of each group, the scale and the zero point that leave the least
squared error. Nothing depends on the number of threads, or on how many rows are rounded together:
the sums that choose are of integers, which float32 and float64 add exactly in any order, and of
equal pairs the first is taken.

Source: searches by squared error as of ggml's `make_qx_quants` and `make_qkx2_quants`; round to
nearest as of ggml's Q8_0; OCP Microscaling Formats (MX) 1.0, §6.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specc.artifact.block_rounding import round_to_blocks
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import E2M1, FP4_MOST, FP8_MOST, QuantizedLayout, pack

# values whose search is under way at one time: they stay in a core's cache
_VALUES_AT_ONCE = 1 << 17
# of the largest |w| of a group, in the sums that choose: 128 products with differences of levels up
# to 15 stay below 2^24, up to where float32 has all integers
_UNITS = 1 << 13
# the same in sums of float64, which make the scale
_FINE_UNITS = 1 << 30
# parts of the smallest and of the largest weight that the ends of a range are tried at
_PARTS = (1.0, 0.95, 0.9, 0.85, 0.8)
# the highest level of 4 bits
_MOST = 15
# levels at which the largest |w| is tried, without zero points: the range is -8 … 7
_TOPS = tuple(sign * quarters / 4 for quarters in range(28, 40) for sign in (-1, 1))
# groups [M, columns] float32, and whether they have zero points: scales and zero points [M]
Search = Callable[[Tensor, bool], tuple[Tensor, Tensor]]
_native_search: Search | None = None


def use_search(search: Search | None) -> None:
    """Let something faster search, with the bits of `search_scales`; None ends that."""
    global _native_search
    _native_search = search


def quantize(weight: Tensor, layout: QuantizedLayout) -> Tensor:
    """Round a weight [N, K], see `round_weight`, and put it into blocks."""
    found = round_weight(weight, layout)
    return pack(found.levels, found.scales, found.zeros, layout)


def round_weight(weight: Tensor, layout: QuantizedLayout) -> Integers:
    """Round a weight [N, K] to what the layout holds.

    int4 has the scales and zero points of `search_scales`. int8 has scale max |w| / 127, or, with
    zero points, the smallest and the largest weight, or 0, at the ends of the range. fp8 has 448,
    the largest of e4m3, at the largest |w|. mxfp4 has the exponent of the largest |w| less 2, that
    of e2m1's largest; what is beyond 6 is 6. nvfp4 has 6 at the largest |w| of a group, and a
    factor that makes the largest scale of an output 448.
    ggml's blocks are of `round_to_blocks`.

    Raises:
        ValueError: a format of blocks that nothing is rounded to.
    """
    if layout.blocks is not None:
        return round_to_blocks(weight, layout.format)
    weight = weight.float()
    outputs, columns = weight.shape
    width, groups = layout.group or columns, layout.num_groups(columns)
    padded = torch.nn.functional.pad(weight, (0, groups * width - columns))
    values = padded.reshape(outputs * groups, width)
    zeros: Tensor | None = None
    if layout.has_factors:
        factors = weight.abs().amax(1, keepdim=True) / (FP4_MOST * FP8_MOST)
        values /= torch.where(factors == 0, 1, factors).repeat_interleave(groups, 0)
        levels, scales = _round_floats(values, layout)
        scales = torch.cat([factors, scales.view(outputs, groups)], 1)
    elif layout.is_float:
        levels, scales = _round_floats(values, layout)
    else:
        scales, zeros = scales_of(values, layout)
        levels = nearest_levels(values, scales, zeros, layout)
        zeros = None if zeros is None else zeros.view(outputs, groups)
    levels = levels.view(outputs, -1)[:, :columns]
    return Integers(levels, scales.view(outputs, -1), zeros)


def scales_of(values: Tensor, layout: QuantizedLayout) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of groups of integers.

    Args:
        values: [M, columns] float32, a group a row.
        layout: int8 or int4.
    Returns:
        [M] float32, and [M] float32 where the layout has zero points: integers 0 … 2^bits - 1.
        Groups of zeros have scale 0 and zero point 0.
    """
    if layout.bits == 8:
        return _scales_at_ends(values, layout)
    if _native_search is not None:
        pairs = _native_search(values, layout.has_zeros)
        return pairs[0], pairs[1] if layout.has_zeros else None
    step = max(1, _VALUES_AT_ONCE // max(1, values.shape[1]))
    found = [search_scales(part, layout) for part in values.split(step)]
    scales = torch.cat([scale for scale, _ in found])
    zeros = torch.cat([zero for _, zero in found]) if layout.has_zeros else None
    return scales, zeros


def nearest_levels(
    values: Tensor, scales: Tensor, zeros: Tensor | None, layout: QuantizedLayout
) -> Tensor:
    """The levels [M, columns] uint8 nearest to values [M, columns], ties to even steps.

    Args:
        values: float32.
        scales: [M]; of groups of zeros 0.
        zeros: [M], or None where the layout has none.
        layout: int8 or int4.
    """
    steps = (values / torch.where(scales == 0, 1, scales).unsqueeze(-1)).round_()
    steps += layout.middle if zeros is None else zeros.unsqueeze(-1)
    return steps.clamp_(0, (1 << layout.bits) - 1).to(torch.uint8)


def search_scales(values: Tensor, layout: QuantizedLayout) -> tuple[Tensor, Tensor]:
    """The pair of scale and zero point of each group that leaves the least squared error.

    Pairs are tried for ranges somewhat smaller than that of the weights: what lies outside of a
    range costs more, and all others less. A pair's scale becomes what is best for its levels,
    Σ w·q / Σ q² of q = u - z, which leaves Σ w² - (Σ w·q)² / Σ q².

    Args:
        values: [M, columns] float32.
        layout: int4.
    Returns:
        [M] float32 both; zero points are the middle where the layout has none.
    """
    largest = values.abs().amax(-1)
    # in units of the largest of its group; a group is a column here, so that sums go over rows
    shares = (values / torch.where(largest == 0, 1, largest).unsqueeze(-1)).t().contiguous()
    whole = (shares * _UNITS).round_()
    best = torch.full_like(largest, -1)
    scales, zeros = torch.ones_like(largest), torch.zeros_like(largest)
    for scale, zero in _pairs(shares, layout):
        gain = _gain(whole, _steps(shares, scale, zero))
        is_better = gain > best
        best = torch.where(is_better, gain, best)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    fine = (shares.double() * _FINE_UNITS).round_()
    scales = _fitting(fine, _steps(shares, scales, zeros))
    # a scale that fits its levels may lie nearer to others
    again = _steps(shares, scales, zeros)
    scales = torch.where(_gain(whole, again) > best, _fitting(fine, again), scales)
    scales = scales * largest
    return scales, zeros.masked_fill_(scales == 0, 0) if layout.has_zeros else zeros


def _pairs(shares: Tensor, layout: QuantizedLayout) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zero points [M] to try for groups [columns, M]."""
    if layout.has_zeros:
        low, high = shares.amin(0).clamp(max=0), shares.amax(0).clamp(min=0)
        for low_part, high_part in itertools.product(_PARTS, _PARTS):
            least = low * low_part
            scale = (high * high_part - least) / _MOST
            scale = torch.where(scale == 0, 1, scale)
            yield scale, (-least / scale).round_().clamp_(0, _MOST)
        return
    places = shares.abs().argmax(0, keepdim=True)
    end, middle = shares.gather(0, places).squeeze(0), torch.full(shares.shape[1:], layout.middle)
    for top in _TOPS:
        scale = end / top
        yield torch.where(scale == 0, 1, scale), middle


def _steps(shares: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Differences u - z of the levels nearest to groups [columns, M]."""
    steps = shares.mul(1 / torch.where(scales == 0, 1, scales)).round_()
    return torch.clamp_(steps, min=-zeros, max=_MOST - zeros)


def _gain(whole: Tensor, steps: Tensor) -> Tensor:
    """(Σ w·q)² / Σ q² of each group, 0 where all levels are at the zero point."""
    along = (whole * steps).sum(0)
    return along * along / (steps * steps).sum(0).clamp_(min=1)


def _fitting(fine: Tensor, steps: Tensor) -> Tensor:
    """The scales that leave the least squared error with these levels."""
    along = (fine * steps).sum(0) / _FINE_UNITS
    return (along / (steps * steps).sum(0).clamp_(min=1)).float()


def _scales_at_ends(values: Tensor, layout: QuantizedLayout) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points that put the ends of each group at those of the range."""
    if not layout.has_zeros:
        return values.abs().amax(-1) / ((1 << (layout.bits - 1)) - 1), None
    top = (1 << layout.bits) - 1
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    scales = (high - low) / top
    return scales, torch.where(scales > 0, low / -scales, 0).round().clamp(0, top)


def _round_floats(values: Tensor, layout: QuantizedLayout) -> tuple[Tensor, Tensor]:
    """Levels [M, columns] uint8 and scales [M] of values [M, columns]."""
    largest = values.abs().amax(-1)
    if layout.bits == 8:
        scales = largest / FP8_MOST
        scaled = values / torch.where(scales == 0, 1, scales).unsqueeze(-1)
        scaled = scaled.clamp(-FP8_MOST, FP8_MOST)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales
    if layout.has_factors:
        scales = (largest / FP4_MOST).clamp(max=FP8_MOST).to(torch.float8_e4m3fn).float()
    else:
        _, exponent = torch.frexp(largest)  # largest = fraction · 2^exponent, fraction in [0.5, 1)
        byte = (exponent - 1 - 2 + 127).clamp(1, 254)
        scales = torch.where(largest == 0, 0, (byte << 23).view(torch.float32))
    scaled = (values / torch.where(scales == 0, 1, scales).unsqueeze(-1)).clamp(-FP4_MOST, FP4_MOST)
    # halfway between two codes is the even one
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    up = torch.bucketize(scaled.abs(), middles, right=False)
    tie = up < 7
    tie = tie & (scaled.abs() == middles[up.clamp(max=6)]) & (up % 2 == 1)
    codes = up + tie
    return (codes + 8 * (scaled < 0)).to(torch.uint8), scales
