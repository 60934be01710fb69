"""Weight files of ranks: streamed from the checkpoint, each is what the cut takes of the whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact import safetensors_io
from specc.artifact.directory import read_manifest
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import MemoryReader, check_spec, write_weights
from specc.compiler import engine_files
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.sharding.shard_plan import Interval, ShardPlan, WeightCut
from specc.sharding.weight_pieces import piece_of
from tests import models
from tests.tiers import every, only
from tests.traces import shared_traces

# rows of q | k | v, columns of c_attn, stacks of experts, one fused projection, biases of sums
SOME = (("qwen3", 4), ("gpt2", 2), ("mixtral", 2), ("phi3", 4), ("opt", 4))
REST = [
    pytest.param(name, ranks, marks=pytest.mark.slow)
    for name in models.ARCHITECTURES
    for ranks in (2, 4)
    if (name, ranks) not in SOME
]


def config_for(num_ranks: int, **options: Any) -> CompileConfig:
    return CompileConfig(
        max_seq_len=64, backend="eager", probe=False, tensor_parallel_size=num_ranks, **options
    )


def compiled(checkpoint: Path, path: Path, num_ranks: int) -> Path:
    with shared_traces():
        build(checkpoint, None, path, config_for(num_ranks))
    return path


Reads = dict[str, list[tuple[str, int, int]]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Name of a file of weights → what is read while it is written: file, first byte, end."""
    found: Reads = {}
    plain_read, plain_write = safetensors_io.read_exactly, engine_files.write_weights

    def write(specs: Any, reader: Any, path: Path, *rest: Any) -> Any:
        found[path.name] = []
        return plain_write(specs, reader, path, *rest)

    def read(file: Any, target: memoryview, offset: int, malformed: Any) -> None:
        list(found.values())[-1].append((file.name, offset, offset + len(target)))
        plain_read(file, target, offset, malformed)

    monkeypatch.setattr(engine_files, "write_weights", write)
    monkeypatch.setattr(safetensors_io, "read_exactly", read)
    return found


@pytest.mark.parametrize(("name", "num_ranks"), only(("qwen3", "opt"), every(2, [*SOME, *REST])))
def test_files_of_ranks_are_pieces_of_the_whole(
    tmp_path: Path, name: str, num_ranks: int, reads: Reads
) -> None:
    # 126 tokens are padded for 4 ranks
    changes = {"vocab_size": 126} if name == "phi3" else {}
    checkpoint = models.save_tiny(name, tmp_path / "checkpoint", **changes)
    one = compiled(checkpoint, tmp_path / "whole", 1)
    cut = compiled(checkpoint, tmp_path / "cut", num_ranks)
    whole = load_file(one / "target" / "weights.safetensors")
    plan = ShardPlan.from_json(json.loads((cut / "target" / "shard.json").read_text()))
    constants = {f"constant.{item.name}": item for item in plan.constants}
    for rank in range(num_ranks):
        own = load_file(cut / "target" / f"rank-{rank}.weights.safetensors")
        assert own.keys() == whole.keys() | constants.keys()
        for key, value in own.items():
            if key in plan.by_key:
                assert torch.equal(value, plan.by_key[key].take(whole[key], rank)), (key, rank)
            elif key in constants:
                assert torch.equal(value, constants[key].value(rank))
            else:
                assert torch.equal(value, whole[key])
        assert sum(own[key].nbytes for key in plan.by_key) == plan.local_bytes
        # no byte of the checkpoint is read twice for a rank, and none that it does not hold
        taken = sorted(reads[f"rank-{rank}.weights.safetensors"])
        for (file, _, end), (next_file, start, _) in itertools.pairwise(taken):
            assert file != next_file or end <= start
        stored = sum(end - start for _, start, end in taken)
        assert 0 < stored <= sum(own[key].nbytes for key in own.keys() - constants.keys())
    manifest = read_manifest(cut)
    entry = manifest.models[0]
    assert (entry.vocab_size, manifest.num_ranks) == (changes.get("vocab_size", 128), num_ranks)
    assert entry.num_parameters == read_manifest(one).models[0].num_parameters
    files = {f"target/rank-{rank}.weights.safetensors" for rank in range(num_ranks)}
    assert files == {name for name in manifest.files if name.endswith(".safetensors")}


def test_one_rank_says_nothing_of_ranks(tmp_path: Path) -> None:
    checkpoint = models.save_tiny("qwen3", tmp_path / "checkpoint")
    one = compiled(checkpoint, tmp_path / "whole", 1)
    assert "parallel" not in json.loads((one / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("changes", "num_ranks", "told"),
    [
        ({}, 3, "--tensor-parallel-size 3, and 4 attention heads"),
        ({"intermediate_size": 90}, 4, "--tensor-parallel-size 4, and 90 inner features"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "--tensor-parallel-size 4, and 3 key and value heads",
        ),
        ({}, 0, "--tensor-parallel-size 0"),
    ],
    ids=["heads", "inner", "kv-heads", "none"],
)
def test_sizes_that_do_not_divide_are_told_before_anything_is_traced(
    tmp_path: Path, changes: dict[str, int], num_ranks: int, told: str
) -> None:
    checkpoint = models.save_tiny("qwen3", tmp_path / "checkpoint", **changes)
    heard: list[Any] = []
    with pytest.raises(ConfigError) as error:
        build(checkpoint, None, tmp_path / "engine", config_for(num_ranks), listen=heard.append)
    assert error.value.found.startswith(told)
    assert not [event for event in heard if "trace" in str(event)]
    assert not (tmp_path / "engine").exists()


@pytest.mark.slow
def test_a_rank_that_is_absent_is_told(tmp_path: Path) -> None:
    checkpoint = models.save_tiny("qwen3", tmp_path / "checkpoint")
    cut = compiled(checkpoint, tmp_path / "cut", 2)
    (cut / "target" / "rank-1.weights.safetensors").unlink()
    with pytest.raises(EngineError, match=r"rank-1\.weights\.safetensors"):
        Engine.load(cut)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stacks_that_are_stored_transposed(dim: int, tmp_path: Path) -> None:
    """A weight [2, 6, 4] that the checkpoint holds as matrices [4, 6], in a tensor of each."""
    stored = {"a": torch.arange(24.0).view(1, 4, 6), "b": torch.arange(24.0, 48.0).view(1, 4, 6)}
    whole = torch.cat(list(stored.values())).mT.contiguous()
    spec = WeightSpec("w", torch.float32, (2, 6, 4), tuple(map(Source, stored)), is_turned=True)
    cuts = [(Interval(0, size),) for size in spec.shape]
    cuts[dim] = (Interval(0, spec.shape[dim], 2),)
    cut = WeightCut("w", "float32", spec.shape, tuple(cuts))
    for rank in (0, 1):
        piece = piece_of(spec, cut, rank, MemoryReader(stored))
        write_weights([piece], MemoryReader(stored), tmp_path / "w.safetensors")
        assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], cut.take(whole, rank))


@pytest.mark.parametrize("dim", [0, 1])
def test_transposed_sources(dim: int) -> None:
    """A weight [6, 4] that the checkpoint holds as its transpose, in two tensors."""
    stored = {"a": torch.arange(8.0).view(4, 2), "b": torch.arange(8.0, 24.0).view(4, 4)}
    whole = torch.cat([value.t() for value in stored.values()])
    sources = tuple(Source(name, transpose=True) for name in stored)
    spec = WeightSpec("w", torch.float32, (6, 4), sources)
    cuts = [(Interval(0, 6),), (Interval(0, 4),)]
    cuts[dim] = (Interval(0, whole.shape[dim], 2),)
    cut = WeightCut("w", "float32", (6, 4), tuple(cuts))
    reader = MemoryReader(stored)
    for rank in (0, 1):
        piece = piece_of(spec, cut, rank, reader)
        check_spec(piece, reader)
        chunks = [
            bytes(chunk)
            for source in piece.sources
            for chunk in reader.read_part(source.name, source.part, source.transpose)
        ]
        found = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.float32)
        assert torch.equal(found.view(piece.shape), cut.take(whole, rank))
