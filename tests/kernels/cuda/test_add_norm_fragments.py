"""Products by weights in fragments with a norm in front equal their oracle; on a CPU they are
emulated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda import (
    add_norm_fragments,
    few_rows_tiles,
    linear_q,
    linear_q_fragments,
    linear_q_fragments_kernels,
)
from specc.kernels.cuda import add_norm_fragments_kernels as kernels
from specc.kernels.cuda.add_norm_gate_up import add_norm_gate_up
from specc.kernels.cuda.add_norm_linear import add_norm_linear
from specc.kernels.cuda.few_rows import Product, forced
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS, all_normed_tiles
from specc.kernels.reference.fused import ACTIVATIONS
from specc.kernels.reference.products import (
    add_norm_gate_up_reference,
    add_norm_linear_reference,
)
from tests.kernels.cuda.cases_add_norm import EPS, TOLERANCE
from tests.kernels.cuda.cases_linear_q import BF16, assert_close, make_weight, on_host
from tests.kernels.cuda.emulated_fragments import launcher

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# (rows as dimensions, K, blocks): part of a step and of a chunk, whole ones, a step and a half
SHAPES = (((1, 1), 256, 3), ((2, 4), 2048, 3), ((3,), 3072, 4), ((1, 5), 2304, 2))


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[dict[str, Any]]:
    """Constants of the launches of the kernel, and how many programs."""
    found: list[dict[str, Any]] = []
    kernel = add_norm_fragments.add_norm_fragments_kernel
    if device.type == "cpu":
        kernel = launcher(kernels, "add_norm_fragments_kernel")
        of_rows = launcher(linear_q_fragments_kernels, "linear_q_fragments_kernel")
        monkeypatch.setattr(linear_q_fragments, "linear_q_fragments_kernel", of_rows)

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                found.append(options | {"programs": grid[0]})
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(add_norm_fragments, "add_norm_fragments_kernel", Counted())
    return found


@pytest.fixture
def two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_norm_fragments, "num_programs", lambda *_: 2)


def operands_of(
    name: str, rows: tuple[int, ...], columns: int, outputs: int, distance: int, device: Any
) -> tuple[list[Any], str]:
    """x, residual, gamma, eps, offset and weight, and the layout's name."""
    layout = QuantizedLayout.named(name).paired(distance)
    dice = torch.Generator().manual_seed(columns + outputs)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice)

    weight = make_weight(layout.name, columns, outputs, device)
    sizes = torch.logspace(-1, 1, torch.Size(rows).numel()).view(*rows, 1)
    x, residual = (draw(*rows, columns) * sizes for _ in range(2))
    # products of about 1 have all that there is to an activation
    has_offset = bool(columns % 512)
    gamma = draw(columns) / columns**0.5 - float(has_offset)
    given = [item.to(BF16).to(device) for item in (x, residual, gamma)]
    return [*given, EPS, has_offset, weight], layout.name


def check_linear(name: str, shape: Any, has_bias: bool, device: Any, tile: int = 0) -> None:
    rows, columns, blocks = shape
    operands, layout = operands_of(name, rows, columns, 32 * blocks, 16, device)
    bias = torch.randn(32 * blocks).to(BF16).to(device) if has_bias else None
    with forced(tile):
        found, total = add_norm_linear(*operands, bias, layout)
    want, sums = add_norm_linear_reference(*on_host([*operands, bias]), layout)
    assert_close(found.cpu(), want, TOLERANCE[BF16])
    assert torch.equal(total.cpu(), sums)


def check_gated(name: str, shape: Any, activation: str, device: Any) -> None:
    rows, columns, blocks = shape
    operands, layout = operands_of(name, rows, columns, 32 * blocks, 16 * blocks, device)
    found, total = add_norm_gate_up(*operands, activation, layout)
    want, sums = add_norm_gate_up_reference(*on_host([*operands, activation]), layout)
    assert_close(found.cpu(), want, TOLERANCE[BF16])
    assert torch.equal(total.cpu(), sums)


@pytest.mark.parametrize("name", FRAGMENT_LAYOUTS)
def test_layouts(name: str, launched: list[Any], device: torch.device) -> None:
    """All of them, with and without a bias; gates by each activation."""
    i = FRAGMENT_LAYOUTS.index(name)
    check_linear(name, SHAPES[i % 4], i % 3 == 0, device)
    check_gated(name, SHAPES[(i + 1) % 4], [*ACTIVATIONS][i % 4], device)
    assert [item["IS_GATED"] for item in launched] == [False, True]


@pytest.mark.usefixtures("two_programs")
@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("shape", [*SHAPES, ((1, 7), 3840, 5), ((1,), 6144, 3)], ids=str)
@pytest.mark.parametrize("name", ["int4-g128-zeros-fragments", "fp8-fragments"])
def test_forms(
    name: str, shape: Any, capability: int, launched: list[Any], monkeypatch: Any, device: Any
) -> None:
    """A ring, and loads one step ahead; programs that have several blocks, or none too many."""
    tiles = all_normed_tiles(name, capability)
    monkeypatch.setattr(few_rows_tiles, "all_normed_tiles", lambda *_: tiles)
    check_linear(name, shape, True, device)
    check_gated(name, shape, "silu", device)
    assert [item["RING"] for item in launched] == [3 if capability == 90 else 0] * 2
    assert {item["programs"] for item in launched} == {2}


@pytest.mark.parametrize("name", ["int4-g64-fragments", "int8-fragments"])
def test_a_row_has_the_same_bits_beside_any_others(name: str, launched: Any, device: Any) -> None:
    """By the kernel of one row, and by that of eight."""
    operands, layout = operands_of(name, (8,), 2304, 64, 32, device)
    whole, _ = add_norm_gate_up(*operands, "gelu", layout)
    for rows in (1, 5):
        own = [item[:rows] for item in operands[:2]]
        found, _ = add_norm_gate_up(*own, *operands[2:], "gelu", layout)
        assert torch.equal(found, whole[:rows])
    assert [item["BS"] for item in launched] == [8, 1, 8]


def test_a_row_that_is_not_finite_stays_alone(device: torch.device) -> None:
    operands, layout = operands_of("int4-g128-fragments", (5,), 512, 32, 16, device)
    want, _ = add_norm_linear(*operands, None, layout)
    operands[1][2, 7] = torch.nan
    found, total = add_norm_linear(*operands, None, layout)
    assert bool(found[2].isnan().all())
    assert bool(total[2].isnan().any())
    others = torch.tensor([0, 1, 3, 4], device=device)
    assert torch.equal(found[others], want[others])


def test_rows_and_columns_that_no_kernel_has(
    launched: list[Any], monkeypatch: Any, device: torch.device
) -> None:
    """They are the norm, `linear_q` by its own choice, and the gate."""
    for rows, columns, name in ((9, 512, "int4-g64"), (2, 6400, "mxfp4")):
        check_linear("int8-fragments", ((rows,), 6400 if rows == 2 else columns, 2), True, device)
        check_gated(f"{name}-fragments", ((rows,), columns, 2), "gelu_tanh", device)
    # where something else than the kernel is asked for, its parts are as they are without that
    monkeypatch.setattr(linear_q, "decoded", None)
    check_linear("int8-fragments", ((2,), 512, 2), True, device, tile=1)
    assert launched == []


def test_no_rows(launched: list[Any], device: torch.device) -> None:
    operands, layout = operands_of("int8-fragments", (0,), 256, 32, 16, device)
    assert add_norm_linear(*operands, None, layout)[0].shape == (0, 32)
    assert launched == []


def test_bad_operands_are_refused(device: torch.device) -> None:
    operands, layout = operands_of("int8-fragments", (2,), 256, 64, 32, device)
    with pytest.raises(ValueError, match="needed int8-fragments"):
        add_norm_linear(*operands, None, layout)
    with pytest.raises(ValueError, match="needed int8-fragments-32"):
        add_norm_gate_up(*operands, "silu", "int8-fragments-64")
    with pytest.raises(ValueError, match="needed fragments"):
        add_norm_linear(*operands, None, "int8")
    with pytest.raises(ValueError, match="found weight"):
        add_norm_gate_up(*operands, "silu", "int4-g64-fragments-32")
    with pytest.raises(ValueError, match="found residual"):
        add_norm_gate_up(operands[0], operands[1][:1], *operands[2:], "silu", layout)


def test_which_tiles() -> None:
    """The first form that a device has room for, by rows and columns."""
    for capability, rows, columns, want in (
        (90, 1, 4096, (1, 6144, 3)), (90, 2, 6144, (8, 6144, 3)), (90, 8, 6272, None),
        (80, 1, 256, (1, 6144, 3)), (80, 8, 6144, (8, 6144, 2)), (120, 1, 6144, (1, 6144, 2)),
        (120, 4, 4096, (8, 4096, 2)), (120, 4, 5120, None), (90, 16, 4096, None),
    ):  # fmt: skip
        found = few_rows_tiles.normed_tiles("int8-fragments", rows, columns, capability)
        assert [(t.block_m, t.columns, t.num_stages) for t in found] == ([want] if want else [])
    for capability, found in ((80, [1, 1]), (90, [2, 1]), (120, [2, 1])):
        tiles = all_normed_tiles("int4-g128-fragments", capability)
        wide = all_normed_tiles("int4-g64-zeros-fragments", capability)
        assert few_rows_tiles.resident(wide[0], capability) == 1
        assert [few_rows_tiles.resident(tile, capability) for tile in tiles] == found
        assert all_normed_tiles("int8-zeros-fragments", capability) == ()
    product = Product.of_layout("add_norm_linear", 5, BF16, (64, 256), "int8-fragments")
    assert [tile.block_m for tile in product.tiles] == [8]
    assert product.can_start_early
