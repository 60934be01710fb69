"""Layers of a manifest's models that keep a state for each sequence, and the slabs of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specc.artifact.manifest_decoding import invalid
from specc.bounds import MOST_COLUMNS, MOST_IDS, MOST_LAYERS, number, within

CONV, RECURRENCE = "conv", "recurrence"
# bytes of an element
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# passes that fill a checkpoint at a time, before another one gives way for it
_SPARE = 2
# fields of models, limits, memory and stages
_OF_STATES = {
    "state_layers", "state_slabs", "state_checkpoints", "state_grid", "states", "checkpoints",
}  # fmt: skip


def kept_states(num_checkpoints: int) -> int:
    """States that an engine has room for, of so many prefixes, and of those on their way."""
    return num_checkpoints + _SPARE if num_checkpoints else 0


@dataclass(frozen=True)
class StateGeometry:
    """What layers of one slab have in common; see `specc.passes.program.StateLayer`.

    Args:
        kind: `conv` or `recurrence`.
        shape: of a sequence's state.
        columns: of a replay row.
        dtype: of both.
        key_heads: of a recurrence.
        has_beta: of a recurrence.
    """

    kind: str
    shape: tuple[int, ...] = field(metadata=within(0, MOST_COLUMNS))
    columns: int = field(metadata=within(1, MOST_IDS))
    dtype: str
    key_heads: int = number(0, MOST_COLUMNS, default=0)
    has_beta: bool = False

    @property
    def state_bytes(self) -> int:
        """Of one layer and sequence."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Of one layer, sequence and node: its replay row."""
        return self.columns * _ITEM_BYTES[self.dtype]

    @property
    def geometry(self) -> StateGeometry:
        """Without what else an entry says."""
        own = self.kind, self.shape, self.columns, self.dtype, self.key_heads, self.has_beta
        return StateGeometry(*own)

    @property
    def can_be(self) -> bool:
        """Whether sizes fit each other, so that kernels find what they expect."""
        shape, heads = self.shape, self.key_heads
        if self.dtype not in _ITEM_BYTES:
            return False
        if self.kind == CONV:
            return len(shape) == 2 and self.columns == shape[1] and not (heads or self.has_beta)
        if self.kind != RECURRENCE or self.dtype != "float32" or len(shape) != 3:
            return False
        values, keys, columns = shape
        if min(shape) < 1 or heads < 1 or values % heads:
            return False
        most = heads * keys + values * columns + values * self.has_beta
        return self.columns - most in (values, values * keys)


@dataclass(frozen=True, kw_only=True)
class StateLayerEntry(StateGeometry):
    """One layer that keeps a state, which is row `index` of slab `slab`."""

    name: str
    slab: int = field(metadata=within(0, MOST_LAYERS))
    index: int = field(metadata=within(0, MOST_LAYERS))


@dataclass(frozen=True, kw_only=True)
class StateSlabEntry(StateGeometry):
    """States of equal geometry: [num_layers, places, …], and [num_layers, places, R, columns]."""

    num_layers: int = field(metadata=within(1, MOST_LAYERS))


def check_states(
    model: str, layers: Sequence[StateLayerEntry], slabs: Sequence[StateSlabEntry]
) -> None:
    """Raises EngineError: a geometry that cannot be, or a layer outside of its slab."""
    taken: dict[int, set[int]] = {}
    for slab in slabs:
        if not slab.can_be:
            raise invalid(f"{model} has states {slab.geometry}", "sizes that fit each other")
    for layer in layers:
        fits = layer.slab < len(slabs) and layer.geometry == slabs[layer.slab].geometry
        if not fits or layer.index >= slabs[layer.slab].num_layers:
            raise invalid(
                f"{model}.{layer.name} has row {layer.index} of slab {layer.slab} of states",
                f"one of {len(slabs)} slabs, with a row for it",
            )
        taken.setdefault(layer.slab, set()).add(layer.index)
    for place, slab in enumerate(slabs):
        if len(taken.get(place, ())) != slab.num_layers:
            raise invalid(
                f"slab {place} of states of {model} has {slab.num_layers} layers",
                f"the {len(taken.get(place, ()))} that say so",
            )


def drop_states(data: dict[str, Any]) -> None:
    """Take out of a manifest's JSON what it says of states where there are none.

    Engines without such layers are as they were before there were some: versions of specc that know
    none of these fields open them.
    """
    stages = (data.get("parallel") or {}).get("stages", [])
    entries = [*data["models"], data["limits"], *stages, *(stage["memory"] for stage in stages)]
    entries += [x for x in data["memory_plan"].values() if isinstance(x, dict)]
    for entry in entries:
        for name in _OF_STATES & entry.keys():
            if not entry[name]:
                del entry[name]
