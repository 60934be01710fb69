"""The graph of a model before it is cut or quantized, as an engine keeps it for other cuts."""

from __future__ import annotations

from typing import Any

from specc.passes.program import Program, constant_key, program_to_json


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
