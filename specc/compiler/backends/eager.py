"""The backend eager: an engine of graphs, which torch runs operator by operator."""

from __future__ import annotations

from collections.abc import Sequence

from specc.artifact.backends import facts_of
from specc.artifact.manifest_entries import NativeEntry
from specc.compiler.backends.base import CompilerBackend, Emitted, UnfinishedEngine
from specc.config import CompileConfig
from specc.errors import SpeccError
from specc.passes.lower.cpu import lower as lower_cpu


class EagerCompiler(CompilerBackend):
    """Nothing is compiled: every engine holds the graphs."""

    facts = facts_of("eager")
    aliases = ("torch",)
    options = (
        "tensor_parallel_size", "draft_tensor_parallel_size", "draft_ranks", "segments",
        "kv_cache_dtype", "pipeline_parallel_size", "quantize", "activation_bits",
    )  # fmt: skip

    def check_config(self, config: CompileConfig, dtypes: Sequence[str]) -> None:
        super().check_config(config, dtypes)
        missing = lower_cpu.missing_compiler() if _num_ranks(config) > 1 else None
        if missing is not None:
            raise missing

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        if _num_ranks(engine.config) == 1:
            return Emitted()
        # collectives of ranks
        isa_flags = lower_cpu.copy_operators(engine.writer.path(lower_cpu.LIBRARY_FILE))
        return Emitted(native=NativeEntry(lower_cpu.LIBRARY_FILE, isa_flags))

    def instead_of(self, error: SpeccError) -> str:
        return (
            f"{error.found}, so the engine runs its graphs operator by operator, which is several"
            f" times slower; for compiled code: {error.do.split(', or ')[0]}"
        )


def _num_ranks(config: CompileConfig) -> int:
    return config.tensor_parallel_size * config.pipeline_parallel_size


BACKEND = EagerCompiler()
