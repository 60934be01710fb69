"""How many positions the tables of a traced model hold."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.program import Program

aten = torch.ops.aten
_SAME_VALUES = (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.to.dtype)


def position_limit(program: Program) -> int | None:
    """Positions 0 … n - 1 that the model's position tables hold; None where it has no table.

    A position past the table is an index error in the middle of a pass, so what the graph says
    counts beside what a configuration says.
    """
    limits = []
    for node in program.calls(aten.embedding.default):
        offset = _offset_from_positions(node.args[1])
        if offset is not None:
            limits.append(int(node.args[0].meta["val"].shape[0]) - offset)
    return min(limits, default=None)


def _offset_from_positions(node: fx.Node) -> int | None:
    """C where the node is positions + c, else None."""
    offset = 0
    while node.op == "call_function":
        if node.target is aten.add.Tensor and type(node.args[1]) is int:
            offset += node.args[1]
        elif node.target not in _SAME_VALUES:
            return None
        node = node.args[0]
    return offset if node.target == "positions" else None
