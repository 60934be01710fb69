"""What `specc inspect` says of layers that keep states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specc.artifact.model_entry import ModelEntry
from specc.artifact.state_entry import CONV, StateGeometry
from specc.cli.render import format_ranges, make_table
from specc.speculation.plans import replay_rows
from specc.system.files import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from specc.artifact.manifest import Manifest


def states_table(models: Iterable[ModelEntry]) -> Table:
    """Layers that keep states, and bytes of these and of replay rows; equal ones share a row."""
    right = ("layers", "key heads", "a sequence", "a node")
    columns = ("model", "layers", "keeps states", "shape", "key heads", "type", *right[2:], "which")
    table = make_table(columns, right)
    for model in models:
        groups: dict[StateGeometry, list[int]] = {}
        for number, layer in enumerate(model.state_layers):
            groups.setdefault(layer.geometry, []).append(number)
        for item, numbers in groups.items():
            table.add_row(
                model.name,
                str(len(numbers)),
                _kind(item),
                " × ".join(map(str, item.shape)),
                str(item.key_heads or ""),
                item.dtype,
                format_bytes(item.state_bytes * len(numbers)),
                format_bytes(item.row_bytes * len(numbers)),
                format_ranges(numbers),
            )
    return table


def state_lines(manifest: Manifest) -> list[str]:
    """How many states there are, and prefixes that requests share; nothing of other targets."""
    target, limits = manifest.models[0], manifest.limits
    if not target.state_layers:
        return []
    rows = replay_rows([entry.plan for entry in manifest.plans])
    node = "node" if rows == 1 else "nodes"
    lines = [
        f"states of {limits.max_batch_size} sequences, {format_bytes(target.state_bytes)} each, and"
        f" replay rows of {rows} {node}, {format_bytes(target.replay_bytes)} each"
    ]
    if not limits.state_checkpoints:
        return [*lines, "prefixes are not shared: no states are kept for later requests"]
    return [
        *lines,
        f"states of {limits.state_checkpoints} prefixes are kept for later requests, at multiples"
        f" of {limits.state_grid} tokens",
    ]


def _kind(item: StateGeometry) -> str:
    if item.kind == CONV:
        return "convolution"
    return "delta rule" if item.has_beta else "decay"
