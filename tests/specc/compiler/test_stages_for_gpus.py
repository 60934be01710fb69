"""Engines for GPUs whose target has stages: their files, and engines made of them anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from specc.artifact.directory import read_manifest
from specc.artifact.model_entry import ModelEntry
from specc.cli.main import app
from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.errors import ConfigError
from specc.kernels import ops
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.program_files import read_json
from tests import models
from tests.passes.shard.lockstep import BLOCK_SIZE, NUM_BLOCKS, prompt_inputs
from tests.passes.shard.test_lockstep import PROMPTS
from tests.specc.compiler.test_reshard import compare, config_for
from tests.specc.compiler.test_reshard_stages import compiled
from tests.tiers import every
from tests.traces import shared_traces

# a head that is the embedding, and tables of two kinds of layers, of which the stages begin with
# another one each
NAME, LAYERS = "gemma3-tied", ["sliding_attention", "sliding_attention", "full_attention"]
WAYS = (
    ((1, 2), (1, 1)),
    ((1, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((2, 2), (1, 2)),
    ((1, 2), (2, 2)),
    ((2, 2), (1, 1)),
)


Engines = Callable[[tuple[int, int]], Path]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Ranks of a stage and stages → an engine, compiled once."""
    root = tmp_path_factory.mktemp("stages")
    checkpoint = models.save_tiny(NAME, root / "checkpoint", layer_types=LAYERS)
    return cache(lambda shape: compiled(root, checkpoint, shape, "cuda"))


def bound(path: Path, model: ModelEntry, file: str) -> ModelProgram:
    dtype = getattr(torch, model.dtype)
    caches = [
        (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        for shape in (
            (NUM_BLOCKS, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim) for layer in model.layers
        )
    ]
    return ModelProgram(read_json(path / model.program_file), load_file(path / file), caches)


def opened(one: Path, two: Path) -> tuple[ModelProgram, ModelProgram, ModelProgram]:
    """The target of an engine of one rank, and the stages of an engine of two."""
    model, manifest = read_manifest(one).models[0], read_manifest(two)
    parts = [manifest.of_rank(rank).models[0] for rank in (0, 1)]
    first, last = (bound(two, part, part.rank_file(i)) for i, part in enumerate(parts))
    return bound(one, model, model.weights_file), first, last


def assert_alike(whole: ModelProgram, first: ModelProgram, last: ModelProgram) -> None:
    inputs = prompt_inputs(PROMPTS)
    with torch.inference_mode():
        assert torch.equal(last(*inputs, hidden=first(*inputs)), whole(*inputs))


def test_files_of_ranks_hold_what_their_stages_read(engines: Engines) -> None:
    """Bound from files alone, one stage after another computes what the whole one does."""
    programs = whole, _, last = opened(engines((1, 1)), engines((1, 2)))
    assert_alike(*programs)
    for program in programs:
        called = {node.target for node in program.graph.nodes}
        assert called >= {ops.attend, ops.skinny_linear}
        assert ops.tree_attention not in called
    # or a table of the whole model would do for each stage
    other, own = (whole.weights[f"constant.rotary_{i}"] for i in (0, 1))
    assert torch.equal(last.weights["constant.rotary_0"], own)
    assert not torch.equal(own, other)


def test_memory_and_what_inspect_says(engines: Engines) -> None:
    path = engines((1, 2))
    manifest, whole = read_manifest(path), read_manifest(engines((1, 1)))
    sizes = [(path / name).stat().st_size for name in manifest.rank_files]
    for size, stage in zip(sizes, manifest.stages, strict=True):
        assert stage.memory.weights <= size < stage.memory.weights + 8192
    caches = [stage.memory.cache for stage in manifest.stages]
    assert sum(caches) == whole.memory_plan["target"].cache
    invoke = partial(CliRunner().invoke, app)
    told = invoke(["inspect", str(path), "--sharding"])
    assert told.exit_code == 0, told.stderr
    assert "target: 2 stages" in told.stdout
    stages = json.loads(invoke(["inspect", str(path), "--sharding", "--json"]).stdout)
    assert [one["layers"] for one in stages["target"]["stages"]] == [
        list(stage.layers) for stage in manifest.stages
    ]


@pytest.mark.parametrize(
    ("before", "after"), every(6, WAYS), ids=lambda shape: f"tp-{shape[0]}-pp-{shape[1]}"
)
def test_engines_are_those_that_the_checkpoint_makes(
    engines: Engines, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    reshard_engine(engines(before), tmp_path / "engine", after[0], num_stages=after[1])
    compare(tmp_path / "engine", engines(after))


def test_an_engine_of_one_rank_has_no_graph_for_stages(engines: Engines, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an engine of one rank for the backend cuda") as caught:
        reshard_engine(engines((1, 1)), tmp_path / "engine", 1, num_stages=2)
    assert caught.value.do == "compile it with --backend cuda --pipeline-parallel-size 2"


def pair(root: Path, **options: Any) -> tuple[Path, Path]:
    """A tiny model compiled in one stage and in two."""
    checkpoint, paths = models.save_tiny("llama", root / "checkpoint"), (root / "1", root / "2")
    for stages, path in enumerate(paths, 1):
        config = config_for(1, pipeline_parallel_size=stages, backend="cuda", **options)
        with shared_traces():
            build(checkpoint, None, path, config)
    return paths


@pytest.mark.slow
def test_stages_of_quantized_weights(tmp_path: Path) -> None:
    """A stage has its weights whole, so they are the integers of one rank."""
    paths = pair(tmp_path, quantize="int8")
    programs = opened(*paths)
    assert_alike(*programs)
    assert all(program.quantized_shapes for program in programs)
    with pytest.raises(ConfigError, match="weights in int8 for the backend cuda") as caught:
        reshard_engine(paths[1], tmp_path / "engine", 2, num_stages=1)
    assert caught.value.needed.startswith("one for cpu or eager")


@pytest.mark.slow
def test_half_types_are_as_exact_in_stages(tmp_path: Path) -> None:
    """The norm at the cut is rounded, where a launch that holds a product, too, goes on exactly."""
    whole, first, last = opened(*pair(tmp_path / "half", dtype="bfloat16"))
    exact, *_ = opened(*pair(tmp_path / "float", dtype="float32"))
    inputs = prompt_inputs(PROMPTS)
    with torch.inference_mode():
        wanted = exact(*inputs)
        found = whole(*inputs), last(*inputs, hidden=first(*inputs))
    errors = [(logits.float() - wanted).square().mean().sqrt().item() for logits in found]
    assert errors[0] > 0
    assert errors[1] < 1.1 * errors[0]
