"""Let projections read integers: `specc.linear_q` in place of `aten.linear`."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor, fx

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.lower.cpu.linear import replace_linear
from specc.passes.lower.cpu.pack_weights import why_not
from specc.passes.pipeline import Phases
from specc.passes.program import Program, Weight, add_placeholder, bind_args, emit_call

aten = torch.ops.aten
# of the head: its errors are those of the logits, and nothing after it evens them out
HEAD = QuantizedLayout(8)
# float16 on devices, and in files for others
_ROWS = (torch.float32, torch.bfloat16, torch.float16)


def quantize_phases(name: str | None, keeps_integers: bool = False) -> Phases:
    """What the pipeline does before the backend's own phases.

    Args:
        name: of the layout of weights; None leaves them in the engine's dtype.
        keeps_integers: a model has integers in its checkpoint, see `Program.integers`.
    """
    if name is None and not keeps_integers:
        return ()
    layout = None if name is None else QuantizedLayout.named(name)
    return (("quantize", (partial(QuantizeLinear, layout),)),)


class QuantizeLinear(Pass):
    """`aten.linear(x, w, b)` → `specc.linear_q` over the flattened rows of x and a quantized w.

    The quantized weight is an input of its own: what else reads w, such as an embedding that the
    head is tied to, reads it as before, and an input that nobody reads any more is dropped. The
    last projection, the head, has 8 bits whatever the others have. Projections of fewer than 32
    outputs, such as the routers of small mixtures, and grouped products keep their weights.

    A weight of which the checkpoint has integers keeps those, the head's, too.

    Args:
        layout: of the others; None leaves them as they are.
    """

    def __init__(self, layout: QuantizedLayout | None) -> None:
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
            reason = why_not(node, [weight_node], _ROWS)
            if reason is None and weight.shape[0] < BLOCK:
                reason = f"{weight.shape[0]} outputs, fewer than a block has"
            if reason is not None:
                result.decline(node.name, reason)
                continue
            kept = _kept(program, weight)
            layout = None if kept is None else kept.layout
            if layout is None and self._layout is not None:
                layout = HEAD if node is calls[-1] else self._layout
            if layout is None:
                result.decline(node.name, "the checkpoint has no integers of its weight")
                continue
            quantized = dataclasses.replace(weight, quantized=layout)
            if quantized not in made:
                made[quantized] = _add_input(program, weight_node, quantized)
            if kept is not None and kept.columns is not None:
                _order_columns(program, node, weight_node, kept.columns)
            more = (layout.bits, layout.group, layout.has_zeros, layout.is_float)
            replace_linear(node, ops.linear_q, made[quantized], weight.shape[0], *more)
            if not weight_node.users:
                program.graph.erase_node(weight_node)
                del program.weights[weight_node.target]
            result.rewrites += 1
        return result


def _kept(program: Program, weight: Weight) -> KeptIntegers | None:
    """What is kept of the checkpoint; None where not all of its parts have the same."""
    found = {program.integers.get(name) for name in weight.parameters}
    return found.pop() if len(found) == 1 else None


def _order_columns(program: Program, node: fx.Node, beside: fx.Node, columns: Tensor) -> None:
    """Let a projection read its rows in the order in which the weight's columns are stored."""
    name = next((k for k, v in program.constants.items() if _is_order(v, columns)), None)
    if name is None:
        name = f"column_order_{len(program.constants)}"
        inputs = program.graph.find_nodes(op="placeholder")
        first = next(item for item in inputs if item.target in program.runtime_inputs)
        value = beside.meta["val"].new_zeros(columns.shape, dtype=torch.int64)
        add_placeholder(program, name, value, first.prev)
        program.constants[name] = columns
    x = bind_args(node)["input"]
    with program.graph.inserting_before(node):
        ordered = emit_call(
            program.graph, aten.index_select.default, x, -1, program.placeholder(name)
        )
    node.replace_input_with(x, ordered)


def _is_order(value: Tensor, columns: Tensor) -> bool:
    return value.dtype == torch.int64 and torch.equal(value, columns)


def _add_input(program: Program, beside: fx.Node, weight: Weight) -> fx.Node:
    value = beside.meta["val"].new_empty(weight.stored_shape, dtype=torch.uint8)
    node = add_placeholder(program, f"{beside.target}_q{weight.quantized.bits}", value, beside)  # type: ignore[union-attr]
    program.weights[node.target] = weight
    return node
