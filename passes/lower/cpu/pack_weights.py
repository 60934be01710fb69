"""Choose the weights that a CPU engine stores in blocks, as `specc.linear` reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor, fx

from specc.artifact.weight_layout import UNITS
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args

aten = torch.ops.aten


class PackWeights(Pass):
    """Weights of `aten.linear` → the same graph, the weights marked `in_blocks`.

    A weight that an embedding reads too (a tied output projection) is stored once, in blocks; one
    with other users keeps its rows, and so does what its projections read.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        by_key: dict[str, list[fx.Node]] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if node.target in program.weights:
                by_key.setdefault(program.weights[node.target].key, []).append(node)
        for nodes in by_key.values():
            users = [user for node in nodes for user in node.users]
            if not any(_is_weight(user, nodes) for user in users):
                continue
            reasons = [reason for user in users if (reason := why_not(user, nodes))]
            if reasons:
                result.decline(nodes[0].name, reasons[0])
                continue
            for node in nodes:
                weight = program.weights[node.target]
                program.weights[node.target] = dataclasses.replace(weight, in_blocks=True)
            result.rewrites += 1
        return result


def _is_weight(user: fx.Node, nodes: list[fx.Node]) -> bool:
    return user.target is aten.linear.default and bind_args(user)["weight"] in nodes


def why_not(
    user: fx.Node, weights: list[fx.Node], dtypes: Collection[torch.dtype] = UNITS
) -> str | None:
    """Why a call that reads one of these weights needs their rows; None where it does not.

    Args:
        user: the call.
        weights: inputs.
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
