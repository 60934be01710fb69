"""What lets a token choose among experts of the best groups alone."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from specc.passes.base import NoMatch
from specc.passes.program import bind_args

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default)
_NOTS = (aten.bitwise_not.default, aten.logical_not.default)


class Groups(NamedTuple):
    """Groups of experts side by side; arguments of `specc.route`, see `route_reference`."""

    groups: int = 1
    top_groups: int = 1
    group_best: int = 1


def grouped(node: fx.Node) -> tuple[fx.Node, Groups, float]:
    """Scores [N, E] before those of other groups are hidden, the groups, and what hides them.

    Raises:
        NoMatch: scores are hidden by something else than the choice of groups.
    """
    if node.target not in (aten.masked_fill.Scalar, aten.masked_fill_.Scalar):
        return node, Groups(), -math.inf
    bound = bind_args(node)
    scores, reason = bound["self"], "scores are hidden by something else than a choice of groups"
    wide = _argument(bound["mask"], _NOTS, reason)
    if wide.target is aten.to.dtype:
        wide = wide.args[0]  # type: ignore[assignment]
    column = _argument(_argument(wide, _RESHAPES, reason), (aten.expand.default,), reason)
    mark = bind_args(node_of(column, aten.unsqueeze.default, reason))
    marks = bind_args(node_of(mark["self"], aten.scatter.value, reason))
    blank = node_of(marks["self"], aten.zeros_like.default, reason)
    topk = output_of(marks["index"], aten.topk.default, 1, reason)
    taken = bind_args(topk)
    of_groups = taken["self"]
    num_groups = int(of_groups.meta["val"].shape[-1])
    is_choice = (
        mark["dim"] in (2, -1)
        and marks["dim"] in (1, -1)
        and marks["value"] == 1
        and blank.args[0] is of_groups
        and taken["dim"] in (1, -1)
        and taken["largest"]
        and of_groups.meta["val"].dim() == 2
    )
    if not is_choice:
        raise NoMatch(reason)
    best = _best_of_group(of_groups, scores, num_groups)
    return scores, Groups(num_groups, taken["k"], best), float(bound["value"])


def _best_of_group(node: fx.Node, scores: fx.Node, num_groups: int) -> int:
    """How many of the best scores of a group add up to its own."""
    reason = "the score of a group is not of its best experts"
    count = 1
    if node.target is aten.sum.dim_IntList:
        total = bind_args(node)
        topk = output_of(total["self"], aten.topk.default, 0, reason)
        found = bind_args(topk)
        if total["dim"] not in ([-1], [2]) or total["keepdim"] or not found["largest"]:
            raise NoMatch(reason)
        count = found["k"]
    else:
        found = bind_args(output_of(node, aten.max.dim, 0, reason))
    parts = found["self"]
    if found["dim"] not in (-1, 2) or found.get("keepdim") or count > 2:
        raise NoMatch(reason)
    if _argument(parts, _RESHAPES, reason) is not scores:
        raise NoMatch(reason)
    if parts.meta["val"].dim() != 3 or int(parts.meta["val"].shape[1]) != num_groups:
        raise NoMatch(reason)
    return count


def _argument(node: Any, targets: tuple[Any, ...], reason: str) -> fx.Node:
    if not isinstance(node, fx.Node) or node.target not in targets:
        raise NoMatch(reason)
    return node.args[0]  # type: ignore[return-value]


def node_of(node: Any, target: Any, reason: str) -> fx.Node:
    """The node, if it calls this; raises `NoMatch` otherwise."""
    if not isinstance(node, fx.Node) or node.target is not target:
        raise NoMatch(reason)
    return node


def output_of(node: Any, target: Any, number: int, reason: str) -> fx.Node:
    """The call whose output of this number the node is; raises `NoMatch` otherwise."""
    item = node_of(node, operator.getitem, reason)
    if item.args[1] != number:
        raise NoMatch(reason)
    return node_of(item.args[0], target, reason)
