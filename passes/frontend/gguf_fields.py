"""Fields of a GGUF file's architecture, read as what they have to be."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from specc.errors import WeightError

DO = "put the file in a directory with config.json and tokenizer.json of the model, and pass that"


class Fields(Mapping[str, Any]):
    """Fields of an architecture, without its name in front.

    Layers that predict further tokens (MTP), which a file counts and has after all others, are no
    part of the model: they are neither in `block_count` here nor in lists of layers.

    Args:
        fields: of the file.
        kind: `general.architecture`.
        where: the file, for errors.
    """

    def __init__(self, fields: Mapping[str, Any], kind: str, where: str) -> None:
        prefix = f"{kind}."
        self._own = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }
        self.kind, self.where = kind, where
        layers, further = (self._own.get(key, 0) for key in ("block_count", "nextn_predict_layers"))
        if type(further) is int and type(layers) is int and 0 < further < layers:
            self._own = {
                key: item[:-further] if isinstance(item, list) and len(item) == layers else item
                for key, item in self._own.items()
            }
            self._own["block_count"] = layers - further

    def __getitem__(self, key: str) -> Any:
        return self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def number(self, key: str, usual: float | None = None) -> Any:
        """A number, as it was meant before it was stored in float32.

        Raises:
            WeightError: it is none; or it is not there, and there is no usual one.
        """
        value = self.get(key, usual)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, f"a number {self.kind}.{key}")
        return self.decimal(value) if isinstance(value, float) else value

    def value(self, key: str, layers: int) -> Any:
        """A number, a truth, or a list with one of them for each layer: of equal ones, one."""
        found = self[key]
        if isinstance(found, bool | str):
            return found
        if not isinstance(found, list):
            return self.number(key)
        if len(found) != layers or any(not isinstance(x, bool | int | float) for x in found):
            raise self.refusal(key, f"a number for each of {layers} layers")
        return found[0] if len(set(found)) == 1 else found

    def refusal(self, key: str, needed: str) -> WeightError:
        """Of a field that is there, or of one that is not."""
        name = f"{self.kind}.{key}"
        found = f"{self.where} has no {name}"
        if key in self:
            text = str(self[key])
            found = f"{self.where} has {name} {text if len(text) <= 80 else text[:77] + '…'}"
        return WeightError(found, needed, DO)

    @staticmethod
    def decimal(value: float) -> float:
        """What was meant by a number in float32: the shortest decimal that is it."""
        exact = struct.pack("<f", value)
        shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
        return next((item for item in shorter if struct.pack("<f", item) == exact), value)
