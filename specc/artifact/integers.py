"""Rows of quantized weights between their source and an engine's blocks: rounded, read, or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specc.artifact.tensor_part import Range

if TYPE_CHECKING:
    from specc.artifact.quantized_layout import QuantizedLayout


@dataclass(frozen=True)
class Integers:
    """Rows of a weight (u - z) · s, or v · s of numbers v of 8 or 4 bits.

    Args:
        levels: [n, K] uint8, the integers u, or the bits of v.
        scales: [n, G] float32, one for each row and group of columns; of nvfp4 [n, 1 + G], after a
            factor of the row; of ggml's blocks their headers, [n, blocks, bytes] uint8.
        zeros: [n, G] int16, the zero points z; None is the middle of the range, 8 or 128.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def rows(self, start: int, stop: int) -> Integers:
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return Integers(self.levels[start:stop], self.scales[start:stop], zeros)

    def columns(self, ranges: Sequence[Range], layout: QuantizedLayout) -> Integers:
        """Columns, one range after the other.

        Args:
            ranges: whole groups, or blocks, but for the last one, which may end with the row.
        """
        levels = torch.cat([self.levels[:, start:stop] for start, stop in ranges], 1)
        if not (group := layout.apart):
            return Integers(levels, self.scales, self.zeros)
        groups = [(start // group, -(-stop // group)) for start, stop in ranges]
        front, rest = self.scales.tensor_split([int(layout.has_factors)], 1)
        scales = torch.cat([front, *(rest[:, a:b] for a, b in groups)], 1)
        if self.zeros is None:
            return Integers(levels, scales)
        return Integers(levels, scales, torch.cat([self.zeros[:, a:b] for a, b in groups], 1))

    def values(self, layout: QuantizedLayout) -> Tensor:
        """[n, K] float32, what they stand for."""
        return layout.numbers(self.levels, self.scales, self.zeros)

    @classmethod
    def joined(cls, items: Sequence[Integers]) -> Integers:
        """Rows of one after those of the other."""
        zeros = [item.zeros for item in items if item.zeros is not None]
        return cls(
            torch.cat([item.levels for item in items]),
            torch.cat([item.scales for item in items]),
            torch.cat(zeros) if zeros else None,
        )

    @classmethod
    def beside(cls, parts: Sequence[Integers], layout: QuantizedLayout) -> Integers:
        """Columns of one after those of the other, of the same rows."""
        levels, first = torch.cat([part.levels for part in parts], 1), parts[0]
        if not layout.apart:
            # one scale for each row, which all parts have
            return cls(levels, first.scales, first.zeros)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        front = int(layout.has_factors)
        scales = [first.scales, *(part.scales[:, front:] for part in parts[1:])]
        return cls(levels, torch.cat(scales, 1), torch.cat(zeros, 1) if zeros else None)


def widened(item: Integers, layout: QuantizedLayout) -> Integers:
    """Rows of ggml's blocks as `QuantizedLayout.widened` has them: the same numbers."""
    own, wide = layout.blocks, layout.widened
    assert own is not None
    assert wide is not None
    scales, _ = own.factors(item.scales)
    return Integers((own.steps(item.levels) + wide.middle).to(torch.uint8), scales)
