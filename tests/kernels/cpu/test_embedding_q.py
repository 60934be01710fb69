"""Rows of quantized weights: those of the whole weight, decoded, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.artifact.block_formats import FORMATS
from specc.artifact.decoded_rows import decode_rows
from specc.artifact.quantized_layout import QuantizedLayout, dequantize, pack
from specc.kernels import native

LAYOUTS = (
    "int8", "int8-g32", "int8-zeros", "int8-g128-zeros", "int4-g32", "int4-g64-zeros", "int4-g128",
    "fp8", "fp8-g64", "mxfp4", "nvfp4", *FORMATS,
)  # fmt: skip
# a last unit, a last group and a last block that are not whole
SHAPE = (70, 203)
ROWS = torch.tensor([0, 69, 31, 32, 5, 5, 64])


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    native.load()


def stored_weight(layout: QuantizedLayout, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Levels, scales and zero points of any value that the layout holds."""
    outputs, columns = shape
    if (own := layout.blocks) is not None:
        rows = torch.randint(0, 256, (outputs, own.row_bytes(columns)), dtype=torch.uint8)
        levels, headers = own.parts(rows)
        count = 4 if own.has_minimum else 2
        halves = torch.randn(outputs, columns // own.columns, 2).half().view(torch.uint8)
        headers = torch.cat([halves[..., :count], headers[..., count:]], 2)
        return pack(levels, headers, None, layout)
    groups = layout.num_groups(columns)
    levels = torch.randint(0, 1 << layout.bits, shape).to(torch.uint8)
    if layout.kind == "fp8":
        levels[levels & 127 == 127] = 0
    scales = torch.randn(outputs, groups)
    if layout.kind == "mxfp4":
        scales = torch.randint(-126, 127, (outputs, groups)).float().exp2()
        scales[::5] = 0
    if layout.kind == "nvfp4":
        codes = torch.randint(0, 127, (outputs, groups)).to(torch.uint8)
        scales = torch.cat([scales[:, :1], codes.view(torch.float8_e4m3fn).float()], 1)
    zeros = torch.randint(0, 257, (outputs, groups)) if layout.has_zeros else None
    return pack(levels, scales, zeros, layout)


def same_bits(found: Tensor, want: Tensor) -> bool:
    return torch.equal(found.view(torch.int32), want.contiguous().view(torch.int32))


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_those_of_the_decoded_weight(name: str) -> None:
    layout = QuantizedLayout.named(name)
    # of blocks a last one beyond 256 columns, where they are of 32
    columns = {0: SHAPE[1], 32: 288, 256: 512}[layout.blocks.columns if layout.blocks else 0]
    shape = SHAPE[0], columns
    stored = stored_weight(layout, shape)
    want = dequantize(stored, shape, layout)
    assert same_bits(decode_rows(stored, ROWS, shape, layout), want[ROWS])
    for operators in (torch.ops.specc, torch.ops.specc_cpu):
        found = operators.embedding_q(stored, ROWS, *shape, name)
        assert same_bits(found, want[ROWS]), operators
        assert operators.embedding_q(stored, ROWS[:0], *shape, name).shape == (0, columns)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_all_threads(threads: int) -> None:
    """As many as are shared out."""
    layout, shape = QuantizedLayout(8), (64, 1024)
    stored, rows = stored_weight(layout, shape), torch.randint(0, 64, (301,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = torch.ops.specc_cpu.embedding_q(stored, rows, *shape, "int8")
    finally:
        torch.set_num_threads(before)
    assert same_bits(found, dequantize(stored, shape, layout)[rows])


@pytest.mark.parametrize("row", [-1, SHAPE[0], SHAPE[0] + 1, 2**62])
def test_rows_that_the_weight_has_not(row: int) -> None:
    """Those of the last block's padding, too."""
    stored, rows = stored_weight(QuantizedLayout(8)), torch.tensor([0, row])
    with pytest.raises(IndexError, match="of 70"):
        torch.ops.specc.embedding_q(stored, rows, *SHAPE, "int8")
    with pytest.raises(RuntimeError, match="outside of the embedding"):
        torch.ops.specc_cpu.embedding_q(stored, rows, *SHAPE, "int8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "int5"}, "no layout"),
        ({"layout": "int8-zeros-g32"}, "no layout"),
        ({"layout": "int8-g48"}, "no kernel"),
        ({"layout": "int8-g-1"}, "no kernel"),
        ({"layout": "int8-g99999999999999999999"}, "no layout"),
        ({"layout": "int4-g32"}, "the blocks are those"),
        ({"width": 204 + 4}, "the blocks are those"),
        ({"width": -1}, "0 or more"),
        ({"num_embeddings": 97}, "the blocks are those"),
        ({"num_embeddings": 2**63 - 1}, "the blocks are those"),
        ({"weight": torch.zeros(3, 12, 4, dtype=torch.uint8)}, "is uint8"),
        ({"tokens": torch.zeros(2, dtype=torch.int32)}, "int64"),
    ],
    ids=str,
)
def test_calls_that_are_refused(changes: dict, message: str) -> None:
    given = {
        "weight": stored_weight(QuantizedLayout(8)), "tokens": ROWS, "num_embeddings": SHAPE[0],
        "width": SHAPE[1], "layout": "int8",
    }  # fmt: skip
    assert torch.ops.specc_cpu.embedding_q(**given).shape == (len(ROWS), SHAPE[1])
    with pytest.raises(RuntimeError, match=message):
        torch.ops.specc_cpu.embedding_q(**given | changes)
