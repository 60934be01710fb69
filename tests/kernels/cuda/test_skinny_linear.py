"""Products without a norm equal their oracle: whole sums, and sums that programs share."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import attend_config, few_rows, few_rows_tiles
from specc.kernels.cuda.few_rows import SKINNY, Choice, Product, forced, tile_for
from specc.kernels.cuda.few_rows_tiles import LINEAR_TILES, Tile
from specc.kernels.cuda.skinny_linear import shipped, skinny_linear
from specc.kernels.operators import linear
from specc.kernels.reference.products import skinny_linear_reference
from tests.kernels.cuda.cases_add_norm import BF16, DTYPES, F16, F32, fitted
from tests.kernels.cuda.test_add_norm import ids

pytestmark = pytest.mark.usefixtures("poisoned_memory")

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


@pytest.mark.parametrize("case", QUICK, ids=ids(QUICK))
def test_tiles(case, device):
    check(*case, device)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=ids(EVERY))
def test_tiles_with_every_shape_and_number_of_rows(case, device):
    check(*case, device)


@pytest.mark.default(
    "bfloat16-vector-n8",
    "bfloat16-swap-n64x2",
    "bfloat16-n32",
    "bfloat16-swap-m16-n64x2",
    "float16-n16",
    "float16-n32x4",
)
@pytest.mark.parametrize(("dtype", "tile"), TILES, ids=ids(TILES))
def test_rows_do_not_depend_on_others(dtype, tile, device):
    """A row is the same bit for bit, whatever other rows a launch has."""
    rows, size = fitted((tile.block_m,), 264, tile)
    operands = make_operands(rows, size, 70, dtype, device)
    with few_rows.forced(tile):
        whole = skinny_linear(**operands)
        for count in {1, 7} & set(range(tile.block_m)):
            part = skinny_linear(**operands | {"input": operands["input"][:count].contiguous()})
            assert torch.equal(part, whole[:count])


def test_the_library(device):
    check((1, 5), 200, 70, F32, None, True, device)
    # more rows than a kernel takes
    check((17,), 200, 70, F32, LINEAR_TILES[F32][0], False, device)


def test_rows_of_a_transposed_tensor(device):
    """As what attention returns, in the order of heads."""
    operands = make_operands((4, 6), 32, 20, F32, device)
    operands["input"] = operands["input"].transpose(0, 1)
    with forced(0):
        found = skinny_linear(**operands)
    torch.testing.assert_close(found, operands["input"] @ operands["weight"].T)


@pytest.mark.parametrize("number", range(len(LINEAR_TILES[F32])))
def test_no_rows(number, device):
    operands = make_operands((0,), 8, 6, F32, device)
    with forced(number):
        assert skinny_linear(**operands).shape == (0, 6)


def test_tiles_are_of_this_operator(device):
    """A choice of a product with a norm says nothing of one without."""
    weight = torch.zeros(8, 512, dtype=BF16, device=device)
    product = Product.of(SKINNY, 4, weight)
    assert {tile for _, tile in TILES} > set(product.tiles)
    assert set(Product.of("add_norm_linear", 4, weight).tiles) < set(few_rows.TILES[BF16])
    assert Product.of(SKINNY, 17, weight).tiles == ()
    few_rows.choices[product] = Choice.of(product.tiles[3])
    try:
        assert tile_for(SKINNY, 3, weight) == product.tiles[3]
        assert tile_for("add_norm_linear", 3, weight) is None
    finally:
        del few_rows.choices[product]


def test_memory_of_parts_is_planned():
    assert linear.SHARED_ROWS == few_rows_tiles.MAX_ROWS * few_rows_tiles.MAX_SPLITS


@pytest.mark.parametrize(
    ("num_rows", "columns", "wanted"),
    [
        (1, 4096, {("vector", 512), ("vector", 256)}),
        # widths of which a step is no part have no tile that would read beyond them
        (1, 768, {("vector", 256)}),
        (1, 896, {("swap", 128)}),
        (1, 80, {("dot", 128)}),
        (2, 4096, {("swap", 128)}),
        (8, 896, {("swap", 128)}),
        (8, 80, {("dot", 128)}),
        (9, 4096, {("dot", 128), ("swap", 256)}),
        (16, 4096, {("dot", 128), ("swap", 256)}),
        (16, 896, {("dot", 128)}),
    ],
)
def test_tiles_suit_the_rows_and_the_width(num_rows, columns, wanted, device):
    weight = torch.zeros(8, columns, dtype=BF16, device=device)
    tiles = Product.of(SKINNY, num_rows, weight).tiles
    assert {(tile.form, tile.block_k) for tile in tiles} == wanted


@pytest.mark.parametrize(
    ("capability", "has_large"), [(80, True), (86, False), (90, True), (100, True), (120, False)]
)
def test_tiles_fit_the_shared_memory(capability, has_large, device, monkeypatch):
    """What a device cannot launch is neither measured there nor listed as shipped."""
    monkeypatch.setattr(few_rows, "machine", lambda device: (capability, 8))
    weight = torch.zeros(8, 4096, dtype=BF16, device=device)
    tiles = Product.of(SKINNY, 16, weight).tiles
    assert {tile.form for tile in tiles} == ({"dot", "swap"} if has_large else {"dot"})
    large = LINEAR_TILES[BF16][-1]
    assert large.form == "swap"
    with forced(large):
        assert tile_for(SKINNY, 16, weight) == (large if has_large else None)
    names = {item.name for item in shipped(capability)}
    assert ("bf16-swap-m16-n64-split" in names) == has_large


def test_each_gpu_has_the_tiles_that_it_can_launch(monkeypatch):
    """In one process, whichever is asked first; and without one what stands for it."""
    current = []
    monkeypatch.setattr(few_rows, "machine", functools.cache(attend_config.machine.__wrapped__))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(current))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])

    def properties(device):
        major = 9 if device.index == 0 else 12
        return SimpleNamespace(major=major, minor=0, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    weight = torch.zeros(8, 4096, dtype=BF16)
    forms = []
    for index in (None, 0, 1, 0):
        current += [] if index is None else [index]
        forms.append({tile.form for tile in Product.of(SKINNY, 16, weight).tiles})
    assert forms == [{"dot", "swap"}, {"dot", "swap"}, {"dot"}, {"dot", "swap"}]


def test_a_forced_tile_that_does_not_take_a_product_is_not_launched(device):
    vector, *_ = LINEAR_TILES[BF16]
    for num_rows, columns, wanted in ((1, 512, vector), (2, 512, None), (1, 768, None)):
        weight = torch.zeros(8, columns, dtype=BF16, device=device)
        with forced(vector):
            assert tile_for(SKINNY, num_rows, weight) == wanted


def test_configurations_of_a_dtype_are_told_by_names_and_splits():
    """What `shipped` lists once is launched for every number of splits."""
    for tiles in (*LINEAR_TILES.values(), *few_rows.TILES.values()):
        kinds = {}
        for tile in tiles:
            own = (tile.sizes, tile.options)
            assert kinds.setdefault((tile.name, tile.splits > 1), own) == own


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"weight": torch.zeros(8, 15)}, "found weight"),
        ({"weight": torch.zeros(16, 8).T}, "found weight"),
        ({"weight": torch.zeros(8, 16, dtype=F16)}, "found weight"),
        ({"bias": torch.zeros(7)}, "found bias"),
        ({"input": torch.zeros(1, 4, 16, dtype=torch.float64)}, "found input"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(change, found, device):
    operands = make_operands((1, 4), 16, 8, F32, device)
    with pytest.raises(ValueError, match=found):
        skinny_linear(**(operands | {k: v.to(device) for k, v in change.items()}))
