"""`--tensor-parallel-size` for onnx and tensorrt: a file of each rank, and who can run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specc.artifact.directory import read_manifest
from specc.cli.main import app
from specc.compiler.backends.onnx import OnnxCompiler
from specc.compiler.reshard import reshard_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.passes.lower.onnx.operators import COLLECTIVE
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.ranks.rank_options import RankOptions
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines

TREE = SpecPlan.from_widths((2, 1))
LIMITS: dict[str, Any] = {
    "plans": (TREE,), "max_seq_len": 64, "max_batch_size": 2, "prefill_chunk": 32, "probe": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# of one layer: after the embedding, attention and MLP
NUM_SUMS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, save_llama: Any) -> tuple[Path, Path]:
    """Two Llamas whose heads are wide enough for a fused kernel."""
    root = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("target", "draft")):
        save_llama(root / name, number, 1, hidden_size=64, head_dim=16)
    return root / "target", root / "draft"


@pytest.fixture(scope="module")
def onnx_engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "onnx"
    config = CompileConfig(
        **LIMITS, backend="onnx", tensor_parallel_size=2, draft_tensor_parallel_size=2
    )
    return engines.build(*models, path, config)


TENSORRT: dict[str, Any] = LIMITS | {
    "backend": "tensorrt", "dtype": "float16", "compute_capability": "8.9",
    "tensor_parallel_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def tensorrt_engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the target alone: each network takes seconds to build."""
    path = tmp_path_factory.mktemp("engines") / "tensorrt"
    return engines.build(models[0], [], path, CompileConfig(**TENSORRT | {"plans": ()}))


@pytest.mark.slow
def test_each_rank_of_a_cut_model_has_its_own_onnx_file(onnx_engine: Path) -> None:
    import onnx

    manifest = read_manifest(onnx_engine)
    required = set(manifest.required_files)
    for folder in ("target", "draft-0"):
        assert f"{folder}/model.onnx" not in manifest.files
        for rank in (0, 1):
            file = f"{folder}/rank-{rank}.model.onnx"
            assert {file, f"{folder}/rank-{rank}.weights.safetensors"} <= required
            model = onnx.load(str(onnx_engine / file))
            kinds = [node.op_type for node in model.graph.node]
            assert kinds.count(COLLECTIVE) == NUM_SUMS


def test_onnxruntime_runs_no_sums_over_ranks(onnx_engine: Path) -> None:
    manifest = read_manifest(onnx_engine)
    assert "sums over ranks" in str(OnnxCompiler().probe_refusal(manifest))
    with pytest.raises(ConfigError, match="several ranks of an engine of the backend onnx") as told:
        Engine.load(onnx_engine)
    assert told.value.do.startswith("run its graphs with --backend eager")


def test_its_padded_programs_are_not_cut_anew(onnx_engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an engine for the backend onnx") as told:
        reshard_engine(onnx_engine, tmp_path / "whole", 1)
    assert told.value.needed == "one for cpu or cuda or eager, which run several ranks"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_its_graphs_run_on_as_many_ranks(
    onnx_engine: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    whole = engines.build(*models, tmp_path / "whole", CompileConfig(**LIMITS, backend="eager"))
    prompts = [[5, 6, 7], [9, 8]]

    def tokens(engine: Engine) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in LLM(engine).generate(prompts, PARAMS)]

    wanted = tokens(Engine.load(whole))
    ranks = RankOptions(2, oversubscribes=True)
    cut = Engine.load(onnx_engine, backend="eager", ranks=ranks)
    try:
        assert tokens(cut) == wanted
    finally:
        cut.close()


@pytest.mark.slow  # builds networks for two ranks
def test_a_tensorrt_engine_is_built_for_each_rank(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = engines.build(*models, tmp_path / "engine", CompileConfig(**TENSORRT))
    manifest = read_manifest(engine)
    required = set(manifest.required_files)
    names = ("model.plan", "model.onnx", "build.json", "layers.json", "builder.log")
    # the draft is whole, and on rank 0
    assert {f"draft-0/{name}" for name in names} <= manifest.files.keys()
    assert {"draft-0/model.plan", "target/rank-1.model.plan"} <= required
    plans = []
    for rank in (0, 1):
        files = [f"target/rank-{rank}.{name}" for name in names]
        assert set(files) <= manifest.files.keys()
        plans.append(manifest.files[files[0]].sha256)
        build = json.loads((engine / files[2]).read_text())
        assert build["num_sums"] == NUM_SUMS
        layers = json.loads((engine / files[3]).read_text())
        assert len(layers["attentions"]) == len(build["profiles"])
        assert all(entry["is_fused"] for entry in layers["attentions"])
    assert plans[0] != plans[1], "ranks have other weights"
    assert not {f"target/{name}" for name in names} & manifest.files.keys()


@pytest.mark.slow
def test_inspect_shows_the_engine_of_each_rank(tensorrt_engine: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(tensorrt_engine)])
    assert done.exit_code == 0, done.output
    assert "target, rank 0" in done.output
    assert "target, rank 1" in done.output
    assert f"{NUM_SUMS} sums over ranks" in " ".join(done.output.split())
    shown = CliRunner().invoke(app, ["inspect", str(tensorrt_engine), "--sharding"])
    assert shown.exit_code == 0, shown.output
    assert f"{NUM_SUMS} collectives" in " ".join(shown.output.split())


@pytest.mark.slow
def test_without_a_gpu_nobody_loads_it(tensorrt_engine: Path) -> None:
    with pytest.raises(EngineError, match="device cuda"):
        Engine.load(tensorrt_engine)
    with pytest.raises(ConfigError, match="the backend eager, and an engine that was cut for GPUs"):
        Engine.load(tensorrt_engine, backend="eager")
