"""`--kv-cache-dtype int8` and `fp8`, from the option to engines: written, planned, refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import open_engine, read_manifest
from specc.artifact.kv_rows import AUTO, FP8, INT8, KV_CACHE_DTYPES, SCALE_BYTES, stored_row
from specc.artifact.manifest import Manifest
from specc.bench.step_bytes import step_bytes
from specc.cli.render import cache_room
from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, OFF, SpecPlan
from tests import engines
from tests.models import MAX_SEQ_LEN, save_tiny
from tests.runtime.ranks.conftest import OPTIONS

PLANS = (
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_widths((1, 1, 1), ("self_w32_s4",)),
    SpecPlan.from_widths((1, 1), ("self_w32_s4_b32",)),
    SpecPlan.from_widths((2, 1), ("self_l0_w32_s4", "draft_0"), MERGE),
)
PROMPTS = [[5, 17, 3, 99, 41, 7, 7], [64], [*range(1, 70)]]
BACKENDS = [
    ("eager", INT8),
    ("eager", FP8),
    pytest.param(("cpu", INT8), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_tiny("llama", root / "target")
    save_tiny("llama", root / "draft", noise=0.1)
    return root


def config_for(*plans: SpecPlan, **changes: Any) -> CompileConfig:
    fields: dict[str, Any] = {
        "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "prefill_chunk": 32, "probe": False,
        "backend": "eager", "kv_cache_dtype": INT8,
    }  # fmt: skip
    return CompileConfig(plans=plans, **(fields | changes))


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def built(models: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    backend, kind = request.param
    options = {"backend": backend, "kv_cache_dtype": kind}
    config = config_for(*PLANS, draft_kv=("window=24,sink=2",), **options)
    path = tmp_path_factory.mktemp("engines") / "engine"
    return engines.build(models / "target", models / "draft", path, config)


def engine_kind(path: Path) -> str:
    return read_manifest(path).kv_cache_dtype


def generate(engine: Engine, plan: str, **options: Any) -> tuple[list[list[int]], int]:
    llm = LLM(engine, plan=plan)
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=i, **{"temperature": 0, **options})
        for i in range(len(PROMPTS))
    ]
    outputs = [list(item.outputs[0].token_ids) for item in llm.generate(PROMPTS, params)]
    return outputs, llm.get_metrics().num_accepted_tokens


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_every_plan_gives_what_off_does(built: Path, temperature: float) -> None:
    engine = Engine.load(built)
    torch.manual_seed(0)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            assert slab.dtype == stored_row(1, torch.float32, engine_kind(built))[1]
            slab.view(torch.int8).random_(-128, 127)
    wanted, _ = generate(engine, "off", temperature=temperature)
    for plan in PLANS:
        found, accepted = generate(engine, plan.name, temperature=temperature)
        assert found == wanted, plan.name
        assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_code_computes_what_the_oracle_does(
    models: Path, tmp_path: Path, dtype: str
) -> None:
    """First tokens of prompts, and log probabilities, by kernels and by oracles."""
    found = []
    for backend in ("eager", "cpu"):
        path = tmp_path / backend
        engines.build(models / "target", [], path, config_for(backend=backend, dtype=dtype))
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
        outputs = LLM(Engine.load(path)).generate(PROMPTS, params)
        rows = [item.outputs[0].logprobs[0] for item in outputs]
        found.append([{t: entry.logprob for t, entry in row.items()} for row in rows])
    tolerance = 2e-2 if dtype == "float32" else 0.2
    for one, other in zip(*found, strict=True):
        common = one.keys() & other.keys()
        assert len(common) >= 4
        for token in common:
            assert one[token] == pytest.approx(other[token], abs=tolerance)


def test_what_is_planned_and_said(models: Path, tmp_path: Path) -> None:
    rows = {}
    for kind in KV_CACHE_DTYPES:
        path = tmp_path / kind
        build(models / "target", None, path, config_for(kv_cache_dtype=kind))
        manifest = read_manifest(path)
        assert Manifest.from_json(manifest.to_json()) == manifest
        assert manifest.kv_cache_dtype == kind
        assert ("kv_cache_dtype" in manifest.to_json()) == (kind != AUTO)
        assert (f"rows of {kind}" in cache_room(manifest)) == (kind != AUTO)
        engine = Engine.load(path)
        (slab,) = engine.cache.slabs["target"]
        assert manifest.memory_plan["target"].cache == slab.nbytes
        (own,) = manifest.models[0].slabs
        rows[kind] = 2 * own.num_layers * own.num_kv_heads * own.head_dim * 4
        if kind != AUTO:
            rows[kind] = 2 * own.num_layers * own.num_kv_heads * (own.head_dim + 4)
        read = step_bytes(path, manifest, OFF, 10, 1)
        assert read.kv_cache == 10 * rows[kind]
        assert slab.nbytes == rows[kind] * manifest.limits.cache_rows()


def test_second_programs_take_the_same_caches(built: Path) -> None:
    manifest = read_manifest(built)
    files = [item.program_file for item in (*manifest.models, *manifest.self_drafts)]
    assert len(files) == 3
    for file in files:
        inputs = json.loads((built / file).read_text())["inputs"]
        kinds = {(item["dtype"], item["shape"][1]) for item in inputs if item["kind"] == "cache"}
        dtype = {INT8: "int8", FP8: "uint8"}[manifest.kv_cache_dtype]
        assert kinds == {(dtype, manifest.models[0].layers[0].head_dim + SCALE_BYTES)}


def test_engines_of_before_have_rows_of_the_model(models: Path, tmp_path: Path) -> None:
    manifest = build(
        models / "target", None, tmp_path / "engine", config_for(kv_cache_dtype=AUTO)
    ).manifest
    data = manifest.to_json()
    assert "kv_cache_dtype" not in data
    assert Manifest.from_json(data).kv_cache_dtype == AUTO
    with pytest.raises(EngineError) as caught:
        Manifest.from_json(data | {"kv_cache_dtype": "int4"})
    assert "kv_cache_dtype is 'int4'" in caught.value.found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"backend": "onnx"}, "--kv-cache-dtype with backend onnx"),
        ({"backend": "tensorrt"}, "--kv-cache-dtype with backend tensorrt"),
        ({"backend": "cpu", "kv_cache_dtype": FP8}, "--kv-cache-dtype fp8 with backend cpu"),
    ],
)
def test_backends_that_do_not_read_such_rows(
    models: Path, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    """Refused before a model is traced; other backends are named."""
    with pytest.raises(ConfigError) as caught:
        build(tmp_path / "no-model", None, tmp_path / "engine", config_for(**changes))
    assert found in caught.value.found
    assert ("cpu" in caught.value.needed) == ("cpu" not in found)
    assert "eager" in caught.value.needed


def test_types_that_there_are_not() -> None:
    with pytest.raises(ConfigError) as caught:
        config_for(kv_cache_dtype="fp8_e5m2")
    assert caught.value.found == "--kv-cache-dtype fp8_e5m2"
    assert caught.value.needed == "auto or int8 or fp8"
    assert caught.value.do.startswith("pass --kv-cache-dtype int8 or fp8, or leave it out")
    # as vLLM calls it
    assert config_for(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == FP8


@pytest.fixture(scope="module")
def cut(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A whole engine, and what resharding makes of it for two ranks."""
    root = tmp_path_factory.mktemp("cut")
    plans = (PLANS[0], PLANS[1])
    build(models / "target", models / "draft", root / "whole", config_for(*plans))
    reshard_engine(root / "whole", root / "cut", 2)
    return root / "whole", root / "cut"


@pytest.mark.slow
def test_ranks_have_their_heads_scales(cut: tuple[Path, Path]) -> None:
    """A row of a head has a scale of its own: the cut changes no code, so no token either."""
    manifests = [open_engine(path) for path in cut]
    assert [manifest.kv_cache_dtype for manifest in manifests] == [INT8, INT8]
    caches = [manifest.memory_plan["target"].cache for manifest in manifests]
    assert caches[0] == 2 * caches[1]
    whole, led = Engine.load(cut[0]), Engine.load(cut[1], ranks=OPTIONS)
    try:
        for plan in ("off", PLANS[0].name, PLANS[1].name):
            for temperature in (0.0, 1.0):
                wanted = generate(whole, plan, temperature=temperature)
                assert generate(led, plan, temperature=temperature) == wanted
    finally:
        led.close()


@pytest.mark.slow
def test_an_engine_goes_back_to_one_rank(cut: tuple[Path, Path], tmp_path: Path) -> None:
    reshard_engine(cut[1], tmp_path / "again", 1)
    again, whole = read_manifest(tmp_path / "again"), read_manifest(cut[0])
    same = {"created": "", "files": {}}
    assert dataclasses.replace(again, **same) == dataclasses.replace(whole, **same)
    name = again.models[0].program_file
    assert (tmp_path / "again" / name).read_bytes() == (cut[0] / name).read_bytes()


@pytest.mark.slow
def test_segments_take_the_same_caches(models: Path, tmp_path: Path) -> None:
    """A program for each kind of layer gives the tokens that one for all of them does."""
    found = []
    for segments in (False, True):
        path = tmp_path / f"segments-{segments}"
        config = config_for(PLANS[0], segments=segments)
        build(models / "target", models / "draft", path, config)
        engine = Engine.load(path)
        found.append([generate(engine, plan) for plan in ("off", PLANS[0].name)])
    assert found[0] == found[1]
    assert found[0][0][0] == found[0][1][0]
