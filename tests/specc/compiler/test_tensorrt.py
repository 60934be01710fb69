"""`specc compile --backend tensorrt` and `specc inspect` of what it makes; real builds, no GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specc.api import compile_with
from specc.artifact.directory import read_manifest
from specc.artifact.manifest import Manifest
from specc.cli.main import app
from specc.compiler.backends.tensorrt import model_profiles
from specc.compiler.build import build
from specc.compiler.extend import extend_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError, TensorRTError
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.tensorrt import library as trt
from tests import engines

TREE, CHAIN = SpecPlan.from_widths((2, 1)), SpecPlan.from_widths((1, 1, 1))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, save_llama: Any) -> tuple[str, str]:
    """Two Llamas whose heads are wide enough for a fused kernel."""
    root = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("target", "draft")):
        save_llama(root / name, number, 1, hidden_size=64, head_dim=16)
    return str(root / "target"), str(root / "draft")


@pytest.fixture(scope="module")
def engine(models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "tensorrt"
    config = CompileConfig(
        plans=(TREE, CHAIN),
        dtype="float16",
        max_seq_len=64,
        max_batch_size=2,
        prefill_chunk=32,
        backend="tensorrt",
        compute_capability="8.9",
    )
    target, draft = map(Path, models)
    return engines.build(target, draft, path, config, is_probed=True)


@pytest.fixture(scope="module")
def manifest(engine: Path) -> Manifest:
    return read_manifest(engine)


def test_an_engine_holds_plans_reports_and_their_source(engine: Path, manifest: Manifest) -> None:
    assert (manifest.backend, manifest.device) == ("tensorrt", "cuda")
    assert manifest.tensorrt is not None
    facts = trt.facts()
    assert dataclasses.astuple(manifest.tensorrt) == (facts.name, facts.version, "8.9")
    for model in manifest.models:
        for name in ("model.plan", "model.onnx", "build.json", "layers.json", "builder.log"):
            assert f"{model.dir}/{name}" in manifest.files
        build = json.loads((engine / model.build_file).read_text())
        assert "layers" not in build, "they are in a file of their own"
        # every profile fuses every attention
        layers = json.loads((engine / model.dir / "layers.json").read_text())
        assert len(layers["attentions"]) == len(build["profiles"]) * len(model.layers)
        assert all(entry["is_fused"] for entry in layers["attentions"])


def test_profiles_hold_every_pass_of_every_plan(manifest: Manifest) -> None:
    plans = [TREE, CHAIN, SpecPlan.from_dynamic(DynamicTree(6, 2, 3)), OFF]
    found = model_profiles(plans, manifest.limits, manifest.models)
    prefill = ShapeProfile("prefill", (1, 1, 2), (1, 32, 32), (1, 1, 2))
    assert found["target"][0] == found["draft_0"][0] == prefill
    shapes = {name: {(p.nodes, p.rows) for p in passes} for name, passes in found.items()}

    def nodes(count: int, rows: int) -> tuple[Any, Any]:
        return (count, count, count), (rows, 2 * rows, 2 * rows)

    verified = {nodes(n, n) for n in (TREE.num_nodes, CHAIN.num_nodes, 6, 1)}
    assert shapes["target"] == verified | {(prefill.nodes, prefill.rows)}
    # a first level of two tokens and one row, then the levels that have children
    levels = {nodes(2, 1), nodes(1, 1), nodes(2, 2)}
    assert shapes["draft_0"] == levels | {(prefill.nodes, prefill.rows)}


def test_one_key_head_gets_a_wider_profile(manifest: Manifest) -> None:
    model = manifest.models[0]
    layers = tuple(dataclasses.replace(layer, num_kv_heads=1) for layer in model.layers)
    of_one = dataclasses.replace(model, layers=layers)
    found = model_profiles([OFF], manifest.limits, [of_one])["target"]
    assert [profile.nodes for profile in found[1:]] == [(1, 1, 2)]


def test_inspect(engine: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(engine)])
    assert done.exit_code == 0
    assert "for compute capability 8.9" in done.output
    assert "attention fused" in done.output
    assert "1 of 1" in done.output
    assert "fell apart" not in done.output
    data = json.loads(CliRunner().invoke(app, ["inspect", str(engine), "--json"]).output)
    assert set(data["builds"]) == {"target", "draft_0"}
    assert data["builds"]["target"]["layers"]["attentions"]
    layers = CliRunner().invoke(app, ["inspect", str(engine), "--why"]).output
    assert len(layers) > len(done.output)


def test_inspect_warns_of_an_attention_that_fell_apart(engine: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    file = copy / "target/layers.json"
    layers = json.loads(file.read_text())
    layers["attentions"][0] |= {"is_fused": False, "others": ["a", "b", "c"]}
    file.write_text(json.dumps(layers))
    done = CliRunner().invoke(app, ["inspect", str(copy)])
    assert "0 of 1" in done.output
    assert "fell apart in profile 0: 3 layers compute it" in " ".join(done.output.split())


def test_without_a_gpu_its_graphs_run_alone(engine: Path) -> None:
    with pytest.raises(EngineError, match="device cuda"):
        Engine.load(engine)
    outputs = {
        plan: [
            o.outputs[0].token_ids
            for o in LLM(engine, plan=plan, backend="eager").generate([[5, 6, 7]], PARAMS)
        ]
        for plan in (TREE.name, "off")
    }
    assert outputs[TREE.name] == outputs["off"]


def test_its_plans_are_those_it_was_built_with(engine: Path, manifest: Manifest) -> None:
    larger = SpecPlan.from_widths((2, 2, 2))
    with extend_engine(engine, manifest) as extension:
        with pytest.raises(ConfigError, match=r"caches of this|nodes"):
            extension.try_plans([larger, OFF])
        with pytest.raises(ConfigError, match="no profile"):
            extension.try_plans([SpecPlan.from_widths((1, 1)), OFF])
        assert extension.try_plans([CHAIN, OFF]).plans[0].plan == CHAIN


@pytest.mark.parametrize(
    ("options", "error", "found"),
    [
        pytest.param({"dtype": "float32"}, ConfigError, "no fused attention", id="float32"),
        pytest.param({"compute_capability": "9.0"}, TensorRTError, "9.0 with", id="sm90"),
        pytest.param({"compute_capability": "x"}, TensorRTError, "'x'", id="no-capability"),
    ],
)
def test_bad_options_are_refused_before_anything_is_traced(
    models: tuple[str, str], tmp_path: Path, options: dict[str, Any], error: type, found: str
) -> None:
    config = CompileConfig(**{"dtype": "float16", "backend": "tensorrt", **options})
    seen: list[Any] = []
    with pytest.raises(error, match=found):
        compile_with(*models, tmp_path / "engine", config, listen=seen.append)
    assert {event.phase for event in seen} == {"check models"}
    assert not list(tmp_path.iterdir())


def test_no_tensorrt(
    models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise TensorRTError("no TensorRT", "one", "pip install tensorrt-rtx")

    monkeypatch.setattr(trt, "load", missing)
    with pytest.raises(TensorRTError, match="pip install tensorrt-rtx"):
        compile_with(*models, tmp_path / "e", CompileConfig(dtype="float16", backend="tensorrt"))


@pytest.mark.parametrize(
    "options", [{"compute_capability": "8.9"}, {"decomposable_attention": True}]
)
@pytest.mark.parametrize("backend", [None, "cpu", "onnx"])
def test_options_of_tensorrt_alone(
    tmp_path: Path, options: dict[str, Any], backend: str | None
) -> None:
    """Refused before anything is read."""
    config = CompileConfig(backend=backend, **options)
    with pytest.raises(ConfigError, match="the backend tensorrt") as caught:
        build(tmp_path / "nothing", None, tmp_path / "engine", config)
    assert caught.value.found.endswith(f"with backend {backend or 'eager'}")
    assert caught.value.do.startswith("pass --backend tensorrt, or leave out --")
    assert not list(tmp_path.iterdir())
