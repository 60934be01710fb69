"""Weights of all stages of an engine as those of one file: each is read from the first that has it.

What two stages read, as a table that is both embedding and head, is in the files of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import ModelEntry
from specc.artifact.safetensors_io import CHUNK_BYTES, Buffer
from specc.artifact.tensor_part import TensorPart
from specc.errors import EngineError
from specc.sharding.rank_reader import RankReader
from specc.sharding.shard_plan import WeightCut
from specc.system.json_file import read_json


def open_weights(
    engine: Path,
    manifest: Manifest,
    entry: ModelEntry,
    cuts: Mapping[str, WeightCut],
    blocks: Mapping[str, tuple[int, ...]],
) -> RankReader | StageReader:
    """The whole weights of a model of an engine.

    Args:
        engine: the directory.
        manifest: of the engine.
        entry: of the model.
        cuts: see `RankReader`.
        blocks: see `RankReader`.
    Raises:
        EngineError: a file that is missing, malformed, or not what the cut says.
    """
    names = [manifest.weights_file(entry, rank) for rank in range(manifest.num_ranks)]
    files = [engine / name for name in dict.fromkeys(names)]
    if not manifest.stages or entry is not manifest.models[0]:
        return RankReader(files, cuts, blocks)
    readers, size = list[RankReader](), manifest.tensor_parallel_size
    try:
        for number, stage in enumerate(manifest.stages):
            path = engine / entry.stage(number, stage.layers).program_file
            needed, do = "the program of a stage", "compile or copy the engine again"
            program = read_json(path, EngineError, needed, do)
            own = {item["key"] for item in program["inputs"] if "key" in item}
            readers.append(
                RankReader(
                    files[number * size : (number + 1) * size],
                    {key: cut for key, cut in cuts.items() if key in own},
                    {key: shape for key, shape in blocks.items() if key in own},
                )
            )
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return StageReader(readers)


class StageReader:
    """A `TensorReader` over the stages of a model.

    Args:
        stages: reader of each, which this one closes.
    """

    def __init__(self, stages: Sequence[RankReader]) -> None:
        self._stages = stages
        self._of_key = {key: stage for stage in reversed(stages) for key in stage.keys()}  # noqa: SIM118

    def close(self) -> None:
        for stage in self._stages:
            stage.close()

    def keys(self) -> Iterable[str]:
        return self._of_key.keys()

    def dtype(self, key: str) -> torch.dtype:
        return self._stage(key).dtype(key)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._stage(key).shape(key)

    def location(self, key: str | None = None) -> str:
        return self._stage(key).location(key)

    def tensor(self, key: str) -> Tensor:
        """See `RankReader.tensor`."""
        return self._stage(key).tensor(key)

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        """See `TensorReader`."""
        return self._stage(key).read_chunks(key, chunk_bytes, rows, transpose)

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        """See `TensorReader`."""
        return self._stage(key).read_part(key, part, transpose, chunk_bytes)

    def _stage(self, key: str | None) -> RankReader:
        # what no stage has is missed by the first one, in its words
        return self._of_key.get(key or "", self._stages[0])
