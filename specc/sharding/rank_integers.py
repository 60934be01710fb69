"""The integers of a whole quantized weight, read from the blocks of the ranks that hold its parts.

Blocks of a rank are of its own rows and columns: levels and scales are taken out of them, and put
side by side. Groups of columns are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout, unpack
from specc.artifact.safetensors_io import TensorReader
from specc.artifact.weight_layout import BLOCK
from specc.sharding.shard_plan import (
    Cut,
    Interval,
    Run,
    WeightCut,
    local_size,
    runs_of,
    within,
)


@dataclass(frozen=True)
class RankIntegers(DecodedWeight):
    """A quantized weight of an engine, as a weight [rows, K] of a checkpoint.

    Its shape counts the rows of all matrices of a stack. Columns are in the order in which files
    hold them, group after group.

    Args:
        whole: shape of the weight, [..., N, K].
        held: how files hold it.
        files: of each rank; one, where the weight is not cut.
        cut: of the weight, or None.
    """

    whole: tuple[int, ...]
    held: QuantizedLayout
    files: Sequence[TensorReader] = field(compare=False)
    cut: WeightCut | None = None

    @classmethod
    def of(
        cls,
        key: str,
        whole: tuple[int, ...],
        held: QuantizedLayout,
        files: Sequence[TensorReader],
        cut: WeightCut | None,
    ) -> RankIntegers:
        """See the class; `key` is the name in the files."""
        shape = math.prod(whole[:-1]), whole[-1]
        return cls(key, shape, (key,), held.name, whole, held, files, cut)

    @property
    def layout(self) -> QuantizedLayout:
        return self.held

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        return self.integers(reader, start, stop).values(self.held)

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        outputs, found = self.whole[-2], []
        for matrix in range(start // outputs, -(-stop // outputs)):
            first = max(start - matrix * outputs, 0), min(stop - matrix * outputs, outputs)
            for rows in within(self._runs(-2), first):
                found.append(self._rows(matrix, rows))
        return Integers.joined(found)

    def _rows(self, matrix: int, rows: Run) -> Integers:
        """Rows that one rank has, or parts of which all ranks have: all columns."""
        parts = [self._part(matrix, rows, columns) for columns in self._runs(-1)]
        return Integers.beside(parts, self.held)

    def _part(self, matrix: int, rows: Run, columns: Run) -> Integers:
        # a weight is cut along one dimension: the other one says nothing of the rank
        file = self.files[max(rows.rank, columns.rank)]
        outputs, width = (local_size(self._cut(dim)) for dim in (-2, -1))
        last = rows.local + rows.stop - rows.start
        base = matrix * -(-outputs // BLOCK)
        unit = self.held.rows_together
        first, stop = rows.local // unit * unit, -(-last // unit) * unit
        blocks = first // BLOCK, stop // BLOCK
        chunks = file.read_chunks(self.name, rows=(base + blocks[0], base + blocks[1]))
        data = bytearray().join(bytes(chunk) for chunk in chunks)
        count = blocks[1] - blocks[0]
        stored = torch.frombuffer(data, dtype=torch.uint8).view(count, -1)
        levels, scales, zeros = unpack(stored, (count * BLOCK, width), self.held)
        found = Integers(levels, scales, zeros if self.held.has_zeros else None)
        own = found.rows(rows.local - first, last - first)
        asked = columns.local, columns.local + columns.stop - columns.start
        return own.columns((asked,), self.held)

    def _cut(self, dim: int) -> Cut:
        if self.cut is None:
            return (Interval(0, self.whole[dim]),)
        return self.cut.cuts[dim]

    def _runs(self, dim: int) -> Iterable[Run]:
        return runs_of(self._cut(dim), self.whole[dim])
