"""Refuse quantized weights that a backend does not read, before they are written."""

from __future__ import annotations

from specc.artifact.backends import BackendFacts, backend_names, facts_of
from specc.errors import ConfigError
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program


class RequireLayouts(Pass):
    """No weight is quantized in a way that the backend lacks.

    Args:
        facts: of the backend.
    """

    def __init__(self, facts: BackendFacts) -> None:
        self._facts = facts

    def run(self, program: Program) -> PassResult:
        for weight in program.weights.values():
            kind = None if weight.quantized is None else weight.quantized.kind
            if kind is None or kind in self._facts.quantized:
                continue
            able = [name for name in backend_names() if kind in facts_of(name).quantized]
            raise ConfigError(
                f"{program.name}: {weight.parameters[0]} in {kind}, and backend {self._facts.name}",
                f"weights in {' or '.join(self._facts.quantized) or 'the type of the engine'}, or a"
                f" backend that reads {kind}: {', '.join(able)}",
                f"compile with --backend {able[0]}",
            )
        return PassResult()
