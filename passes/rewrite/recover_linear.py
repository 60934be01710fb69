"""Find projections that a model writes as products with a transposed weight."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.base import Pass, PassResult
from specc.passes.facts import is_flat_call_graph
from specc.passes.program import Program, bind_args, emit_call, replace

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.mm.default)
# of a matrix
_TRANSPOSED = (
    aten.numpy_T.default, aten.t.default, aten.mT.default,
    aten.transpose.int, aten.permute.default,
)  # fmt: skip


class RecoverLinear(Pass):
    """`matmul(x, w.T)` → `linear(x, w)`, of a weight w [N, K] of the model.

    Falcon writes its projections so. As projections they are stored, quantized, fused and split
    like those of other models.
    """

    requires = (is_flat_call_graph,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(*_PRODUCTS):
            x, other = node.args[:2]
            weight = bind_args(other)["self"] if _is_transposed(other) else None
            if weight is None or weight.name not in program.weights:
                continue
            with program.graph.inserting_before(node):
                replace(node, emit_call(program.graph, aten.linear.default, x, weight))
            result.rewrites += 1
        program.graph.eliminate_dead_code()
        return result


def _is_transposed(node: object) -> bool:
    """Whether the rows of a matrix become columns."""
    if not isinstance(node, fx.Node) or node.target not in _TRANSPOSED:
        return False
    bound = bind_args(node)
    if bound["self"].meta["val"].dim() != 2:
        return False
    # two dimensions may also be left as they are
    if node.target is aten.transpose.int:
        return (bound["dim0"] - bound["dim1"]) % 2 == 1
    return node.target is not aten.permute.default or bound["dims"][0] % 2 == 1
