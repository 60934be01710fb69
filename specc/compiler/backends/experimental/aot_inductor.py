"""The backend aot-inductor: an engine for cuda, with code that AOTInductor compiles."""

from __future__ import annotations

from specc.compiler.backends.base import Emitted, UnfinishedEngine
from specc.compiler.backends.cuda import CudaCompiler
from specc.config import CompileConfig
from specc.passes.lower.experimental import aot_inductor
from specc.system.file_cache import FileCache


class AotInductorCompiler(CudaCompiler):
    """Adds a package for each size that passes of steps have."""

    # nobody has compiled packages of quantized weights, or of stages
    options = tuple(
        name for name in CudaCompiler.options if name not in ("quantize", "pipeline_parallel_size")
    )

    @property
    def name(self) -> str:
        return aot_inductor.BACKEND

    def check_machine(self) -> None:
        aot_inductor.check_machine()

    def adapt(self, config: CompileConfig) -> CompileConfig:
        FileCache().check()
        return super().adapt(config)

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        with engine.phases.phase("compile packages"):
            models = [(model.entry, model.program) for model in engine.models]
            aot_inductor.lower_aot_inductor(models, engine.plans, engine.limits, engine.writer)
        return Emitted()


BACKEND = AotInductorCompiler()
