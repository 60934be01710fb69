"""Whole weights out of the files of ranks: what is read is what slicing takes, each byte once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specc.artifact import safetensors_io
from specc.artifact.safetensors_io import tensor_bytes
from specc.artifact.tensor_part import TensorPart
from specc.artifact.weight_layout import to_blocks
from specc.errors import EngineError, ModelNotFoundError
from specc.sharding.rank_reader import RankReader
from specc.sharding.shard_plan import Interval, WeightCut

RANKS = 4
WHOLE_8, WHOLE_3 = (Interval(0, 8),), (Interval(0, 3),)
# q of 8 heads of 2 | k of 2 heads of 2, copied | what all ranks have
FUSED = (Interval(0, 16, 4), Interval(16, 20, 2, 2), Interval(20, 21))
PADDED = (Interval(0, 8, 4),)
CUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((21, 8), (FUSED, WHOLE_8)),
    "columns": ((8, 21), (WHOLE_8, FUSED)),
    "padded": ((7, 8), (PADDED, WHOLE_8)),
    "padded-columns": ((8, 5), (WHOLE_8, PADDED)),
    "padded-stack": ((3, 7, 8), (WHOLE_3, PADDED, WHOLE_8)),
    "experts": ((3, 21, 8), (WHOLE_3, FUSED, WHOLE_8)),
    # several blocks of each matrix, the last of which is not full
    "tall-experts": ((2, 168, 9), ((Interval(0, 2),), (Interval(0, 168, 4),), (Interval(0, 9),))),
    "whole-experts": ((2, 40, 8), ((Interval(0, 2),), (Interval(0, 40),), (Interval(0, 8, 4),))),
    "first": ((8, 3, 2), ((Interval(0, 8, 4),), WHOLE_3, (Interval(0, 2),))),
    "vector": ((21,), (FUSED,)),
    "bias": ((8,), (WHOLE_8,)),
    "norm": ((8, 3), (WHOLE_8, WHOLE_3)),
    "scalar": ((), ()),
    # several blocks of 32 rows, and parts that end inside of one
    "tall": ((200, 9), ((Interval(0, 160, 4), Interval(160, 200, 2, 2)), (Interval(0, 9),))),
    "wide": ((70, 44), ((Interval(0, 70),), (Interval(0, 40, 4), Interval(40, 44, 1)))),
}
MATRICES = ("rows", "columns", "padded", "padded-columns", "norm", "tall", "wide")
STACKS = ("padded-stack", "experts", "tall-experts", "whole-experts")


class Files:
    """Weights as they are, and the files of ranks that hold their parts."""

    def __init__(self, directory: Path, dtype: torch.dtype, in_blocks: tuple[str, ...]) -> None:
        self.whole: dict[str, Tensor] = {}
        self.cuts: dict[str, WeightCut] = {}
        blocks: dict[str, tuple[int, ...]] = {}
        own: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
        for number, (key, (shape, cuts)) in enumerate(CUTS.items()):
            values = torch.arange(torch.Size(shape).numel()).view(shape) + 1 + number
            self.whole[key] = values.to(dtype)
            name = str(dtype).removeprefix("torch.")
            self.cuts[key] = cut = WeightCut(key, name, shape, cuts, is_first_only=key == "bias")
            for rank in range(RANKS):
                part = cut.take(self.whole[key], rank).contiguous()
                own[rank][key] = to_blocks(part) if key in in_blocks else part
            if key in in_blocks:
                blocks[key] = cut.local_shape
        self.paths = [directory / f"rank-{rank}.safetensors" for rank in range(RANKS)]
        for path, tensors in zip(self.paths, own, strict=True):
            save_file(tensors, path)
        self.blocks = blocks

    def open(self) -> RankReader:
        return RankReader(self.paths, self.cuts, self.blocks)


KINDS = {
    "rows": (torch.float32, ()),
    "blocks": (torch.float32, (*MATRICES, *STACKS)),
    "pairs": (torch.bfloat16, (*MATRICES, *STACKS)),
}


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Files(tmp_path, *KINDS[request.param])


def ranges(chance: random.Random, size: int) -> tuple[tuple[int, int], ...]:
    """Some ranges of a dimension, in order."""
    ends = sorted(chance.choices(range(size + 1), k=4))
    taken = [(a, b) for a, b in (ends[:2], ends[2:]) if a < b]
    return tuple(taken) or ((0, size),)


def parts(seed: int, shape: tuple[int, ...]) -> Iterator[TensorPart]:
    chance = random.Random(seed)
    vectors, columns = torch.Size(shape[:-1]).numel(), shape[-1]
    yield TensorPart(((0, vectors),), ((0, columns),))
    for _ in range(12):
        yield TensorPart(ranges(chance, vectors), ranges(chance, columns))
        yield TensorPart(ranges(chance, vectors), ((0, columns),))


@pytest.mark.default("rows-1048576", "blocks-1", "pairs-1048576")
@pytest.mark.parametrize("chunk_bytes", [1, pytest.param(300, marks=pytest.mark.slow), 1 << 20])
def test_parts_are_slices_of_the_whole(files: Files, chunk_bytes: int) -> None:
    reader = files.open()
    for key, whole in files.whole.items():
        assert (reader.shape(key), reader.dtype(key)) == (tuple(whole.shape), whole.dtype)
        flat = whole.reshape(-1, whole.shape[-1] if whole.dim() else 1)
        for seed, part in enumerate(parts(len(key), flat.shape)):
            rows = torch.cat([flat[a:b] for a, b in part.vectors])
            wanted = torch.cat([rows[:, a:b] for a, b in part.columns], 1).contiguous()
            found = b"".join(bytes(x) for x in reader.read_part(key, part, False, chunk_bytes))
            assert found == bytes(tensor_bytes(wanted)), (key, seed, part)
    reader.close()


def test_whole_tensors_and_rows(files: Files) -> None:
    reader = files.open()
    for key, whole in files.whole.items():
        assert torch.equal(reader.tensor(key), whole)
        if whole.dim() and whole.shape[0] > 4:
            found = b"".join(bytes(x) for x in reader.read_chunks(key, 64, (1, 4)))
            assert found == bytes(tensor_bytes(whole[1:4].contiguous()))
    reader.close()


def test_each_byte_is_read_once_from_the_first_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a weight, whatever the chunks: as many bytes as it has, and none of a copy."""
    taken: list[int] = []
    plain = safetensors_io.read_exactly

    def read(file: Any, target: memoryview, *where: Any) -> None:
        taken.append(len(target))
        plain(file, target, *where)

    files = Files(tmp_path, torch.float32, ("tall", "wide"))
    reader = files.open()
    monkeypatch.setattr(safetensors_io, "read_exactly", read)
    for key, whole in files.whole.items():
        for chunk_bytes in (4, 700, 1 << 20):
            taken.clear()
            for _ in reader.read_chunks(key, chunk_bytes):
                pass
            if key == "tall":
                # per rank of 40 + 20 rows: two blocks, the second of which holds rows of both
                # intervals, and is read for each
                q = 4 * 2 * 32
                assert q * 9 * 4 <= sum(taken) <= (q + 2 * 32) * 9 * 4
            elif key == "wide":
                assert sum(taken) == 3 * 32 * 44 * 4
            else:
                assert sum(taken) == whole.nbytes, (key, chunk_bytes)
    reader.close()


def test_a_file_of_another_cut_is_refused(tmp_path: Path) -> None:
    files = Files(tmp_path, torch.float32, ("rows",))
    files.paths[2].unlink()
    with pytest.raises(ModelNotFoundError, match=r"rank-2\.safetensors does not exist"):
        files.open()
    save_file({key: torch.zeros(3) for key in files.whole}, files.paths[2])
    with pytest.raises(EngineError, match=r"rank-2\.safetensors with rows as torch\.float32 \[3\]"):
        files.open()
    save_file({"other": torch.zeros(3)}, files.paths[2])
    with pytest.raises(EngineError, match=r"rank-2\.safetensors with no rows"):
        files.open()
