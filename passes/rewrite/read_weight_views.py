"""Multiply with views of weights in place of their copies."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program

aten = torch.ops.aten
_VIEWS = (
    aten.view.default, aten.slice.Tensor, aten.transpose.int, aten.permute.default,
    aten.select.int, aten.unsqueeze.default, aten.squeeze.dim,
)  # fmt: skip


class ReadWeightViews(Pass):
    """`bmm` with `contiguous` rows of a parameter → with the rows where they are.

    Absorbed latents multiply with some rows of each head's weight (`AbsorbLatent`). Rows that lie
    side by side are faster on a CPU; a GPU's library takes any distance between matrices, and the
    copies would be made in every step.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.contiguous.default):
            if _source(node).target not in program.weights:
                continue
            with result.attempt(node.name):
                if not _is_of_products(node):
                    raise NoMatch("another than a batch of products reads the copy")
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        program.graph.eliminate_dead_code()
        return result


def _source(copy: fx.Node) -> fx.Node:
    node: fx.Node = copy.args[0]  # type: ignore[assignment]
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_of_products(node: fx.Node) -> bool:
    """Whether all that reads the copy, or its transpose, is a factor of `bmm`."""
    return all(
        user.target is aten.bmm.default
        or (user.target is aten.transpose.int and _is_of_products(user))
        for user in node.users
    )
