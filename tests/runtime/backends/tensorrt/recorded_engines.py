"""Engines for TensorRT on the recorder: compiled, loaded and run without TensorRT and a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.compiler import build as compiler
from specc.compiler.backends import tensorrt as compile_tensorrt
from specc.config import CompileConfig
from specc.passes.lower.tensorrt.builder import BuildOptions
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured import backend as captured_backend
from specc.runtime.backends.tensorrt.program import TensorRTProgram
from specc.runtime.engine import Engine
from specc.tensorrt import library as trt
from tests import engines, models
from tests.onnx_models import Caches, Lowered
from tests.runtime.backends.tensorrt.recorder import (
    ICudaEngine,
    RecordedDevice,
    Recorder,
    record_engine,
    watch_addresses,
)

# float32, whose tokens are those of every other backend; a plan of it is never built for real
FLOAT32 = {"backend": "tensorrt", "decomposable_attention": True, "probe": False}

RECORDED_BY = tuple(
    f"tests/runtime/backends/tensorrt/{name}.py"
    for name in ("recorded_engines", "recorded_pass", "recorder")
)


@contextmanager
def on_recorder(name: str = "tensorrt_rtx") -> Iterator[Recorder]:
    """Let TensorRT be the recorder for a while, and its device the GPU of this machine.

    Args:
        name: of the module that it stands for.
    """
    recorder = Recorder(RecordedDevice(), name)
    with pytest.MonkeyPatch.context() as patch:
        _stand_in(recorder, patch)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(captured_backend, "cuda_device", lambda: recorder.device)
        watch_addresses(recorder, patch)
        yield recorder


def compile_recorded(target: Path, draft: Path | list[Path], path: Path, **options: Any) -> Path:
    """Write an engine with recorded plans; `options` are those of `CompileConfig`."""
    config = CompileConfig(**(FLOAT32 | options))
    return engines.build(target, draft, path, config, builder=_build_recorded, sources=RECORDED_BY)


def _build_recorded(
    target: Path, drafts: Sequence[Path], path: Path, config: CompileConfig
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _stand_in(Recorder(RecordedDevice()), patch)
        patch.setattr(compile_tensorrt, "build_engine", record_engine)
        compiler.build(target, drafts, path, config)


def _stand_in(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trt, "load", lambda: recorder)
    patch.setattr(trt, "logger", object)


def load_poisoned(path: Path, capture: CaptureLimits | None = None, **options: Any) -> Engine:
    """An engine whose caches and history hold what nobody may look at."""
    loaded = Engine.load(path, capture=capture or CaptureLimits.lazy(), **options)
    for slabs in loaded.cache.slabs.values():
        for slab in slabs:
            slab.normal_(0.0, 30.0)
    loaded.cache.history.random_(0, models.VOCAB)
    return loaded


def recorded_engine(
    recorder: Recorder,
    pair: Lowered,
    directory: Path,
    profiles: Sequence[ShapeProfile],
    options: BuildOptions | None = None,
) -> ICudaEngine:
    """The engine of one model, whose files are in the directory."""
    plan = directory / "model.plan"
    record_engine(directory / "model.onnx", plan, profiles, options)
    engine = recorder.Runtime(object()).deserialize_cuda_engine(plan.read_bytes())
    assert engine is not None
    return engine


def program_of(
    recorder: Recorder, engine: ICudaEngine, pair: Lowered, caches: Caches
) -> TensorRTProgram:
    """A program of an engine on the recorder's device."""
    return TensorRTProgram(
        "target", recorder, engine, caches, pair.reaches, pair.rows, recorder.device
    )
