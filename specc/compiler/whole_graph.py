"""The graph of a model before it is cut or quantized, as an engine keeps it for other cuts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specc.passes.program import Program, constant_key
from specc.passes.program_json import program_to_json


class WholeGraph:
    """What `whole.json` holds.

    Constants that a backend's phases do away with, as those that tables take the place of, are in
    no weight file: their values, which are small, are in the JSON.

    Args:
        program: that is about to be cut or quantized.
        keeps_order: write the keys of weights and constants in their order: files of quantized
            weights have them in another one, and under other names.
    """

    def __init__(self, program: Program, keeps_order: bool = False) -> None:
        self._data = program_to_json(program)
        if keeps_order:
            keys = [weight.key for weight in program.weights.values()]
            self._data["keys"] = [*keys, *map(constant_key, program.constants)]
        self._constants = dict(program.constants)
        self.layers = tuple(program.layers)

    def to_json(self, program: Program) -> dict[str, Any]:
        """JSON-ready data.

        Args:
            program: the same after its last pass.
        """
        keys = {program.constant_keys.get(name, constant_key(name)) for name in program.constants}
        for entry in self._data["inputs"]:
            if entry["kind"] == "constant" and entry["key"] not in keys:
                entry["value"] = self._constants[entry["name"]].tolist()
        return self._data


class KeptGraphs:
    """What a program was before some of its phases.

    Args:
        program: that goes through them.
        firsts: phases before the first of which it is kept whole, for other cuts; `staged_at` is
            among them.
        keeps_order: see `WholeGraph`.
        unfused_at: phase before which it is copied for self-drafts, or None.
        staged_at: phase before which it is copied for its stages, or None.
    """

    def __init__(
        self,
        program: Program,
        firsts: Collection[str],
        keeps_order: bool = False,
        unfused_at: str | None = None,
        staged_at: str | None = None,
    ) -> None:
        self._program, self._keeps_order = program, keeps_order
        self._firsts, self._unfused_at, self._staged_at = firsts, unfused_at, staged_at
        self.whole: WholeGraph | None = None
        self.unfused: Program | None = None
        self.unlowered: Program | None = None

    def keep(self, _: str, phase: str) -> None:
        """Called before each phase, see `Pipeline.on_phase`."""
        program = self._program
        if self.whole is None and (phase in self._firsts or phase == self._staged_at):
            self.whole = WholeGraph(program, self._keeps_order)
        if phase == self._unfused_at:
            self.unfused = program.copy(program.name)
        if phase == self._staged_at:
            self.unlowered = program.copy(program.name)
