"""The oracle of quantized projections against float64: what writing rows as integers costs."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from specc.artifact.block_formats import FORMATS
from specc.artifact.quantized_layout import QuantizedLayout, dequantize, pack, unpack
from specc.artifact.rounding import quantize
from specc.kernels.reference.quantized import linear_q_reference, row_integers

LAYOUTS = [
    QuantizedLayout.named(name)
    for name in (
        "int8",
        "int4-g32",
        "int4-g128-zeros",
        "int8-g64-zeros",
        "int8-zeros",
        "mxfp4",
        "nvfp4",
    )
]
FP8 = [QuantizedLayout.named(name) for name in ("fp8", "fp8-g32", "fp8-g128")]
DTYPES = (torch.float32, torch.bfloat16)


def project(x, stored, bias, n, layout, row_bits=0):
    more = (layout.bits, layout.group, layout.has_zeros, layout.is_float, row_bits, layout.format)
    return linear_q_reference(x, stored, bias, n, *more)


@pytest.mark.parametrize("layout", [*LAYOUTS, *FP8], ids=lambda item: item.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "row_bits"), [(1, 0), (31, 0), (160, 0), (2100, 0), (160, 8)])
def test_products_are_those_of_the_weight_that_blocks_stand_for(k, row_bits, dtype, layout) -> None:
    torch.manual_seed(k)
    x, bias = torch.randn(5, k), torch.randn(37).to(dtype)
    x[:, ::50] *= 50  # as the outliers of trained models
    x = x.to(dtype)
    stored = quantize(torch.randn(37, k), layout)
    weight = dequantize(stored, (37, k), layout).double()
    want = x.double() @ weight.T + bias.double()
    found = project(x, stored, bias, 37, layout, row_bits).double()
    # each integer of a row is at most half a step of its group off; float sums on top
    group = max(layout.group or 128, 32)
    largest = torch.cat([p.abs().amax(1, True).expand_as(p) for p in x.double().split(group, 1)], 1)
    step = 1 / 254 if row_bits else 2.0**-15 if dtype == torch.bfloat16 else 2.0**-23
    bound = step * largest @ weight.abs().T + 2.0**-18 * (x.double().abs() @ weight.abs().T)
    if layout in FP8:
        bound = 2.0**-18 * (x.double().abs() @ weight.abs().T)
    bound = bound + (2.0**-8 * want.abs() if dtype == torch.bfloat16 else 1e-6)
    assert ((found - want).abs() <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "row_bits"), [(DTYPES[0], 0), (DTYPES[1], 0), (DTYPES[0], 8)])
def test_products_are_those_of_the_weight_of_ggml(name, dtype, row_bits) -> None:
    """Minima and sums of rows, groups of 16 and of 32, against the float64 product."""
    torch.manual_seed(len(name))
    layout = QuantizedLayout.named(name)
    own, k, n = FORMATS[name], 768, 37
    x = torch.randn(5, k)
    x[:, ::50] *= 50
    x = x.to(dtype)
    levels = torch.randint(0, 1 << own.bits, (n, k), dtype=torch.uint8)
    headers = torch.randint(0, 256, (n, k // own.columns, own.header_bytes)).to(torch.uint8)
    halves = torch.randn(n, k // own.columns, 2).half().view(torch.uint8)
    headers[..., : 4 if own.has_minimum else 2] = halves[..., : 4 if own.has_minimum else 2]
    stored = pack(levels, headers, None, layout)
    weight = dequantize(stored, (n, k), layout).double()
    want = x.double() @ weight.T
    found = project(x, stored, None, n, layout, row_bits).double()
    largest = torch.cat([p.abs().amax(1, True).expand_as(p) for p in x.double().split(32, 1)], 1)
    step = 1 / 254 if row_bits else 2.0**-15 if dtype == torch.bfloat16 else 2.0**-23
    # of a weight the two parts are rounded, which may be larger than it is
    scales, minima = own.factors(headers)
    parts = own.steps(levels).abs() * scales.abs().repeat_interleave(own.group, 1)
    if minima is not None:
        parts += minima.abs().repeat_interleave(own.group, 1)
    bound = step * largest @ weight.abs().T + 2.0**-18 * (x.double().abs() @ parts.double().T)
    bound = bound + (2.0**-8 * want.abs() if dtype == torch.bfloat16 else 1e-6)
    assert ((found - want).abs() <= bound).all()


def test_rows_are_the_nearest_integers() -> None:
    x = torch.tensor([[1.0, -0.5, 3.0, 2.0**-30, 5.0], [32639, 2.5, 3.5, -1, 0]])
    (wide, rest), (factor, last) = row_integers(x, 4, 24)
    assert factor.tolist() == [2.0**-21, 2.0**-8]
    assert wide.tolist()[0] == [2**21, -(2**20), 3 * 2**21, 0]
    assert (wide[1] * factor[1]).tolist() == [32639, 2.5, 3.5, -1]
    assert (rest[0, 0] * last[0], rest[1, 0]) == (5.0, 0)
    ((narrow,), (factor,)) = row_integers(x[1:].bfloat16(), 5, 16)
    # bfloat16 makes 32640 of 32639, which is beyond two bytes at 2^0; ties are to even
    assert factor.tolist() == [2.0]
    assert narrow.tolist() == [[16320, 1, 2, 0, 0]]


@pytest.mark.parametrize(("dtype", "bits"), [(DTYPES[0], 24), (DTYPES[0], 16), (DTYPES[1], 16)])
def test_integers_fit_their_bytes_and_use_them(dtype, bits) -> None:
    most = 32639 if bits == 16 else 8355711
    x = torch.exp2(torch.empty(2000, 1).uniform_(-30, 126)) * torch.empty(2000, 1).uniform_(1, 2)
    ((values,), (factors,)) = row_integers(x.to(dtype), 32, bits)
    assert values.max() <= most
    assert values.min() > most // 2 - 1
    error = (values[:, 0].double() * factors.double() - x.to(dtype).double()[:, 0]).abs()
    assert (error <= factors.double() / 2).all()
    edge = torch.tensor([[most], [most + 1.0]], dtype=torch.float32)
    ((values,), _) = row_integers(edge.to(dtype), 32, bits)
    assert values.max() <= most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_rows_are_the_nearest_of_the_largest(dtype) -> None:
    torch.manual_seed(3)
    x = (torch.randn(500, 32) * torch.exp2(torch.empty(500, 1).uniform_(-60, 120))).to(dtype)
    ((values,), (factors,)) = row_integers(x, 32, 8)
    assert (values.abs().amax(1) == 127).all()
    error = (values.double() * factors[:, None].double() - x.double()).abs()
    assert (error <= x.double().abs().amax(1, True) / 254 * (1 + 2.0**-14)).all()
    # 254 / 127 is 2: halves go to the even neighbor
    ((values,), (factors,)) = row_integers(torch.tensor([[254.0, 1, 3, -5, 7]]), 5, 8)
    assert (values.tolist(), factors.tolist()) == ([[127, 0, 2, -2, 4]], [2.0])
    least = torch.tensor([[2.0**-64], [2.0**-65], [0.0], [torch.inf]])
    ((values,), (factors,)) = row_integers(least, 32, 8)
    assert values[:, 0].tolist() == [127, 0, 0, 0]
    assert factors[:3].tolist() == pytest.approx([2.0**-64 / 127, 0, 0], rel=1e-6)
    assert factors[3].isnan()


def test_bfloat16_rows_near_their_largest_have_no_error() -> None:
    x = (torch.randn(50, 64).sign() * torch.empty(50, 64).uniform_(2.0**-5, 2)).bfloat16()
    ((values,), (factors,)) = row_integers(x, 64, 16)
    assert torch.equal(values * factors[:, None].double(), x.double())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_takes_its_row(poison) -> None:
    layout = QuantizedLayout(4, 32)
    x = torch.rand(3, 70)
    x[1, 69] = poison
    y = project(x, quantize(torch.rand(9, 70), layout), None, 9, layout)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_tiny_and_zero_rows() -> None:
    layout = QuantizedLayout(8)
    stored = quantize(torch.ones(4, 40), layout)
    x = torch.stack([torch.zeros(40), torch.full((40,), 2.0**-64), torch.full((40,), 1e-40)])
    y = project(x, stored, None, 4, layout)
    assert (y[0] == 0).all()
    assert y[1, 0].item() == pytest.approx(40 * 2.0**-64, rel=1e-6)
    assert (y[2] == 0).all()


def test_a_step_of_fp8_is_rounded_once() -> None:
    """Against fractions: each step is the float32 nearest to the exact sum, ties to even."""
    torch.manual_seed(1)
    layout = QuantizedLayout.named("fp8")
    x = torch.randn(11, 70) * torch.exp2(torch.randint(-20, 4, (11, 70)).float())
    x[0] = 1 + 2.0**-12 * torch.randn(70)
    x[1, ::2] = x[1, 1::2] * -(2.0**8)
    # products of more than 24 bits, halfway between two numbers but for a sum so small that double
    # loses it
    x[3:] = 0
    x[3:, 0] = 2.0**-70
    x[3:, 1] = 1 + 2.0**-23 * torch.arange(1, 9)
    stored = quantize(torch.randn(5, 70), layout)
    levels, scales, _ = unpack(stored, (5, 70), layout)
    found, values = project(x, stored, None, 5, layout), layout.values(levels) / 256
    for m in range(11):
        for n in range(5):
            total = 0.0
            for a, b in zip(x[m].tolist(), values[n].tolist(), strict=True):
                total = nearest_float32(Fraction(a) * Fraction(b) + Fraction(total))
            scale = torch.tensor(total) * (scales[n, 0] * 256)
            assert found[m, n] == scale


def nearest_float32(x: Fraction) -> float:
    if x == 0:
        return 0.0
    exponent = math.frexp(float(abs(x)))[1]
    while abs(x) >= Fraction(2) ** exponent:
        exponent += 1
    unit = Fraction(2) ** (exponent - 24)
    return float(round(x / unit) * unit)  # round() of a fraction: ties to even
