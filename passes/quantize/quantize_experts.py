"""Let the experts of mixtures read integers: `specc.grouped_mm_q` for `specc.grouped_mm`."""

from __future__ import annotations

import torch
from torch import fx

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK, UNITS
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.quantize.quantized_inputs import (
    QuantizedInputs,
    kept_of,
    name_sums,
    order_columns,
    whole_shape,
)

aten = torch.ops.aten


class QuantizeExperts(Pass):
    """`specc.grouped_mm(x, w, ends)` → `specc.grouped_mm_q` by quantized matrices of w's experts.

    w is a parameter [E, K, N], or the transpose of a parameter [E, N, K]; integers are of rows
    [N, K] in both cases. Experts of fewer than 32 outputs keep their weights, and so do those that
    something else reads. Integers of the checkpoint are kept where all experts of a parameter have
    them in one layout.

    Args:
        layout: of weights that the checkpoint has no integers of; None leaves them as they are.
        is_read: the backend has such a product; else all weights are left as they are.
    """

    def __init__(self, layout: QuantizedLayout | None, is_read: bool = True) -> None:
        self._layout, self._is_read = layout, is_read

    def run(self, program: Program) -> PassResult:
        result, inputs = PassResult(), QuantizedInputs(program)
        for node in program.calls(ops.grouped_mm):
            bound = bind_args(node)
            x, read = bound["x"], bound["weight"]
            source = source_of(read)
            reason = (
                _why_not(program, x, read, source)
                if self._is_read
                else "the backend multiplies experts by floats alone"
            )
            if reason is not None:
                result.decline(node.name, reason)
                continue
            weight, is_turned = program.weights[source.target], source is read
            kept = kept_of(program, weight)
            if kept is not None and kept.is_turned != is_turned:
                result.decline(node.name, "the checkpoint's integers are of columns, not of rows")
                continue
            layout = self._layout if kept is None else kept.layout
            if layout is None:
                result.decline(node.name, "the checkpoint has no integers of its weight")
                continue
            outputs = read.meta["val"].shape[2]
            blocks = inputs.add(source, layout, is_turned)
            if kept is not None and kept.columns is not None:
                order_columns(program, node, blocks, kept.columns)
            with program.graph.inserting_before(node):
                x, ends = bind_args(node)["x"], bound["ends"]
                out = emit_call(
                    program.graph, ops.grouped_mm_q, x, blocks, ends, outputs, *layout.facts
                )
            replace(node, out)
            if read is not source:
                program.graph.erase_node(read)
            inputs.drop(source)
            result.rewrites += 1
        name_sums(program)
        return result


def source_of(read: fx.Node) -> fx.Node:
    """The input [E, N, K] whose transpose a product reads; what it reads where it is no such."""
    if read.target is not aten.transpose.int:
        return read
    bound = bind_args(read)
    dims = {bound["dim0"] % 3, bound["dim1"] % 3} if read.meta["val"].dim() == 3 else set()
    return bound["self"] if dims == {1, 2} else read


def _why_not(program: Program, x: fx.Node, read: fx.Node, source: fx.Node) -> str | None:
    """Why a product keeps its weight; None where it does not."""
    if source.target not in program.weights:
        return "its weight is computed"
    if len(read.users) > 1 or (read is not source and len(source.users) > 1):
        return "something else reads its weight, too"
    kinds = x.meta["val"].dtype, source.meta["val"].dtype
    if kinds[0] not in UNITS or kinds[0] != kinds[1]:
        return f"dtypes {kinds[0]}, {kinds[1]}"
    outputs = whole_shape(program, program.weights[source.target])[2 if read is source else 1]
    if outputs < BLOCK:
        return f"{outputs} outputs, fewer than a block has"
    return None
