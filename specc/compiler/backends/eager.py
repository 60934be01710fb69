"""The backend eager: an engine of graphs, which torch runs operator by operator."""

from __future__ import annotations

from specc.artifact.backends import facts_of
from specc.compiler.backends.base import CompilerBackend
from specc.errors import SpeccError


class EagerCompiler(CompilerBackend):
    """Nothing is compiled: every engine holds the graphs."""

    facts = facts_of("eager")
    aliases = ("torch",)

    def instead_of(self, error: SpeccError) -> str:
        return (
            f"{error.found}, so the engine runs its graphs operator by operator, which is several"
            f" times slower; for compiled code: {error.do.split(', or ')[0]}"
        )


BACKEND = EagerCompiler()
