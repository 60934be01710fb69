"""The graph of a model before it is cut, as an engine keeps it for other cuts."""

from __future__ import annotations

from typing import Any

from specc.passes.program import Program, constant_key, program_to_json


class WholeGraph:
    """What `whole.json` holds.

    Constants that a backend's phases do away with, as those that tables take the place of, are in
    no weight file: their values, which are small, are in the JSON.

    Args:
        program: that is about to be cut.
    """

    def __init__(self, program: Program) -> None:
        self._data = program_to_json(program)
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
