"""What rounding costs: nearest levels, and searched scales beside all that there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize, round_weight, search_scales
from specc.kernels import native

GROUPS = (32, 64, 128)
EIGHT = [
    *(QuantizedLayout(8, group, zeros) for group in (0, *GROUPS) for zeros in (False, True)),
]
FOUR = [QuantizedLayout(4, group, zeros) for group in GROUPS for zeros in (False, True)]
FLOATS = [
    *(QuantizedLayout(8, group, False, True) for group in (0, *GROUPS)),
    QuantizedLayout(4, 32, False, True),
]
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def weights(outputs: int, columns: int) -> Tensor:
    """Normal, with outliers, skewed, all of one sign, and rows of zeros and of one value."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, columns)
    weight[1::5] *= torch.rand(columns).pow(-0.4)
    weight[2::5] = weight[2::5].exp() - 1
    weight[3] = weight[3].abs() + 0.5
    weight[4], weight[5], weight[6] = 0, -0.3, 0
    weight[6, 7] = 1e-30
    return weight


def errors(weight: Tensor, found: Tensor, group: int) -> Tensor:
    """Squared errors of groups [N, G], in float64."""
    squares = (weight.double() - found.double()).square()
    padded = torch.nn.functional.pad(squares, (0, -weight.shape[1] % group))
    return padded.unflatten(1, (-1, group)).sum(-1)


def earlier(weight: Tensor, layout: QuantizedLayout) -> Tensor:
    """Ends of each group at the ends of the range: Q4_0 of llama.cpp, and minimum and maximum."""
    columns = weight.shape[1]
    padded = torch.nn.functional.pad(weight, (0, -columns % layout.group))
    values = padded.double().unflatten(1, (-1, layout.group))
    if layout.has_zeros:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        scale, zero = (high - low) / 15, 0.0
        zero = torch.where(scale > 0, -low / scale, 0).round()
    else:
        place = values.abs().argmax(-1, keepdim=True)
        scale, zero = values.gather(-1, place)[..., 0] / -8, torch.tensor(8.0)
    scale, zero = torch.where(scale == 0, 1, scale)[..., None], zero.expand_as(scale)[..., None]
    levels = ((values / scale).round() + zero).clamp(0, 15)
    return ((levels - zero) * scale).flatten(1)[:, :columns]


@pytest.mark.parametrize("layout", FOUR, ids=lambda item: item.name)
def test_no_group_is_worse_than_by_its_ends(layout) -> None:
    weight = weights(40, 200)
    found = dequantize(quantize(weight, layout), weight.shape, layout)
    own, before = (errors(weight, item, layout.group) for item in (found, earlier(weight, layout)))
    # sums that choose have 13 bits of a weight
    assert (own <= before * 1.003 + 1e-12).all()
    assert own[10::5].sum() < 0.94 * before[10::5].sum()
    assert (found[4] == 0).all()
    # a group of one value has it
    assert torch.allclose(found[5], weight[5], rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", FOUR, ids=lambda item: item.name)
def test_the_library_finds_the_same_bits(layout, threads) -> None:
    values = weights(400, layout.group)
    # the largest |w| twice, with both signs; few levels, as of a rounded weight; tiny and huge
    values[7, 0] = 2 * values[7].abs().max()
    values[7, 9] = -values[7, 0]
    values[8:40] = torch.randint(-3, 4, (32, layout.group)).float()
    values[40:50] *= 1e-38
    values[50:60] *= 1e30
    values[60:200] = values[60:200].bfloat16().float()
    values[200, 1:] = 0
    native.load()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scales, zeros = native.int4_scales(values, layout.has_zeros)
    finally:
        torch.set_num_threads(before)
    expected_scales, expected_zeros = search_scales(values, layout)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(zeros, expected_zeros)


def test_the_library_refuses_groups_that_it_has_no_room_for() -> None:
    native.load()
    with pytest.raises(RuntimeError, match="groups of 1 to 128 values, not 129"):
        native.int4_scales(torch.zeros(2, 129), has_zeros=False)


@pytest.mark.parametrize("layout", FOUR[:2], ids=lambda item: item.name)
def test_searched_scales_are_nearly_the_best(layout) -> None:
    """Beside all scales of a fine grid and all zero points."""
    weight = weights(20, 32)
    found = dequantize(quantize(weight, layout), weight.shape, layout)
    own, values = errors(weight, found, 32)[:, 0], weight.double()
    largest = values.abs().amax(1, keepdim=True)
    best = torch.full((20,), torch.inf, dtype=torch.float64)
    for zero in range(16) if layout.has_zeros else (8,):
        for part in torch.linspace(0.03, 0.2, 400).tolist():
            for sign in (1, -1):
                scale = sign * part * torch.where(largest == 0, 1, largest)
                levels = ((values / scale).round() + zero).clamp(0, 15)
                best = best.minimum((values - (levels - zero) * scale).square().sum(1))
    assert (own <= 1.25 * best + 1e-12).all()
    assert own.sum() <= 1.05 * best.sum()


@pytest.mark.parametrize("layout", FOUR[1:3], ids=lambda item: item.name)
def test_levels_depend_on_nothing_but_their_group(layout) -> None:
    """Rows alone, on one thread, and many at once: the same bits."""
    weight = torch.randn(5000, 96)
    whole, threads = round_weight(weight, layout), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = [round_weight(weight[i : i + 1], layout) for i in (0, 17, 1400, 4999)]
    finally:
        torch.set_num_threads(threads)
    for row, part in zip((0, 17, 1400, 4999), parts, strict=True):
        assert torch.equal(part.levels[0], whole.levels[row])
        assert torch.equal(part.scales[0], whole.scales[row])
        assert part.zeros is None or torch.equal(part.zeros[0], whole.zeros[row])
    # sums in another order: columns of a group turned around
    turned = round_weight(weight.unflatten(1, (-1, 32)).flip(2).flatten(1), layout)
    if layout.group == 32:
        assert torch.equal(turned.scales, whole.scales)


@pytest.mark.parametrize("layout", EIGHT, ids=lambda item: item.name)
def test_rounding_is_to_the_nearest_level(layout) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 200)
    weight[3] = 0
    found = dequantize(quantize(weight, layout), weight.shape, layout)
    width = layout.group or 200
    for first in range(0, 200, width):
        part, near = (item[:, first : first + width] for item in (weight, found))
        reach = part.abs().amax(1, keepdim=True)
        if layout.has_zeros:
            spread = part.amax(1, keepdim=True).clamp(min=0) - part.amin(1, keepdim=True).clamp(
                max=0
            )
            step = spread / 255
        else:
            step = reach / 127
        error = (near - part).abs()
        assert (error <= step * (0.5 + 1e-5)).all()
        assert error.mean() <= 0.27 * step.mean()
    assert (found[3] == 0).all()


@pytest.mark.parametrize("layout", FLOATS, ids=lambda item: item.name)
def test_floats_are_rounded_to_the_nearest(layout) -> None:
    """Against all values of the format, one by one; ties to the even code."""
    torch.manual_seed(0)
    weight = torch.randn(40, 200)
    weight[3] = 0
    weight[5, :6] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5])  # ties of e2m1 where s is 1
    weight[5, 6:] = 0.1
    found = dequantize(quantize(weight, layout), weight.shape, layout)
    width = layout.group or 200
    size = torch.tensor(E2M1) if layout.bits == 4 else torch.arange(127, dtype=torch.uint8)
    size = size if layout.bits == 4 else size.view(torch.float8_e4m3fn).float()
    for first in range(0, 200, width):
        part, near = (item[:, first : first + width] for item in (weight, found))
        largest = part.abs().amax(1, keepdim=True)
        scale = largest / 448
        if layout.bits == 4:
            scale = torch.exp2(torch.floor(torch.log2(largest)) - 2)
        reachable = size * scale  # [40, values]
        best = (part.abs()[..., None] - reachable[:, None]).abs().amin(-1)
        assert ((near - part).abs() <= best + 1e-6 * largest).all()
    assert (found[3] == 0).all()
    if layout.bits == 4:
        assert found[5, :6].tolist() == [6, 0, 1, 1, 2, 2]
