"""Let projections read integers: `specc.linear_q` in place of `aten.linear`."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import fx

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.lower.cpu.linear import replace_linear
from specc.passes.lower.cpu.pack_weights import why_not
from specc.passes.pipeline import Phases
from specc.passes.program import Program, Weight, add_placeholder, bind_args

aten = torch.ops.aten
# of the head: its errors are those of the logits, and nothing after it evens them out
HEAD = QuantizedLayout(8)


def quantize_phases(name: str | None) -> Phases:
    """What the pipeline does before the backend's own phases.

    Args:
        name: of the layout of weights; None leaves them in the engine's dtype.
    """
    if name is None:
        return ()
    return (("quantize", (partial(QuantizeLinear, QuantizedLayout.named(name)),)),)


class QuantizeLinear(Pass):
    """`aten.linear(x, w, b)` → `specc.linear_q` over the flattened rows of x and a quantized w.

    The quantized weight is an input of its own: what else reads w, such as an embedding that the
    head is tied to, reads it as before, and an input that nobody reads any more is dropped. The
    last projection, the head, has 8 bits whatever the others have. Projections of fewer than 32
    outputs, such as the routers of small mixtures, and grouped products keep their weights.
    """

    def __init__(self, layout: QuantizedLayout) -> None:
        self._layout = layout

    def run(self, program: Program) -> PassResult:
        result, calls = PassResult(), program.calls(aten.linear.default)
        made: dict[Weight, fx.Node] = {}
        for node in calls:
            weight_node = bind_args(node)["weight"]
            if weight_node.target not in program.weights:
                result.decline(node.name, "its weight is computed")
                continue
            weight = program.weights[weight_node.target]
            reason = why_not(node, [weight_node])
            if reason is None and weight.shape[0] < BLOCK:
                reason = f"{weight.shape[0]} outputs, fewer than a block has"
            if reason is not None:
                result.decline(node.name, reason)
                continue
            layout = HEAD if node is calls[-1] else self._layout
            quantized = dataclasses.replace(weight, quantized=layout)
            if quantized not in made:
                made[quantized] = _add_input(program, weight_node, quantized)
            more = (layout.bits, layout.group, layout.has_zeros, layout.is_float)
            replace_linear(node, ops.linear_q, made[quantized], weight.shape[0], *more)
            if not weight_node.users:
                program.graph.erase_node(weight_node)
                del program.weights[weight_node.target]
            result.rewrites += 1
        return result


def _add_input(program: Program, beside: fx.Node, weight: Weight) -> fx.Node:
    value = beside.meta["val"].new_empty(weight.stored_shape, dtype=torch.uint8)
    node = add_placeholder(program, f"{beside.target}_q{weight.quantized.bits}", value, beside)  # type: ignore[union-attr]
    program.weights[node.target] = weight
    return node
