"""What gpt-oss makes of an expert's first product: columns in turn, clamped, a sigmoid between."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.kernels.reference.fused import GATE_LIMIT, GATE_SHARPNESS
from specc.passes.program import bind_args
from specc.passes.rewrite.columns import only_user

aten = torch.ops.aten


def clamped_gate(rows: fx.Node) -> fx.Node | None:
    """The node that is `gated(rows, CLAMPED)` of `specc.kernels.reference.fused`, or None.

    Args:
        rows: [M, 2 I], which nothing else may read.
    """
    halves = {_every_second(user): user for user in rows.users}
    if len(rows.users) != 2 or halves.keys() != {0, 1}:
        return None
    gate = _clamped(only_user(halves[0]), None)
    up = _clamped(only_user(halves[1]), -GATE_LIMIT)
    if gate is None or up is None:
        return None
    scaled = next((user for user in gate.users if _is(user, aten.mul.Tensor, GATE_SHARPNESS)), None)
    share = None if scaled is None else only_user(scaled)
    if share is None or share.target is not aten.sigmoid.default:
        return None
    gated, more = only_user(share), only_user(up)
    if gated is None or gated.target is not aten.mul.Tensor or set(gate.users) != {scaled, gated}:
        return None
    if set(gated.all_input_nodes) != {gate, share} or not _is(more, aten.add.Tensor, 1):
        return None
    result = only_user(gated)
    if result is None or result.target is not aten.mul.Tensor or more is None:
        return None
    is_alone = set(result.all_input_nodes) == {gated, more} and only_user(more) is result
    return result if is_alone else None


def _every_second(node: fx.Node) -> int | None:
    """The first of the columns of rows that this has, if it has every second one after it."""
    if node.target is not aten.slice.Tensor:
        return None
    bound = bind_args(node)
    columns = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    is_last = bound["dim"] in (1, -1) and bound["step"] == 2 and bound["end"] >= columns
    return bound["start"] if is_last and columns % 2 == 0 else None


def _clamped(node: fx.Node | None, least: float | None) -> fx.Node | None:
    if node is None or node.target is not aten.clamp.default:
        return None
    bound = bind_args(node)
    return node if (bound["min"], bound["max"]) == (least, GATE_LIMIT) else None


def _is(node: fx.Node | None, target: Any, number: float) -> bool:
    """Whether a node has this number as its second operand, unscaled."""
    if node is None or node.target is not target:
        return False
    bound = bind_args(node)
    return bool(bound["other"] == number and bound.get("alpha", 1) == 1)
