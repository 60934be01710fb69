"""Products by quantized weights equal their oracle: few rows by tiles, more by decoded weights."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda import few_rows, few_rows_tiles
from specc.kernels.cuda import linear_q as module
from specc.kernels.cuda.few_rows import Choice, Product, forced, quantized_tile_for
from specc.kernels.cuda.linear_q import grouped_mm_q, linear_q
from specc.kernels.reference.quantized import grouped_mm_q_reference
from tests.kernels.cuda import cases_linear_q as cases
from tests.kernels.cuda.cases_linear_q import BF16, DTYPES, F16, F32

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TILES = cases.tiles()
# each tile with one shape, and with others in the slow tier
QUICK = [
    (name, dtype, cases.shapes(rows)[(i + i // 3) % 3], number, i % 2 == 0)
    for i, (name, dtype, rows, number) in enumerate(TILES)
]
EVERY = [
    (name, dtype, shape, number, i % 2 == 1)
    for i, (name, dtype, rows, number) in enumerate(TILES)
    for shape in cases.shapes(rows)
]


def _ids(items):
    return [
        f"{n}-{str(d).removeprefix('torch.')}-{'x'.join(map(str, s))}-{t}"
        for n, d, s, t, _ in items
    ]


@pytest.mark.default(
    "int8-bfloat16-1x200x70-0",
    "int8-zeros-bfloat16-16x256x40-1",
    "fp8-bfloat16-64x160x33-0",
    "fp8-g128-bfloat16-5x33x33-1",
    "mxfp4-bfloat16-17x200x70-0",
    "int8-g32-zeros-bfloat16-40x300x64-0",
    "int8-g64-bfloat16-16x256x40-1",
    "int8-g128-zeros-bfloat16-5x33x33-0",
    "int4-g32-bfloat16-1x200x70-1",
    "int4-g64-zeros-bfloat16-16x256x40-0",
    "int4-g128-zeros-bfloat16-17x200x70-0",
    "int8-zeros-float16-5x33x33-0",
    "fp8-g128-float16-5x33x33-1",
    "mxfp4-float16-17x200x70-0",
    "int8-g32-float16-16x256x40-0",
    "int8-g64-float16-16x256x40-1",
    "int4-g32-zeros-float16-40x300x64-0",
    "int4-g64-float16-5x33x33-0",
    "int4-g128-float16-5x33x33-1",
    "int8-float32-1x200x70-0",
    "mxfp4-float32-16x256x40-0",
    "int8-g64-zeros-float32-5x33x33-0",
    "int4-g32-zeros-float32-5x33x33-0",
    "nvfp4-bfloat16-64x160x33-0",
    "nvfp4-float16-16x256x40-0",
    "nvfp4-float32-5x33x33-0",
)
@pytest.mark.parametrize(
    "case",
    [x if i % 2 == 0 else pytest.param(x, marks=pytest.mark.slow) for i, x in enumerate(QUICK)],
    ids=_ids(QUICK),
)
def test_tiles(case, device):
    cases.check_tile(*case, device)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=_ids(EVERY))
def test_tiles_with_every_shape(case, device):
    cases.check_tile(*case, device)


@pytest.mark.default(
    "int8",
    "int8-zeros",
    "int8-g32",
    "int8-g64-zeros",
    "int8-g128",
    "int4-g32",
    "int4-g32-zeros",
    "int4-g64",
    "int4-g128",
    "fp8-g32",
    "mxfp4",
    "nvfp4",
)
@pytest.mark.parametrize("name", cases.ALL)
def test_decoded_weights(name, device):
    """Every layout, in one type each; short groups, and a last block that is."""
    dtype = DTYPES[cases.ALL.index(name) % 3]
    cases.check_decoded(name, dtype, 200, 70, device)
    cases.check_decoded(name, F32, 331, 65, device)


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
def test_every_code_of_floats(name, device):
    """All of them, subnormals and both zeros, of e4m3 and e2m1."""
    weight, want = cases.every_code(name)
    layout = QuantizedLayout.named(name)
    for dtype in DTYPES:
        like = torch.zeros(1, want.shape[1], dtype=dtype, device=device)
        found = module.decoded(weight.to(device), like, 0, 32, layout)
        assert torch.equal(found, want.to(dtype).to(device))


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
def test_every_code_of_floats_in_products(name, device):
    """A row that is 1 in one column reads it: 32 outputs have 32 codes there."""
    weight, want = cases.every_code(name)
    layout, columns = QuantizedLayout.named(name), want.shape[1]
    chosen = torch.arange(0, columns, 31)
    x = torch.eye(columns, dtype=BF16, device=device)[chosen]
    facts = (layout.bits, layout.group, layout.has_zeros, layout.is_float)
    with forced(0):
        found = linear_q(x, weight.to(device), None, 32, *facts)
    assert torch.equal(found.float().cpu(), want[:, chosen].T)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int8", F32), ("int4-g64-zeros", BF16), ("int8-g32", F16), ("mxfp4", BF16)],
)
def test_more_rows(name, dtype, device, monkeypatch):
    """By the decoded weight, in one piece and in several: of one block each, and of two."""
    cases.check_library(name, dtype, (70, 200, 100), device)
    for blocks in (1, 2):
        size = 32 * 200 * dtype.itemsize * blocks
        monkeypatch.setattr(module, "DECODED_BYTES", size)
        cases.check_library(name, dtype, (70, 200, 100), device)


def test_a_weight_is_decoded_only_so_much_at_a_time(device, monkeypatch):
    """What the memory plan counts."""
    made = []

    def decoded(*args):
        made.append(original(*args))
        return made[-1]

    original = module.decoded
    monkeypatch.setattr(module, "decoded", decoded)
    monkeypatch.setattr(module, "DECODED_BYTES", 2 * 32 * 64 * 2 + 10)
    cases.check_library("int8", BF16, (70, 64, 150), device)
    assert [len(item) for item in made] == [64, 64, 22]
    assert max(item.nbytes for item in made) <= module.DECODED_BYTES


def test_which_product(device):
    """The first tile until something else was measured; never more rows than a kernel takes."""
    x = torch.zeros(5, 256, dtype=BF16, device=device)
    tiles = few_rows_tiles.quantized_tiles("int4-g64", BF16, 5)
    assert quantized_tile_for(x, 64, "int4-g64") == tiles[0]
    product = Product.of_quantized(5, BF16, (64, 256), "int4-g64")
    for chosen in (tiles[1], None):
        few_rows.choices[product] = Choice.of(chosen)
        try:
            assert quantized_tile_for(x, 64, "int4-g64") == chosen
            # rows of one bucket share a choice; other layouts do not
            assert quantized_tile_for(x[:1].repeat(7, 1), 64, "int4-g64") == chosen
            assert quantized_tile_for(x[:1], 64, "int4-g64") == tiles[0]
            assert quantized_tile_for(x, 64, "int4-g32") == tiles[0]
        finally:
            del few_rows.choices[product]
    # integers in groups, and with zero points, are read as they are, too
    for layout in ("int8-g32", "int8-g64", "int8-g128", "int8-zeros", "int8-g128-zeros"):
        for dtype in DTYPES:
            own = torch.zeros(3, 256, dtype=dtype, device=device)
            first = few_rows_tiles.quantized_tiles(layout, dtype, 3)[0]
            assert quantized_tile_for(own, 64, layout) == first
    for rows, dtype, layout in (
        (65, BF16, "int8"),
        (17, F32, "int8"),
        (17, F32, "int8-g128"),
        (1, BF16, "fp8-g32"),
        (1, F16, "fp8-g64"),
    ):
        x = torch.zeros(rows, 256, dtype=dtype, device=device)
        assert quantized_tile_for(x, 64, layout) is None
        with forced(0):
            assert quantized_tile_for(x, 64, layout) is None


@pytest.mark.parametrize("number", [0, None])
def test_no_rows(number, device):
    operands = cases.make_operands("int8", (0, 64, 40), F16, device, has_bias=True)
    with forced(number):
        assert linear_q(**operands).shape == (0, 40)


def test_large_values(device):
    """Sums beyond float16's range are kept until a scale has brought them back."""
    operands = cases.make_operands("int8", (2, 256, 32), F16, device)
    operands["input"] = torch.full_like(operands["input"], 300.0)
    shape = (32, 256)
    layout = QuantizedLayout.named("int8")
    weight = torch.linspace(1e-3, 2e-3, 32)[:, None].expand(shape).contiguous()
    operands["weight"] = cases.quantize(weight, layout).to(device)
    with forced(0):
        found = linear_q(**operands)
    assert bool(found.isfinite().all())
    cases.assert_close(found, cases.oracle(operands), cases.TOLERANCE[F16])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"input": torch.zeros(2, 64, dtype=torch.float64)}, "found input"),
        ({"input": torch.zeros(1, 2, 64)}, "found input"),
        ({"weight": torch.zeros(2, 64, dtype=torch.uint8)}, "found weight"),
        ({"weight": torch.zeros(2, 2176)}, "found weight"),
        ({"bias": torch.zeros(39)}, "found bias"),
        ({"bias": torch.zeros(40, dtype=BF16)}, "found bias"),
        ({"bits": 4, "group": 32}, "found weight"),
    ],
)
def test_bad_input_is_refused(change, found, device):
    operands = cases.make_operands("int8", (2, 64, 40), F32, device) | change
    with pytest.raises(ValueError, match=found):
        linear_q(**operands)


@pytest.mark.parametrize("name", ["mxfp4", "int4-g32-zeros"])
def test_runs_of_rows_are_multiplied_by_their_expert(name, device):
    """Also by one without rows; rows beyond the last run are zeros."""
    layout = QuantizedLayout.named(name)
    weight = torch.cat([cases.make_weight(name, 100, outputs, device) for outputs in (40, 41, 42)])
    x = torch.randn(9, 100, device=device)
    ends = torch.tensor([3, 3, 7], dtype=torch.int32, device=device)
    facts = (40, *layout.facts)
    got = grouped_mm_q(x, weight, ends, *facts)
    want = grouped_mm_q_reference(*cases.on_host((x, weight, ends)), *facts).to(device)
    cases.assert_close(got[:7], want[:7], cases.TOLERANCE[F32])
    assert not got[7:].any()
