"""The backend cpu: programs compiled for this machine, and the library of C++ operators."""

from __future__ import annotations

from contextlib import AbstractContextManager

from specc.artifact.backends import facts_of
from specc.artifact.manifest_entries import NativeEntry
from specc.compiler.backends.base import CompilerBackend, Emitted, UnfinishedEngine
from specc.compiler.compiled_model import CompiledModel
from specc.compiler.stages import staged
from specc.config import CompileConfig
from specc.passes.lower.cpu import lower as lower_cpu
from specc.passes.pipeline import Phases
from specc.passes.program import Program
from specc.system.file_cache import FileCache


class CpuCompiler(CompilerBackend):
    """Compiles each program without its weights, and brings the operators that it calls."""

    facts = facts_of("cpu")
    options = (
        "tensor_parallel_size", "draft_tensor_parallel_size", "draft_ranks", "segments",
        "kv_cache_dtype", "pipeline_parallel_size", "quantize", "activation_bits",
    )  # fmt: skip

    def check_machine(self) -> None:
        if (missing := lower_cpu.missing_compiler()) is not None:
            raise missing

    def adapt(self, config: CompileConfig) -> CompileConfig:
        # the library and the programs are made there, minutes after the models are read
        FileCache().check()
        return config

    def ahead(self) -> AbstractContextManager[None]:
        return lower_cpu.library_ahead()

    def phases(self, max_seq_len: int, pass_tokens: int | None = None) -> Phases:
        return lower_cpu.LAYOUT_PHASES

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        library = lower_cpu.LIBRARY_FILE
        programs = [item for model in engine.models for item in _programs(model)]
        programs += [(draft.program, draft.entry.package_file) for draft in engine.self_drafts]
        packages = [
            lower_cpu.CpuPackage(program, engine.writer.path(file)) for program, file in programs
        ]
        with engine.phases.phase("compile programs") as advance:
            records, isa_flags = lower_cpu.lower_cpu(
                packages, engine.writer.path(library), engine.dump, advance
            )
        return Emitted(native=NativeEntry(library, isa_flags), records=records)


def _programs(model: CompiledModel) -> list[tuple[Program, str]]:
    """Programs to compile, and their files: one, or one of each kind of segment."""
    if model.stages:
        return [(stage.program, entry.package_file) for stage, entry in staged(model)]
    if model.segments is None:
        return [(model.program, model.entry.package_file)]
    kinds = dict.fromkeys(item.kind for item in model.segments)
    return [
        (model.segments[kind].program, model.entry.segment_package(i))
        for i, kind in enumerate(kinds)
    ]


BACKEND = CpuCompiler()
