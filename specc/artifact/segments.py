"""A model's segments in an engine: kinds of programs, and what each segment binds to its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.errors import EngineError
from specc.system.json_file import read_engine_json

SCHEMA_VERSION = 1
_NEEDED, _DO = "the segments of a model, as specc writes them", "compile the engine again"
_BOUND = ("weight", "constant")


@dataclass(frozen=True)
class SegmentEntry:
    """One segment.

    Args:
        kind: number of its program among `SegmentedModel.kinds`.
        keys: in the engine's weight file, of the kind's weights and constants in their order.
        layers: number in the model of each layer of the kind, in its order.
        states: likewise, of those that keep states, among these.
    """

    kind: int
    keys: tuple[str, ...]
    layers: tuple[int, ...]
    states: tuple[int, ...] = ()


@dataclass(frozen=True)
class SegmentedModel:
    """Segments of a model, which run one after another; see `specc.passes.segments.cut_segments`.

    Args:
        name: of the model.
        kinds: each the content of a `program.json`; its caches are numbered from 0.
        segments: in the order in which they run.
    """

    name: str
    kinds: tuple[Mapping[str, Any], ...]
    segments: tuple[SegmentEntry, ...]

    def program(self, number: int) -> dict[str, Any]:
        """The program of a segment: that of its kind, with keys of its own weights."""
        segment = self.segments[number]
        kind, keys = self.kinds[segment.kind], iter(segment.keys)
        inputs = [
            entry | {"key": next(keys)} if entry["kind"] in _BOUND else entry
            for entry in kind["inputs"]
        ]
        return {**kind, "name": f"{self.name}_{number}", "inputs": inputs}

    @classmethod
    def read(cls, path: Path) -> SegmentedModel:
        """The segments in a file of an engine.

        Raises:
            EngineError: it cannot be read, or is malformed.
        """
        data = read_engine_json(path, _NEEDED, _DO)
        try:
            return cls.from_json(data)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{path}: {error}", _NEEDED, _DO) from error

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SegmentedModel:
        """Raises KeyError, IndexError, TypeError, ValueError, AttributeError: no segments."""
        if data["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"segments of schema {data['schema_version']}, not {SCHEMA_VERSION}")
        kinds = tuple(data["kinds"])
        segments = tuple(
            SegmentEntry(
                item["kind"],
                tuple(item["keys"]),
                tuple(item["layers"]),
                # engines whose layers keep none do not say so
                tuple(item.get("states", ())),
            )
            for item in data["segments"]
        )
        for number, item in enumerate(segments):
            inputs = kinds[item.kind]["inputs"]
            bound = sum(entry["kind"] in _BOUND for entry in inputs)
            if len(item.keys) != bound:
                raise ValueError(f"segment {number} with {len(item.keys)} keys, not {bound}")
            for kind, own in (("cache", item.layers), ("state", item.states)):
                layers = {entry["layer"] for entry in inputs if entry["kind"] == kind}
                if len(own) != len(layers):
                    raise ValueError(f"segment {number} with layers {list(own)}, not {len(layers)}")
        if not segments:
            raise ValueError("no segment")
        return cls(str(data["name"]), kinds, segments)
