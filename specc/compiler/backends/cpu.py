"""The backend cpu: graphs of operators that the C++ library of specc has."""

from __future__ import annotations

from specc.artifact.backends import facts_of
from specc.compiler.backends.base import CompilerBackend
from specc.passes.lower.cpu.library import missing_library
from specc.passes.lower.cpu.phases import cpu_phases
from specc.passes.pipeline import Phases


class CpuCompiler(CompilerBackend):
    """Nothing is compiled: the library that is part of specc runs the graphs."""

    facts = facts_of("cpu")

    def check_machine(self) -> None:
        if (missing := missing_library()) is not None:
            raise missing

    def phases(self, max_seq_len: int, pass_tokens: int | None = None) -> Phases:
        return cpu_phases(max_seq_len)


BACKEND = CpuCompiler()
