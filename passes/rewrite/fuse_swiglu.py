"""Fuse the gate of a feed-forward layer into one operator."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.rewrite.columns import columns

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
    aten.gelu.default: "gelu",
}


class FuseSwiGLU(Pass):
    """`act(x[…, :I]) · x[…, I:]` → `specc.act_and_mul(x, act)`; x is mostly one linear layer.

    The operator activates the first half, so halves in the other order stay as they are.
    """

    requires = (attention_is_a_tree,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.mul.Tensor):
            gates = [item for item in node.all_input_nodes if _activation(item)]
            if not gates or len(node.all_input_nodes) != 2:
                continue
            found = [_match(node, gate) for gate in gates]
            source = next((item for item in found if isinstance(item, fx.Node)), None)
            if source is None:
                result.decline(node.name, str(found[0]))
                continue
            gate = gates[found.index(source)]
            with program.graph.inserting_before(node):
                fused = emit_call(program.graph, ops.act_and_mul, source, _activation(gate))
            if "nn_module_stack" in node.meta:
                fused.meta["nn_module_stack"] = node.meta["nn_module_stack"]
            replace(node, fused)
            result.rewrites += 1
        program.graph.eliminate_dead_code()
        return result


def _activation(node: fx.Node) -> str:
    """Name of an activation as the operator knows it, or an empty string."""
    name = _ACTIVATIONS.get(node.target, "")
    if name == "gelu" and bind_args(node)["approximate"] == "tanh":
        return "gelu_tanh"
    return name


def _match(product: fx.Node, gate: fx.Node) -> fx.Node | str:
    """What the two factors are halves of, or why they are not."""
    (up,) = (item for item in product.all_input_nodes if item is not gate)
    pieces = columns(gate.args[0]), columns(up)
    if pieces[0] is None or pieces[1] is None or pieces[0][0] is not pieces[1][0]:
        return "gate and up are not halves of one tensor"
    source, (first, middle) = pieces[0][0], pieces[0][1:]
    value, size = source.meta["val"], int(source.meta["val"].shape[-1])
    if pieces[1][1:] == (0, size // 2) and (first, middle) == (size // 2, size):
        return "the activation is on the second half"
    if (first, middle, *pieces[1][1:]) != (0, size // 2, size // 2, size):
        return f"gate and up are columns {pieces[0][1:]} and {pieces[1][1:]} of {size}, not halves"
    if len(gate.users) > 1:
        return f"{gate.name}, the activated gate, is used elsewhere too"
    if value.dtype not in _DTYPES or product.meta["val"].dtype != value.dtype:
        return f"the product is {product.meta['val'].dtype}, its factors are {value.dtype}"
    return source
