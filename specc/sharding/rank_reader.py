"""Whole weights, read from the files of the ranks and stages that hold parts of them.

A part of a weight is read from the ranks that hold it, and of those that hold copies from the first
one: every byte that is asked for is read once, but for borders of blocks, and none is held longer
than a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.forwarding_reader import ForwardingReader
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import (
    CHUNK_BYTES,
    Buffer,
    SafetensorsReader,
    TensorReader,
    tensor_bytes,
)
from specc.artifact.tensor_part import Range, TensorPart, new_buffer
from specc.artifact.weight_layout import BLOCK, blocks_shape
from specc.errors import EngineError, WeightError
from specc.sharding.rank_integers import RankIntegers
from specc.sharding.shard_plan import Run, WeightCut, runs_of, within


class RankReader:
    """The weights of a model of an engine as a `TensorReader`, whole, whatever the engine's cut.

    Args:
        files: weight file of each rank; one, where the model is not cut.
        cuts: key → how it is cut; what it does not name is whole in the first file.
        in_blocks: key → shape of a rank's part, of weights that the files hold in blocks; see
            `specc.artifact.weight_layout`.
        quantized: key → shape of the whole weight and how files hold its integers, of those that
            are not cut; of the others their cuts say so.
    Raises:
        ModelNotFoundError: a file is missing.
        WeightError: a header is malformed, or a file is truncated.
        EngineError: a file holds other tensors than the cut says.
    """

    def __init__(
        self,
        files: Sequence[Path],
        cuts: Mapping[str, WeightCut],
        in_blocks: Mapping[str, tuple[int, ...]],
        quantized: Mapping[str, tuple[tuple[int, ...], QuantizedLayout]] | None = None,
    ) -> None:
        self._files, self._cuts, self._in_blocks = files, cuts, in_blocks
        self._readers: list[SafetensorsReader] = []
        self._quantized = dict(quantized or {})
        for key, cut in cuts.items():
            if cut.layout is not None:
                self._quantized[key] = cut.shape, QuantizedLayout.named(cut.layout)
        try:
            for file in files:
                self._readers.append(SafetensorsReader(file))
            self._check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def keys(self) -> Iterable[str]:
        return self._readers[0].keys()

    @property
    def stored(self) -> RankReader:
        return self

    def decoded(self, key: str) -> DecodedWeight | None:
        """The integers of a quantized weight; None of one that is held in floats."""
        if key not in self._quantized:
            return None
        return RankIntegers.of(key, *self._quantized[key], self._readers, self._cuts.get(key))

    def dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self._quantized else self._readers[0].dtype(key)

    def shape(self, key: str) -> tuple[int, ...]:
        if key in self._quantized:
            return self._quantized[key][0]
        if key in self._cuts:
            return self._cuts[key].shape
        return self._in_blocks.get(key) or self._readers[0].shape(key)

    def location(self, key: str | None = None) -> str:
        return str(self._files[0].parent if key is None else self._files[0])

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, in memory: for small ones.

        Raises:
            WeightError: there is none of this name.
        """
        values = torch.empty(self.shape(key), dtype=self.dtype(key))
        flat, done = memoryview(tensor_bytes(values)), 0
        for chunk in self.read_chunks(key):
            flat[done : done + len(chunk)] = chunk
            done += len(chunk)
        return values

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        """See `TensorReader`; weights of engines are not transposed."""
        part = TensorPart.of_rows(self.shape(key), rows)
        yield from self.read_part(key, part, transpose, chunk_bytes)

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        """See `TensorReader`; weights of engines are not transposed."""
        if transpose or key in self._quantized:
            raise ValueError(f"{key}, transposed, or not as the integers that it is")
        dtype = self.dtype(key)
        columns = [run for ask in part.columns for run in within(self._columns(key), ask)]
        step = max(1, chunk_bytes // max(1, part.num_columns * dtype.itemsize))
        for vectors in self._vector_runs(key, part.vectors, step):
            count = vectors.stop - vectors.start
            size = count * part.num_columns * dtype.itemsize
            if not size:
                continue
            buffer = new_buffer(size)
            values = torch.frombuffer(buffer, dtype=dtype).view(count, part.num_columns)
            done = 0
            for run in columns:
                width = run.stop - run.start
                # a weight is cut along one dimension: the other one says nothing of the rank
                rank = max(run.rank, vectors.rank)
                rows, own = (vectors.local, vectors.local + count), (run.local, run.local + width)
                values[:, done : done + width] = self._rectangle(rank, key, rows, own)
                done += width
            yield buffer

    def _columns(self, key: str) -> list[Run]:
        shape = self.shape(key)
        if key not in self._cuts or not shape:
            return [Run(0, shape[-1] if shape else 1, 0, 0)]
        return runs_of(self._cuts[key].cuts[-1], shape[-1])

    def _vector_runs(self, key: str, asked: Iterable[Range], step: int) -> Iterator[Run]:
        """What one read takes of each: at most so many vectors of one rank, whole blocks if any."""
        for ask in asked:
            for run in within(self._vectors(key, ask), ask):
                first = run.start
                while first < run.stop:
                    local = run.local + first - run.start
                    count = step
                    if key in self._in_blocks:
                        # so that no block is read by two of them, each of one matrix
                        outputs = self._in_blocks[key][-2]
                        count = max(BLOCK, step // BLOCK * BLOCK) - local % outputs % BLOCK
                        count = min(count, outputs - local % outputs)
                    last = min(first + count, run.stop)
                    yield Run(first, last, run.rank, local)
                    first = last

    def _vectors(self, key: str, ask: Range) -> Iterator[Run]:
        """Which rank has which vectors, along all dimensions but the last; from around `ask` on."""
        shape = self.shape(key)
        cuts = self._cuts[key].cuts[:-1] if key in self._cuts else ()
        dim = next((d for d, cut in enumerate(cuts) if any(x.parts > 1 for x in cut)), None)
        if dim is None:
            yield Run(0, math.prod(shape[:-1]), 0, 0)
            return
        inner = math.prod(shape[dim + 1 : -1])
        whole = shape[dim] * inner
        own = sum(interval.local_size for interval in cuts[dim]) * inner
        runs = runs_of(cuts[dim], shape[dim])
        for outer in range(ask[0] // whole, -(-ask[1] // whole)):
            for run in runs:
                yield Run(
                    outer * whole + run.start * inner,
                    outer * whole + run.stop * inner,
                    run.rank,
                    outer * own + run.local * inner,
                )

    def _rectangle(self, rank: int, key: str, rows: Range, columns: Range) -> Tensor:
        """Vectors and columns of a rank's part; [rows, columns]. What is in blocks: of a matrix."""
        width = columns[1] - columns[0]
        if key not in self._in_blocks:
            return self._read(rank, key, [rows], columns).view(rows[1] - rows[0], width)
        _, units, _, unit = self._readers[rank].shape(key)
        outputs, count = self._in_blocks[key][-2], rows[1] - rows[0]
        matrix, top = divmod(rows[0], outputs)
        before = matrix * -(-outputs // BLOCK)
        blocks = range(before + top // BLOCK, before + -(-(top + count) // BLOCK))
        first, last = columns[0] // unit, -(-columns[1] // unit)
        vectors = [((b * units + first) * BLOCK, (b * units + last) * BLOCK) for b in blocks]
        values = self._read(rank, key, vectors, (0, unit))
        values = values.view(len(blocks), last - first, BLOCK, unit).transpose(1, 2)
        values = values.reshape(len(blocks) * BLOCK, (last - first) * unit)
        top, left = top % BLOCK, columns[0] - first * unit
        return values[top : top + count, left : left + width]

    def _read(self, rank: int, key: str, vectors: Sequence[Range], columns: Range) -> Tensor:
        """Vectors and columns as a rank's file has them, one after the other."""
        part, dtype = TensorPart(tuple(vectors), (columns,)), self.dtype(key)
        buffer = new_buffer(part.num_vectors * part.num_columns * dtype.itemsize)
        done = 0
        for chunk in self._readers[rank].read_part(key, part):
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)
        return torch.frombuffer(buffer, dtype=dtype)

    def _check(self) -> None:
        """Compare what files hold with the cut, so that no byte is taken for another one."""
        for file, reader in zip(self._files, self._readers, strict=True):
            missing = next((key for key in self._cuts if key not in set(reader.keys())), None)
            if missing is not None:
                raise _other_file(file, f"no {missing}", f"a part of {missing}")
            for key, cut in self._cuts.items():
                dtype = getattr(torch, cut.dtype)
                wanted: tuple[int, ...] = cut.local_shape
                if cut.layout is not None:
                    wanted = QuantizedLayout.named(cut.layout).stored_shape(wanted)
                elif key in self._in_blocks:
                    wanted = blocks_shape(wanted, dtype)
                found = reader.dtype(key), reader.shape(key)
                if found != (dtype, wanted):
                    raise _other_file(
                        file,
                        f"{key} as {found[0]} {list(found[1])}",
                        f"{dtype} {list(wanted)}",
                    )


def _other_file(file: Path, found: str, needed: str) -> EngineError:
    return EngineError(
        f"{file} with {found}",
        f"{needed}, as the plan of the cut says",
        "compile or copy the engine again",
    )


class StagesReader(ForwardingReader):
    """The weights of a model of an engine as a `TensorReader`, of all of its stages.

    A weight that two stages read is in the files of both, and is taken from the first one. Weights
    of engines are not transposed.

    Args:
        stages: what reads the files of each; they belong to this one.
    """

    def __init__(self, stages: Sequence[RankReader]) -> None:
        self._stages = list(stages)
        self._by_key: dict[str, RankReader] = {}
        for stage in self._stages:
            self._by_key = dict.fromkeys(stage.keys(), stage) | self._by_key

    def close(self) -> None:
        for stage in self._stages:
            stage.close()

    def keys(self) -> Iterable[str]:
        return self._by_key.keys()

    @property
    def stored(self) -> StagesReader:
        return self

    def decoded(self, key: str) -> DecodedWeight | None:
        """The integers of a quantized weight; None of one that is held in floats."""
        return self._of(key).decoded(key)

    def location(self, key: str | None = None) -> str:
        return (self._stages[0] if key is None else self._of(key)).location(key)

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, in memory: for small ones.

        Raises:
            WeightError: there is none of this name.
        """
        return self._of(key).tensor(key)

    def source_of(self, key: str) -> tuple[TensorReader, str]:
        return self._of(key), key

    def _of(self, key: str) -> RankReader:
        if (found := self._by_key.get(key)) is None:
            raise WeightError(
                f"{self._stages[0].location()}: no stage has {key}",
                "every weight in the files of a stage",
                "compile or copy the engine again",
            )
        return found
