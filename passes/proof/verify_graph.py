"""The specification of a program, run between phases."""

from __future__ import annotations

import torch
from torch import fx

from specc.artifact.graph_io import target_name
from specc.errors import UnsupportedGraphError
from specc.passes.program import Program, refusal
from specc.passes.proof.verify_tokenwise import verify_tokenwise

# what reads a value on the host, or makes a shape depend on data: impossible in a captured step
_HOST_READS = (
    "aten._local_scalar_dense",
    "aten.item",
    "aten.nonzero",
    "aten.masked_select",
    "aten.unique",
    "aten._unique2",
    "aten.bincount",
    "aten.is_nonzero",
)


def verify_graph(program: Program, phase: str, is_final: bool) -> None:
    """Check a program's structure; after the last phase also what a runtime can execute.

    Raises:
        UnsupportedGraphError: names node, layer and reason.
        UnsupportedRotaryError: frequencies that depend on the longest position of a pass.
    """
    program.graph.lint()
    caches = (*program.caches, *program.target_caches, *program.states)
    known = {*program.weights, *program.constants, *caches}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.target in program.weights:
            weight, value = program.weights[node.target], node.meta["val"]
            # a lowered graph reads the blocks themselves
            if tuple(value.shape) not in (weight.shape, weight.stored_shape):
                raise refusal(node, phase, f"weight {weight.key} has shape {tuple(value.shape)}")
        if node.op == "call_function" and "val" not in node.meta:
            raise refusal(node, phase, "no value is known for it")
    orphans = known - {node.target for node in program.graph.find_nodes(op="placeholder")}
    if orphans:
        raise UnsupportedGraphError(
            f"{program.name} after {phase}: no input for {', '.join(sorted(orphans)[:3])}",
            "one graph input per weight, constant and cache",
            "report this: a pass broke the program",
        )
    if is_final:
        for node in program.graph.nodes:
            if node.op == "call_function":
                _check_call(node, phase)
        verify_tokenwise(program, phase)


def _check_call(node: fx.Node, phase: str) -> None:
    name = target_name(node.target)
    operator = name.rpartition(".")[0]
    if operator in _HOST_READS:
        raise refusal(
            node, phase, f"{name} reads values on the host or makes a shape depend on them"
        )
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    if is_operator and node.target.namespace != "specc" and node.target._schema.is_mutable:
        raise refusal(node, phase, f"{name} updates its input in place")
