"""Weights rounded to ggml's blocks, beside llama.cpp's own rounding and all scales of a grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.artifact.block_formats import FORMATS
from specc.artifact.block_rounding import ROUNDED, round_to_blocks
from specc.artifact.quantized_layout import QuantizedLayout, dequantize, pack


def weights(columns: int = 512) -> Tensor:
    """Normal, with outliers, of one sign, zeros, one value, and tiny ones."""
    torch.manual_seed(0)
    weight = torch.randn(40, columns) * 0.05
    weight[1::4] *= torch.rand(columns).pow(-0.4)
    weight[2] = weight[2].abs() + 0.1
    weight[3], weight[6], weight[7] = 0, -0.3, 0
    weight[7, 300] = 1e-12
    return weight


def numbers(weight: Tensor, name: str) -> Tensor:
    found = round_to_blocks(weight, name)
    return FORMATS[name].numbers(found.levels, found.scales)


def loss(weight: Tensor, found: Tensor) -> float:
    return float((weight - found).double().square().sum() / weight.double().square().sum())


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0"])
def test_it_loses_no_more_than_the_simple_rule(name) -> None:
    """Of gguf's package, written out: the largest |w| at one end of the range."""
    weight, own = weights(), FORMATS[name]
    values = weight.view(40, -1, 32)
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scale = values.abs().amax(-1, keepdim=True) / 127 if name == "q8_0" else largest / -own.middle
    scale = scale.half().float()
    steps = (values / torch.where(scale == 0, 1, scale)).round().clamp(-own.middle, own.middle - 1)
    simple = (steps * scale).view(40, -1)
    found = numbers(weight, name)
    assert loss(weight, found) <= loss(weight, simple) * (1.001 if name == "q8_0" else 0.95)


@pytest.mark.parametrize(
    ("name", "most"), [("q4_k", 0.0052), ("q5_k", 0.0013), ("q6_k", 0.00031), ("q8_0", 3e-5)]
)
def test_what_normal_weights_lose(name, most) -> None:
    """llama.cpp's own q4_k and q6_k lose .0051 and .00031 of such weights."""
    torch.manual_seed(1)
    weight = torch.randn(64, 512) * 0.02
    assert loss(weight, numbers(weight, name)) < most


@pytest.mark.parametrize("name", ROUNDED)
def test_levels_are_the_nearest_of_their_headers(name) -> None:
    weight = weights()
    found, own = round_to_blocks(weight, name), FORMATS[name]
    value = own.numbers(found.levels, found.scales)
    for more in (1, -1):
        moved = (found.levels.int() + more).clamp(0, (1 << own.bits) - 1).to(torch.uint8)
        other = own.numbers(moved, found.scales)
        slack = 1e-6 * weight.abs().amax()
        assert ((value - weight).abs() <= (other - weight).abs() + slack).all()
    assert (value[3] == 0).all()
    # one value: a scale of 6 or 8 bits, and one in fp16, miss it by little
    assert (value[6] + 0.3).abs().max() < 0.3 * 0.03
    assert bool(value.isfinite().all())


@pytest.mark.parametrize("name", ROUNDED)
def test_blocks_hold_it_and_rows_depend_on_nothing_else(name) -> None:
    weight = weights(768)
    found, layout = round_to_blocks(weight, name), QuantizedLayout.named(name)
    stored = pack(found.levels, found.scales, None, layout)
    assert torch.equal(dequantize(stored, weight.shape, layout), numbers(weight, name))
    for row in (0, 17, 39):
        alone = round_to_blocks(weight[row : row + 1], name)
        assert torch.equal(alone.levels[0], found.levels[row])
        assert torch.equal(alone.scales[0], found.scales[row])


@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_groups_far_from_zero_keep_their_best_scale(name) -> None:
    """The best line through them has a minimum that these formats lack: it is 0, and the scale
    is the best without one.
    """
    torch.manual_seed(2)
    weight = 1 + 0.08 * torch.rand(8, 256)
    groups, most = weight.view(-1, 32).double(), (1 << FORMATS[name].bits) - 1
    best = torch.full((len(groups),), torch.inf, dtype=torch.float64)
    for scale in torch.linspace(0.8, 1.4, 600).double() / most:
        nearest = (groups / scale).round().clamp(0, most) * scale
        best = best.minimum((groups - nearest).square().sum(1))
    own = (weight - numbers(weight, name)).double().view(-1, 32).square().sum(1)
    # scales have 6 bits
    assert own.sum() < 1.3 * best.sum()
