"""Fuse the last norm with the choice of rows and the projection to the vocabulary."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import logits_are_selected
from specc.passes.program import Program, emit_call, replace
from specc.passes.rewrite.columns import only_user
from specc.passes.rewrite.fuse_add_norm import require_parameters

aten = torch.ops.aten


class FuseNormHead(Pass):
    """`add_rms_norm`, rows that are asked for, a linear layer → `specc.add_norm_head`.

    On a device one kernel for few rows, and the operators that it replaces for many.
    """

    requires = (logits_are_selected,)
    ensures = (logits_are_selected,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.add_rms_norm):
            with result.attempt(node.name):
                _fuse(program, node)
        program.graph.eliminate_dead_code()
        return result


def _fuse(program: Program, norm: fx.Node) -> None:
    rows = program.placeholder("logit_rows")
    # the sum may have other readers: then the norm stays for them, and is computed here once more
    normed = next((user for user in norm.users if user.args[1] == 0), None)
    chosen = None if normed is None else only_user(normed)
    if chosen is None or chosen.target is not aten.index_select.default:
        raise NoMatch("no rows are chosen of the norm")
    dim, index = chosen.args[1:]
    ndim = norm.args[0].meta["val"].dim()  # type: ignore[union-attr]
    if index is not rows or dim % ndim != ndim - 2:  # type: ignore[operator]
        raise NoMatch("what is chosen is not rows of tokens")
    linear = only_user(chosen)
    if linear is None or linear.target is not aten.linear.default or linear.args[0] is not chosen:
        raise NoMatch("the rows are not read by one linear layer alone")
    weight, bias = linear.args[1], linear.args[2] if len(linear.args) > 2 else None
    dtype = norm.args[0].meta["val"].dtype  # type: ignore[union-attr]
    require_parameters(program, dtype, norm.args[2], weight, bias)  # type: ignore[arg-type]
    operands = (*norm.args, *(() if len(norm.args) > 4 else (False,)), weight, bias, rows)
    with program.graph.inserting_before(linear):
        head = emit_call(program.graph, ops.add_norm_head, *operands)
    head.meta["nn_module_stack"] = linear.meta.get("nn_module_stack")
    replace(linear, head)
