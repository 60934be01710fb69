"""Cases of `linear_q` and how one is checked, without pytest.

Sizes are no multiples of tiles: the last block, the last group and its last unit are short. Scales
differ from group to group and from output to output, and zero points lie all over their range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specc.artifact.quantized_layout import QuantizedLayout, dequantize, pack
from specc.artifact.rounding import quantize
from specc.kernels.cuda import few_rows, few_rows_tiles
from specc.kernels.cuda import linear_q as module
from specc.kernels.cuda.linear_q import linear_q
from specc.kernels.reference.quantized import linear_q_reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (BF16, F16, F32)
# relative to the largest result of a row. Of a tile: the oracle's integers (2^-23 and, in bfloat16,
# 2^-15 of the largest of a group), the order of sums, and the result's own type, whose neighbours
# are 2^-7 apart in bfloat16. Of a weight that is decoded: its roundings, too.
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}
DECODED_TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.2e-2}
ALL = (
    *(f"int8{group}{zeros}" for group in ("", "-g32", "-g64", "-g128") for zeros in ("", "-zeros")),
    *(f"int4{group}{zeros}" for group in ("-g32", "-g64", "-g128") for zeros in ("", "-zeros")),
    "fp8", "fp8-g32", "fp8-g64", "fp8-g128", "mxfp4", "nvfp4",
)  # fmt: skip
# (M, K, N): short groups and units, less than a group, whole steps, several blocks, all rows
SHAPES = ((1, 200, 70), (5, 33, 33), (16, 256, 40), (3, 331, 32), (2, 128, 100), (11, 100, 65))
MANY = ((17, 200, 70), (64, 160, 33), (40, 300, 64))


def tiles() -> list[tuple[str, torch.dtype, int, int]]:
    """(layout, dtype, rows of its kernel, number of the tile) of all that ships."""
    return [
        (name, dtype, rows, number)
        for dtype in DTYPES
        for name in few_rows_tiles.QUANTIZED
        for rows in (few_rows_tiles.MAX_ROWS, few_rows_tiles.MAX_QUANTIZED_ROWS)
        for number in range(len(few_rows_tiles.quantized_tiles(name, dtype, rows)))
    ]


def shapes(rows: int) -> tuple[Any, ...]:
    """Shapes that show all there is to a kernel of so many rows."""
    return SHAPES if rows <= few_rows_tiles.MAX_ROWS else MANY


def make_weight(name: str, columns: int, outputs: int, device: torch.device) -> Tensor:
    """Blocks of a weight whose rows and groups differ in size."""
    layout = QuantizedLayout.named(name)
    torch.manual_seed(columns * 31 + outputs)
    groups = layout.num_groups(columns)
    width = layout.group or columns
    weight = torch.randn(outputs, groups, width)
    weight *= torch.logspace(-1, 1, outputs)[:, None, None].roll(7, 0)
    weight *= torch.linspace(0.5, 2, groups)[None, :, None]
    if layout.has_zeros:
        weight += 2 * torch.randn(outputs, groups, 1) * weight.abs().amax(-1, keepdim=True)
    weight = weight.view(outputs, -1)[:, :columns]
    return quantize(weight, layout).to(device)


def make_operands(
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool = False,
) -> dict[str, Any]:
    rows, columns, outputs = shape
    layout = QuantizedLayout.named(name)
    weight = make_weight(name, columns, outputs, device)
    scales = torch.logspace(-1, 1, rows)[:, None]
    bias = (3 * torch.randn(outputs)).to(dtype).to(device) if has_bias else None
    return {
        "input": (torch.randn(rows, columns) * scales).to(dtype).to(device),
        "weight": weight,
        "bias": bias,
        "out_features": outputs,
        "bits": layout.bits,
        "group": layout.group,
        "has_zeros": layout.has_zeros,
        "is_float": layout.is_float,
    } | ({"row_bits": 0, "format": layout.format} if layout.format else {})


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.is_contiguous()
    largest = want.float().abs().amax(-1, keepdim=True)
    error = float(((got.float() - want.float()).abs() / largest).max())
    assert error < tolerance, error


def on_host(operands: Any) -> Any:
    """Operands, in lists or by name, for an oracle, which decodes weights there."""
    return tree_map_only(Tensor, Tensor.cpu, operands)


def oracle(operands: dict[str, Any]) -> Tensor:
    return linear_q_reference(**on_host(operands)).to(operands["input"].device)


def check_tile(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], number: int, has_bias: bool,
    device: torch.device,
) -> None:  # fmt: skip
    operands = make_operands(name, shape, dtype, device, has_bias)
    with few_rows.forced(number):
        found = few_rows.quantized_tile_for(operands["input"], shape[2], name)
        assert found == few_rows_tiles.quantized_tiles(name, dtype, shape[0])[number]
        assert_close(linear_q(**operands), oracle(operands), TOLERANCE[dtype])


def check_library(name: str, dtype: torch.dtype, shape: Any, device: torch.device) -> None:
    """More rows than a kernel takes: by the decoded weight, in one piece or in several."""
    operands = make_operands(name, shape, dtype, device, has_bias=True)
    with few_rows.forced(None):
        whole = linear_q(**operands)
    assert_close(whole, oracle(operands), DECODED_TOLERANCE[dtype])


def check_decoded(name: str, dtype: torch.dtype, columns: int, outputs: int, device: Any) -> None:
    """Bit for bit what the layout says, of all blocks and of those after the first."""
    layout = QuantizedLayout.named(name)
    weight = make_weight(name, columns, outputs, device)
    like = torch.zeros(1, columns, dtype=dtype, device=device)
    want = dequantize(weight.cpu(), (outputs, columns), layout).to(dtype).to(device)
    assert torch.equal(module.decoded(weight, like, 0, outputs, layout), want)
    assert torch.equal(module.decoded(weight, like, 1, outputs - 32, layout), want[32:])


def every_code(name: str) -> tuple[Tensor, Tensor]:
    """Blocks [32 outputs, K] with every level of a layout of floats, and what they stand for."""
    layout = QuantizedLayout.named(name)
    codes = torch.arange(1 << layout.bits).to(torch.uint8)
    if layout.bits == 8:
        codes = codes[(codes & 127) != 127]
    levels = torch.stack([codes.roll(i) for i in range(32)])
    scales = torch.full((32, layout.num_groups(len(codes)) + layout.has_factors), 0.5)
    if not layout.has_factors:
        scales /= 2
    return pack(levels, scales, None, layout), layout.values(levels) / 4
