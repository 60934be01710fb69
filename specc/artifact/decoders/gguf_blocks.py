"""Blocks of GGUF files by the names of their types."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.block_formats import FORMATS, MXFP4, BlockFormat
from specc.artifact.decoders.gguf_grids import COLUMNS, GRIDS
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout

_OF_GRIDS = {8: QuantizedLayout(8, 32), 4: QuantizedLayout(4, 128)}


def format_of(name: str) -> BlockFormat | None:
    """The format of this type, which has one unless it is of points of grids, or ternary."""
    return MXFP4 if name == "MXFP4" else FORMATS.get(name.lower())


def block_size(name: str) -> tuple[int, int]:
    """Columns and bytes of a block."""
    own = format_of(name)
    return (COLUMNS, GRIDS[name].block_bytes) if own is None else (own.columns, own.block_bytes)


def values_of(name: str, rows: Tensor) -> Tensor:
    """[n, K] float32 of rows [n, bytes] uint8."""
    own = format_of(name)
    if own is not None:
        return own.numbers(*own.parts(rows))
    grid = GRIDS[name]
    return grid.values(rows.reshape(-1, grid.block_bytes)).view(len(rows), -1)


def layout_of(name: str) -> QuantizedLayout | None:
    """The layout of `integers_of`; None where none of them holds these numbers exactly."""
    if name in GRIDS:
        return _OF_GRIDS.get(GRIDS[name].bits)
    return QuantizedLayout.named(name.lower())


def integers_of(name: str, rows: Tensor) -> Integers:
    """Rows [n, bytes] as `layout_of` has them.

    Scales of MXFP4 are those of e2m1's own numbers.
    """
    own = format_of(name)
    if own is not None:
        levels, headers = own.parts(rows)
        if own is not MXFP4:
            return Integers(levels, headers)
        return Integers(levels, 2 * own.factors(headers)[0])
    grid, layout = GRIDS[name], layout_of(name)
    assert layout is not None
    steps, scales = grid.parts(rows.reshape(-1, grid.block_bytes))
    scales = scales.repeat_interleave(grid.group // layout.group, 1)
    steps, scales = steps.reshape(len(rows), -1), scales.reshape(len(rows), -1)
    return Integers((steps + layout.middle).to(torch.uint8), scales)
