"""Let the projections of a padded program read the integers that those of the flat one read."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, Weight, add_placeholder, bind_args, emit_call, replace

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
        result = PassResult()
        made: dict[Weight, fx.Node] = {}
        for node in program.calls(aten.linear.default):
            bound = bind_args(node)
            plain = program.weights.get(bound["weight"].target)
            weight = None if plain is None else self._weights.get(plain.parameters)
            if plain is None or weight is None or weight.quantized is None:
                result.decline(node.name, "its weight is not quantized")
                continue
            own = dataclasses.replace(plain, quantized=weight.quantized)
            if own not in made:
                made[own] = _add_weight(program, bound["weight"], own)
            layout = weight.quantized
            facts = (layout.bits, layout.group, layout.has_zeros, layout.is_float)
            with program.graph.inserting_before(node):
                x = self._ordered(program, bound["input"], weight)
                quantized = emit_call(
                    program.graph, ops.linear_q, x, made[own], bound["bias"], own.shape[0], *facts
                )
            replace(node, quantized)
            if not bound["weight"].users:
                program.graph.erase_node(bound["weight"])
                del program.weights[bound["weight"].target]
            result.rewrites += 1
        return result

    def _ordered(self, program: Program, x: fx.Node, weight: Weight) -> fx.Node:
        """Columns of x in the order in which the weight's are stored."""
        kept = self._integers.get(weight.parameters[0])
        if kept is None or kept.layout != weight.quantized or kept.columns is None:
            return x
        name = f"column_order_{weight.parameters[0].replace('.', '_')}"
        if name not in program.constants:
            beside = next(iter(program.graph.find_nodes(op="placeholder")))
            value = beside.meta["val"].new_empty(kept.columns.shape, dtype=torch.int64)
            add_placeholder(program, name, value, beside)
            program.constants[name] = kept.columns
        return emit_call(program.graph, aten.index_select.default, x, -1, program.placeholder(name))


def _add_weight(program: Program, beside: fx.Node, weight: Weight) -> fx.Node:
    assert weight.quantized is not None
    value = beside.meta["val"].new_empty(weight.stored_shape, dtype=torch.uint8)
    node = add_placeholder(program, f"{beside.target}_q{weight.quantized.bits}", value, beside)
    program.weights[node.target] = weight
    return node
