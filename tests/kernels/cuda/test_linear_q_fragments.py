"""Products by weights in fragments equal their oracle; on a CPU the Gluon kernel is emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout, pack, unpack
from specc.kernels.cuda import few_rows_tiles, linear_q_fragments, linear_q_unpack
from specc.kernels.cuda import linear_q as linear_q_module
from specc.kernels.cuda import linear_q_fragments_kernels as kernels
from specc.kernels.cuda.few_rows import forced
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS, Tile
from specc.kernels.cuda.linear_q import decoded, invariant_linear_q, linear_q
from tests.kernels.cuda import cases_linear_q as cases
from tests.kernels.cuda import ptx_pairs
from tests.kernels.cuda.cases_linear_q import BF16
from tests.kernels.cuda.emulated_fragments import launcher

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# rows, columns, outputs: a step that most warps have nothing of, one whole, one and a half, several
# with a short group; a last block that is short, and half of one
SHAPES = ((1, 256, 40), (8, 2048, 33), (3, 3072, 16), (8, 4480, 50))


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[dict[str, Any]]:
    """Constants of the launches of the product's kernel."""
    found: list[dict[str, Any]] = []
    kernel = linear_q_fragments.linear_q_fragments_kernel
    if device.type == "cpu":
        kernel = launcher(kernels, "linear_q_fragments_kernel")

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                found.append(options)
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(linear_q_fragments, "linear_q_fragments_kernel", Counted())
    return found


def operands_of(name: str, shape: tuple[int, int, int], device: torch.device) -> Any:
    return cases.make_operands(name, shape, BF16, device, has_bias=True)


def tiles_of(name: str, rows: int) -> tuple[Tile, ...]:
    return few_rows_tiles.quantized_tiles(name, BF16, rows)


def check(name: str, shape: tuple[int, int, int], number: int, device: torch.device) -> None:
    operands = operands_of(name, shape, device)
    with forced(number):
        found = linear_q(**operands)
    cases.assert_close(found, cases.oracle(operands), cases.TOLERANCE[BF16])


@pytest.mark.parametrize("name", FRAGMENT_LAYOUTS)
def test_layouts(name: str, launched: list[Any], device: torch.device) -> None:
    """All of them, with each form in turn."""
    i = FRAGMENT_LAYOUTS.index(name)
    check(name, SHAPES[i % 4], i % len(tiles_of(name, 8)), device)
    assert len(launched) == 1


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "name", ["int4-g128-zeros-fragments", "mxfp4-fragments", "nvfp4-fragments"]
)
def test_forms(name: str, shape: Any, number: int, launched: list[Any], device: Any) -> None:
    """A ring, and loads one step ahead."""
    assert len(tiles_of(name, shape[0])) == 2
    check(name, shape, number, device)
    assert len(launched) == 1


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("distance", [32, 48])
def test_outputs_that_lie_apart(distance: int, number: int, device: torch.device) -> None:
    """Of two groups, by each form, and decoded: as a whole, in groups, and in parts of them."""
    name = f"int4-g64-zeros-fragments-{distance}"
    size = 4 * distance
    assert tiles_of(name.rpartition("-")[0], 2)[number].block_n == (32, 16)[number]
    check(name, (2, 256, size), number, device)
    operands = operands_of(name, (40, 256, size), device)
    for blocks in (100, distance // 16, 2, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_q_module, "DECODED_BYTES", blocks * 32 * 256 * 2)
            found = linear_q(**operands)
        cases.assert_close(found, cases.oracle(operands), cases.DECODED_TOLERANCE[BF16])


@pytest.mark.parametrize("rows", [9, 16, 17, 32])
@pytest.mark.parametrize("name", ["int4-g32-fragments", "fp8-g128-fragments"])
def test_more_rows(name: str, rows: int, launched: list[Any], device: torch.device) -> None:
    check(name, (rows, 2304, 33), 0, device)
    is_wide = rows > 16 or name.startswith("int4")
    assert [item["BM"] for item in launched] == [32 if is_wide else 16]


@pytest.mark.parametrize("name", ["int4-g64-fragments", "int8-fragments"])
def test_a_row_has_the_same_bits_beside_any_others(name: str, device: torch.device) -> None:
    """All tiles of a shape add up in the same order."""
    operands = operands_of(name, (17, 2304, 16), device)
    x = operands.pop("input")
    whole = linear_q(x, **operands)
    for rows in (1, 16):
        for number in range(len(tiles_of(name, rows))):
            with forced(number):
                assert torch.equal(linear_q(x[:rows], **operands), whole[:rows])


@pytest.mark.parametrize(
    "name", ["int4-g64-zeros-fragments-48", "fp8-fragments", "mxfp4-fragments"]
)
def test_rows_of_other_programs(name: str, launched: list[Any], device: torch.device) -> None:
    """By `invariant_linear_q`, however many: the oracle, bits of the row alone, nothing decoded."""
    size = 96 if name.endswith("-48") else 40
    operands = operands_of(name, (40, 2304, size), device)
    x = operands.pop("input")
    whole = invariant_linear_q(x, **operands)
    cases.assert_close(whole, cases.oracle(operands | {"input": x}), cases.TOLERANCE[BF16])
    for first, last in ((0, 1), (33, 34), (39, 40), (30, 37), (3, 20)):
        part = invariant_linear_q(x[first:last], **operands)
        assert torch.equal(part, whole[first:last]), (first, last)
    assert len(launched) == 6
    assert invariant_linear_q(x[:0], **operands).shape == (0, size)


def test_weights_in_blocks_have_no_such_rows(device: torch.device) -> None:
    operands = cases.make_operands("int4-g64", (2, 256, 40), BF16, device, has_bias=True)
    with pytest.raises(ValueError, match="int4-g64; needed a layout in fragments"):
        invariant_linear_q(**operands)


def test_a_row_that_is_not_finite_stays_alone(device: torch.device) -> None:
    operands = operands_of("int4-g128-fragments", (5, 512, 33), device)
    want = linear_q(**operands)
    operands["input"][2, 7] = torch.nan
    found = linear_q(**operands)
    assert bool(found[2].isnan().all())
    others = torch.tensor([0, 1, 3, 4], device=device)
    assert torch.equal(found[others], want[others])


@pytest.mark.parametrize("name", FRAGMENT_LAYOUTS)
def test_decoded_weights(name: str, device: torch.device) -> None:
    """Bit for bit what the layout says, of all blocks and of those after the first."""
    layout = QuantizedLayout.named(name)
    columns, outputs = 256, 70
    weight = operands_of(name, (1, columns, outputs), device)["weight"]
    plain = QuantizedLayout.named(name.removesuffix("-fragments"))
    like = torch.zeros(1, columns, dtype=BF16, device=device)
    blocks = cases.make_weight(plain.name, columns, outputs, torch.device("cpu"))
    want = cases.dequantize(blocks, (outputs, columns), plain).to(BF16).to(device)
    assert torch.equal(decoded(weight, like, 0, outputs, layout), want)
    assert torch.equal(decoded(weight, like, 1, outputs - 32, layout), want[32:])


@pytest.mark.parametrize("rows", [33, 70])
def test_rows_that_no_kernel_has(rows: int, launched: list[Any], device: torch.device) -> None:
    operands = operands_of("int4-g128-fragments", (rows, 256, 40), device)
    found = linear_q(**operands)
    cases.assert_close(found, cases.oracle(operands), cases.DECODED_TOLERANCE[BF16])
    assert launched == []
    wide = {**operands, "input": operands["input"].float(), "bias": operands["bias"].float()}
    with pytest.raises(ValueError, match="of bfloat16 by fragments"):
        linear_q(**wide)


def test_which_tiles() -> None:
    """The fewest rows that suffice; as many columns of a warp and as many warps for any number."""
    for name, columns in (("int4-g64-fragments", 256), ("fp8-fragments", 128)):
        middle = 32 if columns == 256 else 16
        for rows, most in ((1, 8), (8, 8), (9, middle), (16, middle), (17, 32), (32, 32)):
            tiles = tiles_of(name, rows)
            assert {(t.block_m, t.block_k, t.num_warps) for t in tiles} == {(most, columns, 8)}
        assert tiles_of(name, 33) == ()


@pytest.mark.parametrize("kind", ["int4", "e2m1", "int8", "fp8"])
def test_every_half_of_a_word(kind: str) -> None:
    """Each of 65536, in both places: what its levels stand for, none of it rounded."""
    text = getattr(linear_q_unpack, f"UNPACK_{kind.upper()}")
    halves = torch.arange(1 << 16)
    words = (halves | halves.flip(0) << 16).to(torch.int32)
    count = 4 if kind.endswith("8") else 8
    for low, high in EXPONENTS if kind == "e2m1" else ((0, 0),):
        rows = of_rows(*(torch.tensor([2.0 ** (x + 126)]) for x in (low, high)))
        given = [torch.stack([x, x], -1) for x in (words, rows.expand_as(words))]
        found = ptx_pairs.run(getattr(text, "value", text), given, count)
        name = {"int4": "int4-g128", "e2m1": "mxfp4"}.get(kind, kind)
        layout = QuantizedLayout.named(name).as_fragments
        levels = levels_of_words(words, layout)
        want = layout.values(levels) - layout.middle
        for i, pairs in enumerate(found):
            own = want[..., i % (count // 2)] * 2.0 ** (high if i % 2 else low)
            # of e4m3, 127 is no number, and no weight has it
            known = levels[..., i % (count // 2)] & 127 != 127
            assert torch.equal(pairs.float()[known], own[known])


# of scales of rows of both halves, less what factors make up for
EXPONENTS = ((-125, 1), (-16, 0), (1, -125))


def levels_of_words(words: torch.Tensor, layout: QuantizedLayout) -> torch.Tensor:
    """Of each of 65536 words, in a block, its levels [65536, 2, 4 or 2], by its halves."""
    columns = (1 << 21) // 32 // layout.bits
    head = layout.stored_shape((32, columns))[1] - (1 << 18)
    stored = torch.cat([torch.zeros(head, dtype=torch.uint8), words.view(torch.uint8)])[None]
    levels = unpack(stored, (32, columns), layout)[0]
    i = torch.arange(1 << 16)[:, None]
    tile, half, g, q, j = i // 256, i // 128 % 2, i // 16 % 8, i // 4 % 4, i % 4
    e = torch.arange(2)
    if layout.bits == 4:
        column = tile * 64 + j // 2 * 32 + q * 8 + j % 2 * 4 + e
        places = [(8 * r, 2 * h) for h in range(2) for r in range(2)]
    else:
        column = tile * 32 + q * 8 + j // 2 * 4 + j % 2 * 2 + e
        places = [(8 * r, 0) for r in range(2)]
    return torch.stack([levels[half * 16 + g + r, column + h] for r, h in places], -1)


def test_every_level_and_zero_point() -> None:
    """What u - z is, for every zero point, in rows of both halves, none of it rounded."""
    text = linear_q_unpack.UNPACK_INT4_ZEROS
    u, z = torch.cartesian_prod(torch.arange(16), torch.arange(129)).T
    word = (u * 0x11111111).to(torch.int32)
    other = (z + 5) % 129
    words = [torch.stack([x, x], -1) for x in (word, of_rows(-128.0 - z, -128.0 - other))]
    found = ptx_pairs.run(getattr(text, "value", text), words, 8)
    for i, pairs in enumerate(found):
        want = (u - (other if i % 2 else z)).float()
        assert torch.equal(pairs.float(), want[:, None].expand(-1, 2))


@pytest.mark.parametrize(("kind", "factor"), [("mxfp4", 2.0**16), ("nvfp4", 2.0**10)])
def test_every_level_and_scale(kind: str, factor: float) -> None:
    """Each code times each scale, in rows of both halves, none of it rounded; of every byte."""
    layout = QuantizedLayout.named(f"{kind}-fragments")
    levels = torch.arange(16, dtype=torch.uint8).repeat(2)[:, None].expand(32, 256).contiguous()
    parts = torch.ones(32, layout.num_groups(256) + layout.has_factors)
    # of lane 4 g + q rows g and g + 8: codes g and g + 8
    words = pack(levels, parts, None, layout)[0, -4096:].view(torch.int32)
    lanes = words.view(4, 2, 8, 4, 4)[0, 0, :, 0, :2]
    if kind == "nvfp4":
        known = torch.arange(1, 127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        known = torch.exp2(torch.arange(-109, 18).float())
    scales = torch.stack([known.roll(i) for i in range(4)])
    # groups of the first 16 columns of both spans of a tile
    spans = [layout.has_factors + span * 32 // layout.group for span in range(2)]
    for i in range(len(known)):
        for span, group in enumerate(spans):
            parts[[0, 8], group] = scales[2 * span : 2 * span + 2, i]
        of_tile = pack(levels, parts, None, layout)[0, 128:132].view(torch.int32)
        for span, group in enumerate(spans):
            text = linear_q_unpack.scales_of_span(kind, span)
            (rows,) = ptx_pairs.run_words(text, [of_tile[None]], 1)
            given, text = rows.view(1, 1).expand(8, 2), linear_q_unpack.UNPACK_E2M1
            found = ptx_pairs.run(getattr(text, "value", text), [lanes, given], 8)
            for j, pairs in enumerate(found):
                own = layout.values(torch.arange(8) + 8 * (j % 2))
                want = own * parts[8 * (j % 2), group] / factor
                assert torch.equal(pairs.float(), want[:, None].expand(8, 2))


def of_rows(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Words whose halves are numbers in bfloat16."""
    halves = [x.bfloat16().view(torch.int16).long() & 0xFFFF for x in (low, high)]
    return (halves[0] | halves[1] << 16).to(torch.int32)
