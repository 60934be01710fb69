"""Put `specc.linear` in place of `aten.linear`: the CPU's own projection of few rows."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, replace

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16)


class LowerLinear(Pass):
    """`aten.linear(x, w, b)` → `specc.linear` over the flattened rows of x.

    A step projects 1 to about 32 rows, which is bound by reading w. The weight keeps the layout of
    the checkpoint, so every backend reads the same file.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.linear.default):
            bound = bind_args(node)
            if reason := _why_not(bound):
                result.decline(node.name, reason)
                continue
            _lower(node, bound)
            result.rewrites += 1
        return result


def _why_not(bound: dict[str, fx.Node | None]) -> str | None:
    values: list[Tensor] = [x.meta["val"] for x in bound.values() if x is not None]
    x, weight = values[:2]
    if x.dtype not in _DTYPES or any(value.dtype != x.dtype for value in values):
        return f"dtypes {', '.join(str(value.dtype) for value in values)}"
    if weight.dim() != 2:
        return f"a weight of {weight.dim()} dimensions"
    if sum(not isinstance(size, int) for size in x.shape) > 1:
        return f"more than one dynamic dimension in {list(x.shape)}"
    return None


def _lower(node: fx.Node, bound: dict[str, fx.Node | None]) -> None:
    graph, x = node.graph, bound["input"]
    assert x is not None
    shape = x.meta["val"].shape
    with graph.inserting_before(node):
        rows = emit_call(graph, aten.reshape.default, x, [-1, shape[-1]])
        out = emit_call(graph, ops.linear, rows, bound["weight"], bound["bias"])
        if len(shape) != 2:
            # the dynamic dimension, the number of tokens, is what the others leave
            leading = [size if isinstance(size, int) else -1 for size in shape[:-1]]
            out = emit_call(graph, aten.reshape.default, out, [*leading, out.meta["val"].shape[-1]])
    replace(node, out)
