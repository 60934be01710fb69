"""Cases of the kernel of a product without a norm, and how one is checked, without pytest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda import few_rows, few_rows_tiles
from specc.kernels.cuda.few_rows_tiles import Tile
from specc.kernels.cuda.skinny_linear import skinny_linear
from specc.kernels.reference.products import skinny_linear_reference
from tests.kernels.cuda.cases_add_norm import BF16, DTYPES, F16, F32, fitted

# both round once; what differs is the order of a sum, relative to the largest result of a row
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}
# (rows as dimensions, K, N): odd, less than a tile, as a router, parts of a sum that are empty and
# one that is short, several blocks, all 16 rows
SHAPES = (
    ((1, 1), 64, 48),
    ((1, 5), 200, 70),
    ((16,), 300, 33),
    ((1, 3), 33, 8),
    ((2, 4), 1000, 7),
    ((1, 11), 520, 130),
)
TILES = tuple((dtype, tile) for dtype in DTYPES for tile in few_rows.LINEAR_TILES[dtype])
# each tile twice, with and without a bias, and with every shape some
QUICK = tuple(
    (*fitted(rows, size, tile), num_out, dtype, tile, bool(j))
    for i, (dtype, tile) in enumerate(TILES)
    for j in range(2)
    for rows, size, num_out in (SHAPES[(2 * i + j) % len(SHAPES)],)
)
EVERY = tuple(
    dict.fromkeys(
        (*fitted(rows, size, tile), num_out, dtype, tile, bool((i + j) % 2))
        for i, (dtype, tile) in enumerate(TILES)
        for j, (rows, size, num_out) in enumerate(
            (*SHAPES, *(((rows,), 160, 40) for rows in range(1, 17)))
        )
    )
)


def make_operands(
    rows: tuple[int, ...],
    size: int,
    num_out: int,
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool = False,
) -> dict[str, Any]:
    """Input, weight and bias; rows differ in scale, so that a wrong one shows."""
    dice = torch.Generator().manual_seed(size * 31 + num_out)
    scales = torch.logspace(-1, 1, torch.Size(rows).numel()).view(*rows, 1)
    x = torch.randn(*rows, size, generator=dice) * scales
    weight = torch.randn(num_out, size, generator=dice)
    bias = 3 * torch.randn(num_out, generator=dice)
    return {
        "input": x.to(dtype).to(device),
        "weight": weight.to(dtype).to(device),
        "bias": bias.to(dtype).to(device) if has_bias else None,
    }


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert got.is_contiguous()
    largest = want.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
    error = ((got.float() - want.float()).abs() / largest).max()
    assert error <= TOLERANCE[dtype], f"{error} of the largest in a row"


def check(
    rows: tuple[int, ...],
    size: int,
    num_out: int,
    dtype: torch.dtype,
    tile: Tile | None,
    has_bias: bool,
    device: torch.device,
) -> None:
    """Compare with the oracle; a second launch finds its counters as the first did."""
    operands = make_operands(rows, size, num_out, dtype, device, has_bias)
    num_rows = torch.Size(rows).numel()
    assert tile is None or num_rows > few_rows_tiles.MAX_ROWS or tile.takes(num_rows, size)
    with few_rows.forced(tile):
        found = [skinny_linear(**operands) for _ in range(2)]
    assert_close(found[0], skinny_linear_reference(**operands), dtype)
    assert torch.equal(*found)


def check_rows_apart(dtype: torch.dtype, tile: Tile, device: torch.device) -> None:
    """A row is the same bit for bit, whatever other rows a launch has."""
    rows, size = fitted((tile.block_m,), 264, tile)
    operands = make_operands(rows, size, 70, dtype, device)
    with few_rows.forced(tile):
        whole = skinny_linear(**operands)
        for count in {1, 7} & set(range(tile.block_m)):
            part = skinny_linear(**operands | {"input": operands["input"][:count].contiguous()})
            assert torch.equal(part, whole[:count])
