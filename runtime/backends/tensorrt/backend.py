"""The backend tensorrt: one engine of TensorRT a model, every step captured as one CUDA graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specc.artifact.cache_rows import reaches_of
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import TensorRTEntry
from specc.artifact.model_entry import ModelEntry
from specc.errors import EngineError
from specc.runtime.backends.captured.backend import CapturedBackend
from specc.runtime.backends.device_models import DeviceModels
from specc.runtime.backends.engine_cache import caches_of
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.backends.padded.hnd_commit import place_commits
from specc.runtime.backends.padded.model import WholeBatch
from specc.runtime.backends.tensorrt.program import TensorRTProgram
from specc.runtime.scheduling.kv_cache import KVCache
from specc.system.files import read_checked

_AGAIN = "compile the engine again with the installed TensorRT"


class TensorRTBackend(CapturedBackend):
    """See `RuntimeBackend`."""

    def load_models(
        self,
        path: Path,
        manifest: Manifest,
        cache: KVCache,
        graphs: GraphDevice,
        rank: int = 0,
        weights_budget: int | None = None,
    ) -> DeviceModels:
        """See `CapturedBackend.load_models`.

        Raises:
            EngineError: no TensorRT, another one than the engine was built with, or one that does
                not take it on this GPU.
        """
        from specc.tensorrt import library as installed

        entry, rows = manifest.tensorrt, cache.rows
        assert entry is not None, "the manifest was validated"
        assert rows is not None, "padded batches have caches of their own"
        trt = installed.load()
        check_tensorrt(entry, installed.facts(), _capability(graphs))
        runtime = trt.Runtime(installed.logger())
        models = {
            model.name: TensorRTProgram(
                model.name,
                trt,
                _deserialize(
                    trt, runtime, path, model, manifest.files[model.plan_file].sha256, entry
                ),
                caches_of(model, cache),
                reaches_of(model.layers),
                rows,
                graphs,
            )
            for model in manifest.models
        }
        within = {name: WholeBatch(model) for name, model in models.items()}
        return DeviceModels(models, within, lambda graph, *_: place_commits(graph, rows))


BACKEND = TensorRTBackend()


def check_tensorrt(entry: TensorRTEntry, facts: Any, capability: str | None) -> None:
    """Compare what an engine was built with and for with what is here.

    Args:
        facts: of the installed TensorRT.
        capability: of this GPU, `8.9`; None where none is known.
    Raises:
        EngineError: another TensorRT, or another GPU.
    """
    if (entry.name, entry.version) != (facts.name, facts.version):
        raise EngineError(
            f"an engine of {entry.name} {entry.version}, and {facts.title}",
            "the same version: engines of one do not load in another",
            f"install {entry.name} {entry.version}, or {_AGAIN}",
        )
    wanted = entry.compute_capability
    if None not in (wanted, capability) and wanted != capability:
        raise EngineError(
            f"an engine for compute capability {wanted}, and a GPU of {capability}",
            "the GPU that the engine was built for",
            f"run it on such a GPU, or compile it with --compute-capability {capability}",
        )


def _deserialize(
    trt: Any, runtime: Any, path: Path, model: ModelEntry, sha256: str, entry: TensorRTEntry
) -> Any:
    file = path / model.plan_file
    data = read_checked(file, sha256)
    validity = _validity(trt, runtime, data)
    engine = runtime.deserialize_cuda_engine(data) if validity is None else None
    if engine is None:
        raise EngineError(
            f"{file}, which {entry.name} {entry.version} does not load here"
            + (f": {validity}" if validity else ""),
            "the GPU and driver that the engine was built for"
            + (
                f" (compute capability {entry.compute_capability})"
                if entry.compute_capability
                else ""
            ),
            "look at the messages above (specc doctor tells what this machine has); compile the"
            " engine again on this machine",
        )
    return engine


def _validity(trt: Any, runtime: Any, data: bytes) -> str | None:
    """Why an engine is not valid here, as TensorRT-RTX says it; None where it says nothing."""
    ask = getattr(runtime, "get_engine_validity", None)
    kinds = getattr(trt, "EngineValidity", None)
    if ask is None or kinds is None:
        return None
    answer = ask(data)
    state, reasons = answer if isinstance(answer, tuple) else (answer, 0)
    return f"{state}, diagnostics {reasons:#x}" if state == kinds.INVALID else None


def _capability(graphs: GraphDevice) -> str | None:
    if graphs.device.type != "cuda":
        return None
    return "{}.{}".format(*torch.cuda.get_device_capability(graphs.device))
