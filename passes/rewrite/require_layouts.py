"""Refuse quantized weights that a backend does not read, before they are written."""

from __future__ import annotations

from specc.artifact.backends import (
    SHORT_GROUPS,
    ZERO_POINTS,
    BackendFacts,
    backend_names,
    facts_of,
)
from specc.errors import ConfigError
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, Weight


class RequireLayouts(Pass):
    """No weight is quantized in a way that the backend lacks.

    Args:
        facts: of the backend.
    """

    def __init__(self, facts: BackendFacts) -> None:
        self._facts = facts

    def run(self, program: Program) -> PassResult:
        for weight in program.weights.values():
            if weight.quantized is None:
                continue
            kind, name = weight.quantized.kind, f"{program.name}: {weight.parameters[0]}"
            if kind not in self._facts.quantized:
                able = [other for other in backend_names() if kind in facts_of(other).quantized]
                raise ConfigError(
                    f"{name} in {kind}, and backend {self._facts.name}",
                    f"weights in {' or '.join(self._facts.quantized) or 'the type of the engine'},"
                    f" or a backend that reads {kind}: {', '.join(able)}",
                    f"compile with --backend {able[0]}",
                )
            for what, (found, needed) in _extras(weight).items():
                if what in self._facts.quantized_extras:
                    continue
                able = [
                    other
                    for other in backend_names()
                    if what in facts_of(other).quantized_extras
                    and kind in facts_of(other).quantized
                ]
                raise ConfigError(
                    f"{name} in {kind} with {found}, and backend {self._facts.name}",
                    f"{needed}, or a backend that takes them: {', '.join(able)}",
                    f"compile with --backend {able[0]}",
                )
        return PassResult()


def _extras(weight: Weight) -> dict[str, tuple[str, str]]:
    """What a quantized weight has besides levels and scales → how to say it, and its opposite."""
    layout, columns = weight.quantized, weight.shape[-1]
    assert layout is not None
    found = {}
    if layout.has_zeros:
        found[ZERO_POINTS] = "zero points of its own", "weights without zero points"
    if layout.group and columns % layout.group:
        found[SHORT_GROUPS] = (
            f"{columns} columns in groups of {layout.group}, the last one short",
            "groups that divide the columns",
        )
    return found
