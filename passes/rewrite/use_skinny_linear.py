"""Let what is left of a model's linear layers run as kernels of their own where rows are few."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.rewrite.fuse_add_norm import require_linear

aten = torch.ops.aten


class UseSkinnyLinear(Pass):
    """`linear` by parameters → `specc.skinny_linear`.

    Runs after the passes that fuse products with what stands around them; what is left are the
    products after attention and after a gate, routers, and those of models with layer norms. On a
    device the operator is the library's product, or a kernel for few rows where that was measured
    to be faster.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.linear.default):
            with result.attempt(node.name):
                _use(program, node)
        return result


def _use(program: Program, linear: fx.Node) -> None:
    bound = bind_args(linear)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    require_linear(program, x.meta["val"].dtype, weight, bias)
    with program.graph.inserting_before(linear):
        found = emit_call(program.graph, ops.skinny_linear, x, weight, bias)
    found.meta["nn_module_stack"] = linear.meta.get("nn_module_stack")
    replace(linear, found)
