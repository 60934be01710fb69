"""Rows of a quantized weight, decoded one by one: what an embedding looks up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.weight_layout import BLOCK

# rows whose blocks are decoded together
_AT_A_TIME = 64


def decode_rows(
    stored: Tensor, rows: Tensor, shape: Sequence[int], layout: QuantizedLayout
) -> Tensor:
    """These rows of the weight that blocks stand for, with the bits of `dequantize`.

    Row r is lane r % 32 of block r // 32 in every layout, so that no more is read than the blocks
    of these rows.

    Args:
        stored: uint8 [blocks, bytes of a block].
        rows: [T] int64, each in 0 … N - 1.
        shape: [N, K].
    Returns:
        [T, K] float32.
    Raises:
        IndexError: a row that the weight has not.
    """
    outputs, columns = shape
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < outputs:
        raise IndexError(f"rows {int(rows.min())} … {int(rows.max())} of {outputs}")
    found = [torch.empty(0, columns)]
    for part in rows.split(_AT_A_TIME) if rows.numel() else ():
        blocks = stored.index_select(0, part // BLOCK)
        values = dequantize(blocks, (len(part) * BLOCK, columns), layout)
        found.append(values.view(-1, BLOCK, columns)[torch.arange(len(part)), part % BLOCK])
    return torch.cat(found)
