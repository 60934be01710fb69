"""Drop masks over tokens of experts that no router can choose."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from specc.passes.base import Pass, PassResult
from specc.passes.facts import is_off_meta_device
from specc.passes.program import Program, bind_args
from specc.passes.rewrite.columns import same_shape

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default)
_INTEGERS = (torch.int32, torch.int64)


class DropSentinelMasks(Pass):
    """`masked_fill(x, expert ids ≥ E, value)` → x, where the ids are places among at most E.

    transformers 5.17 masks the rows of tokens that belong to other ranks' experts, which have an id
    past the last, in every mixture; later versions only where experts are shared out. Here every
    rank routes its own tokens: an id is one of `topk` over the router's columns.
    """

    requires = (is_off_meta_device,)
    ensures = ()

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.masked_fill.Scalar):
            source, mask = node.args[:2]
            if (compared := _compared_ids(mask)) is None:
                continue
            ids, num_experts = compared
            # a mask of more rows repeats what it hides
            if not same_shape(source.meta["val"], node.meta["val"]):
                continue
            # of other integers it says something else
            if (count := _places(ids)) is None:
                continue
            if count > num_experts:
                result.decline(node.name, f"ids below {count}, of {num_experts} experts here")
                continue
            node.replace_all_uses_with(source)
            result.rewrites += 1
        program.graph.eliminate_dead_code()
        return result


def _compared_ids(mask: Any) -> tuple[fx.Node, int] | None:
    """(ids, E) of a column that says where integers are at least E."""
    if not isinstance(mask, fx.Node) or mask.target is not aten.unsqueeze.default:
        return None
    compared = mask.args[0]
    if not isinstance(compared, fx.Node) or compared.target is not aten.ge.Scalar:
        return None
    ids, bound = compared.args
    if type(bound) is not int or ids.meta["val"].dtype not in _INTEGERS:
        return None
    return ids, bound


def _places(ids: Any) -> int | None:
    """Of how many values `topk` chose those whose places these are, in any order; None: unknown."""
    while isinstance(ids, fx.Node):
        if ids.target in _RESHAPES or (
            ids.target is aten.to.dtype and ids.meta["val"].dtype in _INTEGERS
        ):
            ids = ids.args[0]
            continue
        if ids.target is not operator.getitem:
            return None
        chosen, output = ids.args
        if chosen.target is aten.sort.default and output == 0:
            ids = chosen.args[0]
            continue
        if chosen.target is not aten.topk.default or output != 1:
            return None
        bound = bind_args(chosen)
        count = bound["self"].meta["val"].shape[bound["dim"]]
        return count if type(count) is int else None
    return None
