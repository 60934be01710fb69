"""Let products of heads write the rows of a token side by side, where a copy would make them so."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, emit_call, replace
from specc.passes.rewrite.columns import only_user

aten = torch.ops.aten
_MOVES = (aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int)
_RESHAPES = (aten.reshape.default, aten.view.default)


class WriteHeadsByToken(Pass):
    """`bmm` [H, Nt, N], copied as [Nt, H, N] → `specc.bmm_by_token`, and a copy of nothing.

    So do values that follow attention over latents (`AbsorbLatent`) before the output's projection.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.bmm.default):
            with result.attempt(node.name):
                _require_copy(node)
                with program.graph.inserting_before(node):
                    product = emit_call(program.graph, ops.bmm_by_token, *node.args)
                replace(node, product)
        return result


def _require_copy(product: fx.Node) -> None:
    """Raises NoMatch: nothing but a copy with heads after tokens reads the product."""
    node = only_user(product)
    while node is not None and (node.target in _MOVES or _changes_no_shape(node)):
        node = only_user(node)
    if node is None or node.target is not aten.contiguous.default:
        raise NoMatch("no copy alone reads it")
    heads, tokens, size = product.meta["val"].shape
    found = [str(x) for x in node.meta["val"].shape if not (isinstance(x, int) and x == 1)]
    if heads == 1 or found != [str(tokens), str(heads), str(size)]:
        raise NoMatch("the copy has heads before tokens")


def _changes_no_shape(node: fx.Node) -> bool:
    if node.target not in _RESHAPES:
        return False
    before = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return list(map(str, before)) == list(map(str, node.meta["val"].shape))
