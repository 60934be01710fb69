"""A tensor-parallel cut as data: intervals of dimensions, a rank's piece of each, collectives.

A dimension is cut by intervals: the rows of a fused `[q | k | v]` are three, and each rank holds a
piece of every one. The plan says nothing about how it was found; `specc inspect --sharding` shows
it, `weight_pieces.py` cuts weights by it, and `rank_reader.py` reads whole ones again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.tensor_part import Range
from specc.errors import EngineError
from specc.system.json_file import read_engine_json

FIRST_ROW, OWN_ROWS, PADDING = "first_row", "own_rows", "padding"
ALL_REDUCE = "all_reduce"


@dataclass(frozen=True)
class Interval:
    """A run of a dimension that is cut as a whole, or not at all.

    Args:
        start: first index.
        stop: index after the last one; more than the dimension has where its end is padded.
        parts: pieces of equal size; 1 is whole on every rank.
        copies: neighbouring ranks that hold the same piece: key and value heads that are fewer
            than ranks. parts * copies is the number of ranks where parts is more than 1.
    """

    start: int
    stop: int
    parts: int = 1
    copies: int = 1

    @property
    def local_size(self) -> int:
        """Of a rank's piece."""
        return (self.stop - self.start) // self.parts

    def piece(self, rank: int) -> tuple[int, int]:
        """First index of a rank's piece, and the one after its last."""
        if self.parts == 1:
            return self.start, self.stop
        first = self.start + rank // self.copies * self.local_size
        return first, first + self.local_size


Cut = tuple[Interval, ...]


def pieces_of(cut: Cut, rank: int) -> list[Range]:
    """Indices of a dimension that a rank holds, those that follow each other as one range."""
    return joined([interval.piece(rank) for interval in cut])


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, those that meet as one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def local_size(cut: Cut) -> int:
    """Of a rank's part of a dimension."""
    return sum(interval.local_size for interval in cut)


def local_offset(cut: Cut, index: int) -> int:
    """Where an index between two intervals of a dimension is in a rank's part of it."""
    offset = 0
    for interval in cut:
        if interval.stop <= index:
            offset += interval.local_size
    return offset


@dataclass(frozen=True)
class Run:
    """Indices start … stop - 1 of a whole dimension, which a rank has from `local` on."""

    start: int
    stop: int
    rank: int
    local: int

    def within(self, first: int, last: int) -> Run | None:
        """What lies between two indices."""
        start, stop = max(self.start, first), min(self.stop, last)
        if start >= stop:
            return None
        return Run(start, stop, self.rank, self.local + start - self.start)


def runs_of(cut: Cut, size: int) -> list[Run]:
    """Which rank holds which indices of a dimension of this size, without what pads it."""
    found, offset = [], 0
    for interval in cut:
        for part in range(interval.parts):
            rank = part * interval.copies
            first, last = interval.piece(rank)
            if first < size:
                found.append(Run(first, min(last, size), rank, offset))
        offset += interval.local_size
    return found


def within(runs: Iterable[Run], ask: Range) -> Iterator[Run]:
    """What of some runs lies in a range, in order."""
    for run in runs:
        if (taken := run.within(*ask)) is not None:
            yield taken


@dataclass(frozen=True)
class WeightCut:
    """What ranks hold of a weight.

    Args:
        key: name in the engine's weight files.
        dtype: of torch, such as `float32`.
        shape: of the whole weight.
        cuts: intervals of each dimension.
        is_first_only: added to a sum over ranks, so that only rank 0 holds its values; the others
            hold zeros.
        layout: name of the layout of its integers, where it is quantized: each rank's file has its
            part [..., N, K] in blocks of its own.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    is_first_only: bool = False
    layout: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names in the model of what it is the concatenation of."""
        return tuple(self.key.removesuffix(f":{self.layout}").split("+"))

    @property
    def is_cut(self) -> bool:
        return any(interval.parts > 1 for cut in self.cuts for interval in cut)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(local_size(cut) for cut in self.cuts)

    def held_by(self, rank: int) -> tuple[list[Range], ...] | None:
        """Indices of each dimension that a rank has the values of; None is zeros alone."""
        if rank and self.is_first_only:
            return None
        return tuple(pieces_of(cut, rank) for cut in self.cuts)

    @property
    def local_bytes(self) -> int:
        return self._bytes(self.local_shape)

    @property
    def whole_bytes(self) -> int:
        return self._bytes(self.shape)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        if self.layout is not None:
            shape = QuantizedLayout.named(self.layout).stored_shape(shape)
        return math.prod(shape) * getattr(torch, self.dtype).itemsize

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole weight, zeros where it is padded; of values, not of blocks."""
        if self.is_first_only and rank:
            return whole.new_zeros(self.local_shape)
        for dim, cut in enumerate(self.cuts):
            if missing := cut[-1].stop - whole.shape[dim]:
                shape = (*whole.shape[:dim], missing, *whole.shape[dim + 1 :])
                whole = torch.cat((whole, whole.new_zeros(shape)), dim)
            pieces = [interval.piece(rank) for interval in cut]
            whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in pieces], dim)
        return whole


@dataclass(frozen=True)
class RankConstant:
    """A small input whose values follow from the rank.

    Args:
        name: of the input.
        kind: `first_row`: [1] int64, the first row of a table that the rank holds, or the first
            column of a product's operand. `own_rows`: [rows] int64, all that it reads of what is
            whole everywhere. `padding`: [rows], 0 for columns of logits that there are, -inf for
            those after the last one.
        rows: that each rank holds.
        total: that there are.
        dtype: of the input.
        cut: of `own_rows`, which they are, where they do not follow each other.
    """

    name: str
    kind: str
    rows: int
    total: int
    dtype: str = "int64"
    cut: Cut = ()

    def value(self, rank: int) -> Tensor:
        first = rank * self.rows
        if self.kind == FIRST_ROW:
            return torch.tensor([first])
        if self.kind == OWN_ROWS and self.cut:
            return torch.cat([torch.arange(*piece) for piece in pieces_of(self.cut, rank)])
        if self.kind == OWN_ROWS:
            return torch.arange(first, first + self.rows)
        value = torch.zeros(self.rows, dtype=getattr(torch, self.dtype))
        value[max(0, self.total - first) :] = -torch.inf
        return value


@dataclass(frozen=True)
class Collective:
    """A meeting of all ranks in each pass.

    Args:
        node: in the graph.
        kind: `all_reduce`.
        after: the node whose values are summed.
        layer: calls of layers that attend or keep states before it.
        bytes_per_token: of the values of one token.
    """

    node: str
    kind: str
    after: str
    layer: int
    bytes_per_token: int

    @classmethod
    def of_sum(cls, node: str, after: str, layer: int, value: Tensor) -> Collective:
        """The sum of a value [..., tokens, ...]; sizes that are symbols count tokens."""
        size = value.dtype.itemsize
        for item in value.shape:
            size *= item if isinstance(item, int) else 1
        return cls(node, ALL_REDUCE, after, layer, size)


@dataclass(frozen=True)
class ShardPlan:
    """How one model is cut.

    Args:
        num_ranks: of the tensor-parallel group.
        weights: of the graph, in the order of its inputs, each once.
        collectives: in the order of execution.
        constants: inputs that differ from rank to rank.
        vocab_size: columns of the whole logits.
        local_vocab_size: columns of a rank's; equal to `vocab_size` where they are not cut.
    """

    num_ranks: int
    weights: tuple[WeightCut, ...]
    collectives: tuple[Collective, ...]
    constants: tuple[RankConstant, ...]
    vocab_size: int
    local_vocab_size: int

    @property
    def cuts_vocabulary(self) -> bool:
        return self.local_vocab_size != self.vocab_size

    @property
    def local_bytes(self) -> int:
        """Of a rank's weights; the same for every rank."""
        return sum(weight.local_bytes for weight in self.weights)

    @property
    def whole_bytes(self) -> int:
        return sum(weight.whole_bytes for weight in self.weights)

    @property
    def bytes_per_token(self) -> int:
        """Of all sums of a pass."""
        return sum(item.bytes_per_token for item in self.collectives)

    @property
    def by_key(self) -> dict[str, WeightCut]:
        return {weight.key: weight for weight in self.weights}

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for item in data["constants"]:
            if not item["cut"]:
                # most plans have none
                del item["cut"]
        return data

    @classmethod
    def read(cls, path: Path) -> ShardPlan:
        """The plan in a file of an engine.

        Raises:
            EngineError: it cannot be read, or is malformed.
        """
        needed, do = "the plan of a cut model", "compile or copy the engine again"
        data = read_engine_json(path, needed, do)
        try:
            return cls.from_json(data)
        except (KeyError, TypeError) as error:
            raise EngineError(f"{path}: {error}", needed, do) from error

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardPlan:
        """Raises KeyError, TypeError: it is no plan."""
        weights = tuple(
            WeightCut(
                item["key"],
                item["dtype"],
                tuple(item["shape"]),
                tuple(tuple(Interval(**part) for part in cut) for cut in item["cuts"]),
                item["is_first_only"],
                item.get("layout"),
            )
            for item in data["weights"]
        )
        return cls(
            data["num_ranks"],
            weights,
            tuple(Collective(**item) for item in data["collectives"]),
            tuple(
                RankConstant(**item | {"cut": tuple(Interval(**x) for x in item.get("cut", ()))})
                for item in data["constants"]
            ),
            data["vocab_size"],
            data["local_vocab_size"],
        )
