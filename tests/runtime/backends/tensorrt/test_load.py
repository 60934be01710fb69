"""Engines for TensorRT that do not fit this machine: refused while they load, and why."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specc.artifact.manifest_entries import TensorRTEntry
from specc.compiler.backends import tensorrt as compile_tensorrt
from specc.errors import ConfigError, EngineError
from specc.passes.lower.tensorrt.lower import build_engine
from specc.runtime import engine as engine_module
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.program_files import read_json
from specc.runtime.backends.step_io import StepInputs
from specc.runtime.backends.tensorrt import backend as trt_backend
from specc.runtime.backends.tensorrt.backend import check_tensorrt
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.system.files import hash_file
from specc.tensorrt import library as trt
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.tensorrt.recorded_engines import compile_recorded, on_recorder
from tests.runtime.backends.tensorrt.recorder import (
    EngineValidity,
    IExecutionContext,
    RecordedDevice,
    Recorder,
    Runtime,
)

PLAN = SpecPlan.from_widths((2, 1))


@pytest.fixture(scope="module")
def path(save_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensorrt")
    for seed, name in ((1, "target"), (2, "draft")):
        # keys of as many heads as queries
        save_llama(root / name, seed, num_key_value_heads=4)
    return compile_recorded(
        root / "target", root / "draft", root / "engine",
        plans=(PLAN,), max_batch_size=2, max_seq_len=48, prefill_chunk=16,
    )  # fmt: skip


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with on_recorder() as made:
        yield made
    assert not made.mistakes


def load(path: Path, capture: CaptureLimits | None = None, **options: Any) -> Engine:
    return Engine.load(path, capture=capture or CaptureLimits.lazy(), **options)


def refused(path: Path, *found: str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        load(path)
    for text in found:
        assert text in caught.value.found
    assert caught.value.needed
    assert caught.value.do
    return caught.value


def test_an_engine_that_fits_loads(path: Path, recorder: Recorder) -> None:
    """And says what runs it: every test below changes one thing."""
    engine = load(path)
    assert engine.backend == "tensorrt"
    assert engine.manifest is not None
    assert engine.manifest.tensorrt == TensorRTEntry("tensorrt_rtx", "1.7.1", None)
    tokens = LLM(engine).generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    )
    assert len(tokens[0].outputs[0].token_ids) == 4


def test_another_version_is_refused(path: Path, recorder: Recorder) -> None:
    recorder.__version__ = "1.6.0"  # type: ignore[misc]
    error = refused(path, "an engine of tensorrt_rtx 1.7.1", "TensorRT-RTX 1.6.0")
    assert "install tensorrt_rtx 1.7.1" in error.do


def test_another_tensorrt_is_refused(path: Path) -> None:
    with on_recorder("tensorrt"):
        refused(path, "an engine of tensorrt_rtx 1.7.1", "TensorRT 1.7.1")


def test_another_gpu_is_refused() -> None:
    facts = SimpleNamespace(name="tensorrt_rtx", version="1.7.1", title="TensorRT-RTX 1.7.1")
    entry = TensorRTEntry("tensorrt_rtx", "1.7.1", "8.9")
    for capability in ("8.9", None):
        check_tensorrt(entry, facts, capability)
    check_tensorrt(TensorRTEntry("tensorrt_rtx", "1.7.1", None), facts, "9.0")
    with pytest.raises(EngineError, match=re.escape("8.9, and a GPU of 9.0")) as caught:
        check_tensorrt(entry, facts, "9.0")
    assert "--compute-capability 9.0" in caught.value.do


def test_the_gpu_is_the_one_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or (12, 0)
    )
    second: Any = SimpleNamespace(device=torch.device("cuda", 1))
    assert trt_backend._capability(second) == "12.0"
    assert asked == [torch.device("cuda", 1)]
    assert trt_backend._capability(RecordedDevice()) is None


def test_the_gpu_is_compared_while_an_engine_loads(
    path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(trt_backend, "_capability", lambda graphs: "7.5")
    monkeypatch.setattr(trt_backend, "check_tensorrt", lambda *args: seen.append(args))
    load(path)
    ((entry, facts, capability),) = seen
    assert (entry.version, facts.title, capability) == ("1.7.1", "TensorRT-RTX 1.7.1", "7.5")


def test_a_plan_that_tensorrt_does_not_load_is_refused(
    path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, and a message in the log, is all that it says."""
    monkeypatch.setattr(Runtime, "deserialize_cuda_engine", lambda *_: None)
    error = refused(path, "target/model.plan", "does not load here")
    assert "GPU and driver" in error.needed


def test_a_plan_that_is_not_valid_here_is_refused(path: Path, recorder: Recorder) -> None:
    recorder.validity = (EngineValidity.INVALID, 0x20)
    refused(path, "target/model.plan", "INVALID", "0x20")
    recorder.validity = (EngineValidity.SUBOPTIMAL, 1)
    assert load(path).backend == "tensorrt"


@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (lambda e: e._aliases.pop("v_cache_0_out"), "v_cache_0_out shares memory with None"),
        (lambda e: e._shapes.update(k_cache_0=(-1, 4, 80, 8)), "k_cache_0 is torch.float32 [4, 80"),
        (lambda e: e._names.remove("mask"), "mask too many or too few"),
    ],
)
def test_an_engine_of_another_program_is_refused(
    path: Path, recorder: Recorder, alter: Any, found: str
) -> None:
    recorder.alter = alter
    refused(path, found)


def test_an_altered_plan_is_refused(path: Path, recorder: Recorder, tmp_path: Path) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(path, copy)
    data = bytearray((copy / "target/model.plan").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "target/model.plan").write_bytes(data)
    with pytest.raises(EngineError, match=r"target/model\.plan"):
        load(copy, verify=True)
    (copy / "draft-0/model.plan").unlink()
    with pytest.raises(EngineError, match=r"draft-0/model\.plan"):
        load(copy, verify=False)


@pytest.mark.parametrize("where", ["load", "step"])
def test_a_step_of_no_profile_is_refused(path: Path, recorder: Recorder, where: str) -> None:
    """A plan that an engine was not built for: before anything is generated, or captured."""

    def drop(engine: Any) -> None:
        engine._profiles = [p for p in engine._profiles if p["tokens"][1][1] != PLAN.num_rows]

    recorder.alter = drop
    limits = CaptureLimits(sizes=(2,)) if where == "load" else CaptureLimits.lazy()
    with pytest.raises(EngineError) as caught:
        load(path, limits).steps[PLAN.name].capture(2)
    assert f"plan {PLAN.name} for 2 requests cannot run" in caught.value.found
    assert f"a pass of 2 sequences × {PLAN.num_rows} nodes" in caught.value.found


def test_a_step_that_tensorrt_refuses_is_an_error(
    path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(path)
    monkeypatch.setattr(IExecutionContext, "execute_async_v3", lambda *_: False)
    with pytest.raises(EngineError, match="TensorRT refused a pass of 1 × 3 tokens"):
        LLM(engine).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(EngineError, match="TensorRT refused a pass of 2 × 1 tokens"):
        engine.steps[OFF.name].capture(2)


def test_a_step_past_the_end_is_refused(path: Path, recorder: Recorder) -> None:
    """On the host, before anything is queued: TensorRT would drop the rows."""
    engine = load(path)
    step, table = engine.steps[PLAN.name], torch.tensor([[1]], dtype=torch.int32)
    # the last tree of a sequence that may have 48 tokens
    for length, fits in ((48, True), (49, False)):
        inputs = StepInputs([(3, 4, length)], table, *mixed_sampling(1))
        recorder.forget()
        if fits:
            step.advance(inputs, engine.cache.environment)
            assert recorder.runs
            continue
        with pytest.raises(EngineError):
            step.advance(inputs, engine.cache.environment)
        assert not recorder.runs
    assert recorder.num_dropped == 0


def test_memory_of_the_device_is_checked_first(path: Path, recorder: Recorder) -> None:
    recorder.device.memory_bytes = 1000
    refused(path, "1000 bytes of memory free")
    assert not recorder.contexts


def test_float32_is_for_attention_of_several_kernels(save_llama: Any, tmp_path: Path) -> None:
    save_llama(tmp_path / "target", 1)
    with pytest.raises(ConfigError, match="no fused attention") as caught:
        compile_recorded(
            tmp_path / "target", tmp_path / "target", tmp_path / "engine",
            plans=(PLAN,), decomposable_attention=False,
        )  # fmt: skip
    assert "--decomposable-attention" in caught.value.do


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    return pytest.importorskip("tensorrt_rtx")


@pytest.mark.slow
def test_a_plan_that_was_built_for_real(path: Path, rtx: Any, tmp_path: Path) -> None:
    """The recorded builder says what the real one does; without a driver, that does not load."""
    directory = tmp_path / "engine"
    shutil.copytree(path, directory)
    manifest = engine_module.open_engine(path, False, backends=("tensorrt",), backend="eager")
    profiles = compile_tensorrt.model_profiles(
        [entry.plan for entry in manifest.plans], manifest.limits, manifest.models
    )
    options = compile_tensorrt.BuildOptions(decomposable=True, compute_capability="8.9")
    model = manifest.models[1]
    report = build_engine(
        directory / model.onnx_file, directory / model.plan_file, profiles[model.name], options
    )
    recorded = read_json(path / model.build_file)
    built = report.to_json()
    for key in ("lane", "fallback", "dtype", "inputs", "caches"):
        assert plain(built[key]) == recorded[key], key
    ranges = [{k: v for k, v in p.items() if k != "name"} for p in plain(built["profiles"])]
    assert ranges == recorded["profiles"]
    if not torch.cuda.is_available():
        installed = trt.facts()
        entry = TensorRTEntry(installed.name, installed.version, "8.9")
        sha256 = hash_file(directory / model.plan_file)
        runtime = rtx.Runtime(trt.logger())
        with pytest.raises(EngineError, match="does not load here") as caught:
            trt_backend._deserialize(rtx, runtime, directory, model, sha256, entry)
        assert "compute capability 8.9" in caught.value.needed


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
