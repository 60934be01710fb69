"""Let the projections of a padded program read the integers that those of the flat one read."""

from __future__ import annotations

import torch

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, Weight, bind_args, emit_call, replace
from specc.passes.quantize.quantized_inputs import QuantizedInputs, order_columns

aten = torch.ops.aten


class QuantizeLike(Pass):
    """`aten.linear(x, w, b)` → `specc.linear_q(x, …)`, x [B, N, K], where the flat program has it.

    Args:
        flat: program of the same model, after its last phase.
    """

    def __init__(self, flat: Program) -> None:
        self._integers = flat.integers
        self._weights: dict[tuple[str, ...], Weight] = {}
        for node in flat.calls(ops.linear_q):
            weight = flat.weights[bind_args(node)["weight"].target]
            self._weights[weight.parameters] = weight

    def run(self, program: Program) -> PassResult:
        result, inputs = PassResult(), QuantizedInputs(program)
        for node in program.calls(aten.linear.default):
            read = bind_args(node)["weight"]
            plain = program.weights.get(read.target)
            weight = None if plain is None else self._weights.get(plain.parameters)
            if weight is None or weight.quantized is None:
                result.decline(node.name, "its weight is not quantized")
                continue
            layout = weight.quantized
            own = inputs.add(read, layout)
            kept = self._integers.get(weight.parameters[0])
            if kept is not None and kept.layout == layout and kept.columns is not None:
                order_columns(program, node, own, kept.columns)
            bound = bind_args(node)
            with program.graph.inserting_before(node):
                quantized = emit_call(
                    program.graph, ops.linear_q, bound["input"], own, bound["bias"],
                    weight.shape[0], *layout.facts,
                )  # fmt: skip
            replace(node, quantized)
            inputs.drop(read)
            result.rewrites += 1
        return result
