"""Hidden states that a target keeps of every token: those of transformers, whatever happened.

Nothing that is put out depends on them, so rows are compared: after every step, of every request
that runs, over all rows that are committed by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.manifest import Manifest
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.backends.engine_cache import features_of
from specc.runtime.engine import Engine
from specc.speculation.taps import Taps
from tests import engines, models
from tests.lossless import Zoo
from tests.runtime.tap_rows import CHUNK, NAME, PLANS, TAPS, Oracle, load, serve
from tests.tiers import every


def options(**changes: Any) -> CompileConfig:
    config = CompileConfig(
        plans=PLANS,
        max_batch_size=4,
        max_seq_len=models.MAX_SEQ_LEN,
        block_size=8,
        # prompts of more than one chunk
        prefill_chunk=CHUNK,
        backend="eager",
        probe=False,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def compiled(zoo: Zoo) -> Callable[..., Path]:
    """An engine with a draft that is right now and then, of these options."""
    target, draft = zoo.checkpoint(NAME), zoo.checkpoint(NAME, draft="noisy")

    def make(name: str, taps: Taps | None = TAPS, **changes: Any) -> Path:
        def with_taps(*given: Any) -> object:
            return build(*given, taps=taps)

        def write(path: Path) -> None:
            engines.build(target, draft, path, options(**changes), builder=with_taps, key=(taps,))

        return zoo.once(f"taps-{name}", write)

    return make


@pytest.mark.parametrize("plan", every(3, [plan.name for plan in PLANS], 1))
def test_rows_are_those_of_transformers(zoo: Zoo, compiled: Callable[..., Path], plan: str) -> None:
    """Trees with rejections, chunks, requests that join, prefixes that are shared."""
    engine = load(compiled("eager"))
    oracle = Oracle(zoo.reference_model(NAME))
    stats = serve(engine, plan, oracle, temperature=1.0).scheduler.stats
    assert oracle.num_rows > 1000
    assert stats.num_cached_tokens > CHUNK
    # drafts are accepted, and rejected
    assert 1.05 < stats.mean_acceptance_length < 3.5


@pytest.mark.slow
def test_rows_of_those_that_had_to_give_way(zoo: Zoo, compiled: Callable[..., Path]) -> None:
    """With blocks for little more than one request: rows are computed again."""
    engine = load(compiled("eager"), kv_cache_tokens=112)
    oracle = Oracle(zoo.reference_model(NAME))
    stats = serve(engine, PLANS[1].name, oracle, num_tokens=40, every=1).scheduler.stats
    assert stats.num_preemptions > 1
    assert oracle.num_rows > 1000


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 0])
@pytest.mark.parametrize("plan", [plan.name for plan in PLANS])
def test_rows_of_compiled_programs(
    zoo: Zoo, compiled: Callable[..., Path], plan: str, block_size: int
) -> None:
    engine = load(compiled(f"cpu-{block_size}", backend="cpu", block_size=block_size))
    oracle = Oracle(zoo.reference_model(NAME))
    serve(engine, plan, oracle)
    assert oracle.num_rows > 1000


@pytest.mark.slow
def test_rows_after_the_final_norm_beside_integers(zoo: Zoo, compiled: Callable[..., Path]) -> None:
    """Where K and V are int8, hidden states stay in the type of the model."""
    taps = Taps((2,), is_last_normed=True)
    engine = load(compiled("int8", taps, kv_cache_dtype="int8", backend="eager"))
    target = engine.manifest.models[0]
    features = features_of(target, engine.cache)
    assert (features.dtype, features.shape[2]) == (torch.float32, 64)
    # what K and V lose in rounding is in the hidden states of later layers
    oracle = Oracle(zoo.reference_model(NAME), taps, tolerance=0.1)
    serve(engine, PLANS[0].name, oracle)
    assert oracle.num_rows > 1000


def test_what_the_engine_says(compiled: Callable[..., Path]) -> None:
    with_taps, without = (compiled(name, taps) for name, taps in (("eager", TAPS), ("no", None)))
    manifests = [json.loads((x / "manifest.json").read_text()) for x in (with_taps, without)]
    one, other = (Manifest.from_json(data) for data in manifests)
    target, plain = one.models[0], other.models[0]
    assert target.taps is not None
    assert (target.taps.boundaries, target.taps.width) == ((2, 0, 1), 3 * 64)
    assert target.kept_taps == TAPS
    assert (target.num_slabs, plain.num_slabs) == (2, 1)
    # 3 hidden states of 64 float32 a row
    grown = one.memory_plan["target"].cache - other.memory_plan["target"].cache
    assert grown == one.limits.cache_rows() * 3 * 64 * 4
    slabs = Engine.load(with_taps).cache.slabs
    assert sum(slab.nbytes for slab in slabs["target"]) == one.memory_plan["target"].cache
    assert [len(slabs[name]) for name in ("target", "draft_0")] == [2, 1]
    # engines that keep nothing are as they were
    assert all("taps" not in model for model in manifests[1]["models"])
    changed = [
        name
        for name in manifests[1]["files"]
        if manifests[0]["files"][name]["sha256"] != manifests[1]["files"][name]["sha256"]
        and name != "report.json"
    ]
    assert set(changed) == {
        "target/program.json",
        *(entry["file"] for entry in manifests[1]["plans"] if entry["name"] in _moving()),
    }


def _moving() -> set[str]:
    """Plans whose accepted rows move: of a chain they lie where they belong."""
    return {plan.name for plan in PLANS if not plan.is_in_place}


@pytest.mark.parametrize(
    ("taps", "found"),
    [
        ({"boundaries": [0, 3], "is_last_normed": False, "width": 8}, r"boundaries \[0, 3\]"),
        ({"boundaries": [], "is_last_normed": False, "width": 8}, r"boundaries \[\]"),
        ({"boundaries": [0], "is_last_normed": False, "width": 0}, "width is 0"),
        ({"boundaries": [0], "width": 8}, "is_last_normed is missing"),
    ],
)
def test_manifests_that_are_refused(
    compiled: Callable[..., Path], taps: dict[str, Any], found: str
) -> None:
    data = json.loads((compiled("eager") / "manifest.json").read_text())
    data["models"][0]["taps"] = taps
    with pytest.raises(EngineError, match=found):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"backend": "onnx", "block_size": 0}, "the backend onnx"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"segments": True}, "--segments"),
    ],
)
def test_engines_that_keep_none(
    zoo: Zoo, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=f"a draft that reads hidden states, and {found}"):
        build(zoo.checkpoint(NAME), None, tmp_path / "e", options(plans=(), **changes), taps=TAPS)


@pytest.mark.slow
def test_boundaries_that_the_target_has_not(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="taps at boundary 7 of a target of 2 layers"):
        build(zoo.checkpoint(NAME), None, tmp_path / "e", options(plans=()), taps=Taps((1, 7)))
    assert not (tmp_path / "e").exists()
