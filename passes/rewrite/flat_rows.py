"""Projections over flattened rows: whether one can be put in place of another, and how."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.weight_layout import UNITS
from specc.passes.program import bind_args, emit_call, replace

aten = torch.ops.aten


def replace_linear(
    node: fx.Node, operator: Any, weight: fx.Node, out_features: int, *more: Any
) -> None:
    """Put a projection of flattened rows, `operator(x, weight, bias, N, *more)`, in place of one.

    Args:
        node: an `aten.linear`.
        operator: takes rows [M, K] and returns [M, N].
        out_features: N.
        more: further arguments.
    """
    graph, bound = node.graph, bind_args(node)
    x = bound["input"]
    shape = x.meta["val"].shape
    with graph.inserting_before(node):
        rows = emit_call(graph, aten.reshape.default, x, [-1, shape[-1]])
        out = emit_call(graph, operator, rows, weight, bound["bias"], out_features, *more)
        if len(shape) != 2:
            # the dynamic dimension, the number of tokens, is what the others leave
            leading = [size if isinstance(size, int) else -1 for size in shape[:-1]]
            out = emit_call(graph, aten.reshape.default, out, [*leading, out_features])
    replace(node, out)


def why_not(
    user: fx.Node, weights: list[fx.Node], dtypes: Collection[torch.dtype] = UNITS
) -> str | None:
    """Why a call that reads one of these weights needs their rows; None where it does not.

    Args:
        dtypes: of rows that the operator takes.
    """
    if user.target is aten.embedding.default:
        if user.args[0] not in weights:
            return f"{user.name} looks values of it up"
        ids: Tensor = user.args[1].meta["val"]  # type: ignore[union-attr]
        if ids.dtype != torch.int64:
            return f"{user.name} looks {ids.dtype} up"
        return _why_not_flat(ids.shape)
    if user.target is not aten.linear.default:
        return f"{user.name} reads it too"
    bound = bind_args(user)
    if bound["weight"] not in weights or bound["input"] in weights or bound["bias"] in weights:
        return f"{user.name} reads it as another argument"
    values: list[Tensor] = [x.meta["val"] for x in bound.values() if x is not None]
    x, weight = values[:2]
    if x.dtype not in dtypes or any(value.dtype != x.dtype for value in values):
        return f"dtypes {', '.join(str(value.dtype) for value in values)}"
    if weight.dim() != 2:
        return f"a weight of {weight.dim()} dimensions"
    return _why_not_flat(x.shape)


def _why_not_flat(shape: torch.Size) -> str | None:
    """Why nothing can be flattened to rows and back."""
    if sum(not isinstance(size, int) for size in shape) > 1:
        return f"more than one dynamic dimension in {list(shape)}"
    return None
