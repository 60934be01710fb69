"""Blocks of GGUF files by the names of their types."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.block_formats import FORMATS, MXFP4, BlockFormat
from specc.artifact.decoders.gguf_grids import COLUMNS, GRIDS
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout

_INT8 = QuantizedLayout(8, 32)
_OF_GRIDS = {8: _INT8, 4: QuantizedLayout(4, 128)}
_MXFP4 = QuantizedLayout.named("mxfp4")


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
    own = format_of(name)
    assert own is not None
    if own is MXFP4:
        return _MXFP4
    if own.has_minimum or own.group != _INT8.group:
        return None
    return QuantizedLayout(4, own.group) if name == "Q4_0" else _INT8


def integers_of(name: str, rows: Tensor) -> Integers:
    """Rows [n, bytes] as groups of integers with scales in float32, or, of MXFP4, as it has them.

    Scales of MXFP4 are those of e2m1's own numbers.
    """
    layout = layout_of(name)
    assert layout is not None
    if name in GRIDS:
        grid = GRIDS[name]
        steps, scales = grid.parts(rows.reshape(-1, grid.block_bytes))
        scales = scales.repeat_interleave(grid.group // layout.group, 1)
    else:
        own = format_of(name)
        assert own is not None
        levels, headers = own.parts(rows)
        scales, _ = own.factors(headers)
        if own is MXFP4:
            return Integers(levels, 2 * scales)
        steps = own.steps(levels)
    steps, scales = steps.reshape(len(rows), -1), scales.reshape(len(rows), -1)
    return Integers((steps + layout.middle).to(torch.uint8), scales)
