"""The backend onnx: ONNX files for onnxruntime and other readers."""

from __future__ import annotations

import dataclasses

from specc.artifact.backends import facts_of
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import NativeEntry
from specc.compiler.backends.base import Emitted, UnfinishedEngine
from specc.compiler.backends.padded import PaddedBackend
from specc.passes.lower.cpu import lower as lower_cpu


class OnnxBackend(PaddedBackend):
    """Adds the compiled operators of a step, where there is a compiler for them."""

    facts = facts_of("onnx")
    aliases = ("onnxruntime",)

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        return dataclasses.replace(super().emit(engine), native=native_operators(engine.writer))

    def probe_refusal(self, manifest: Manifest) -> str | None:
        if any(model.dtype in self.facts.unrun_dtypes for model in manifest.models):
            return (
                "onnxruntime's CPU provider does not compute in bfloat16, so that"
                " specc run needs --backend eager; the ONNX files are for other readers"
            )
        return super().probe_refusal(manifest)


def native_operators(writer: EngineWriter) -> NativeEntry | None:
    """Compiled operators of a step, where there is a compiler; without them the oracles run."""
    if lower_cpu.missing_compiler() is not None:
        return None
    isa_flags = lower_cpu.copy_operators(writer.path(lower_cpu.LIBRARY_FILE))
    return NativeEntry(lower_cpu.LIBRARY_FILE, isa_flags)


BACKEND = OnnxBackend()
