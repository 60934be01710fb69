"""The backend cpu: graphs of operators that the C++ library of specc has."""

from __future__ import annotations

from specc.artifact.backends import facts_of
from specc.compiler.backends.base import CompilerBackend, Emitted, UnfinishedEngine
from specc.passes.lower.cpu.library import missing_library
from specc.passes.lower.cpu.phases import cpu_phases
from specc.passes.pipeline import Phases
from specc.passes.quantize.row_integers import has_wide_rows


class CpuCompiler(CompilerBackend):
    """Nothing is compiled: the library that is part of specc runs the graphs."""

    facts = facts_of("cpu")

    def check_machine(self) -> None:
        if (missing := missing_library()) is not None:
            raise missing

    def phases(self, max_seq_len: int, pass_tokens: int | None = None) -> Phases:
        return cpu_phases(max_seq_len)

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        speculates = any(plan.speculates for plan in engine.context.plans)
        target = engine.models[0]
        if not speculates or not has_wide_rows(target.program):
            return Emitted()
        return Emitted(
            warnings=[
                f"the {target.entry.quantization} weights of {target.name} are multiplied with rows"
                " of 24 bits, as exact as float32, which makes passes over drafted tokens up to"
                " three times as expensive: --activation-bits 8, which llama.cpp and OpenVINO"
                " compute in, makes drafts pay"
            ]
        )


BACKEND = CpuCompiler()
