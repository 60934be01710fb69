"""The specification of a program, run between phases."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specc.errors import UnsupportedGraphError, UnsupportedRotaryError
from specc.graph_io import target_name
from specc.passes.program import Program, module_path, upstream

aten = torch.ops.aten

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
# what mixes tokens: right for a whole sequence, wrong for tokens of a tree
_TOKEN_MIXERS = (
    "aten.cumsum",
    "aten.cumprod",
    "aten.diff",
    "aten.roll",
    "aten.flip",
    "aten.conv1d",
    "aten.convolution",
    "aten.max_pool1d",
)
_MAXIMA = ("aten.max.default", "aten.amax.default", "aten.max.dim")


def verify_graph(program: Program, phase: str, is_final: bool) -> None:
    """Check a program's structure; after the last phase also what a runtime can execute.

    Raises:
        UnsupportedGraphError: names node, layer and reason.
        UnsupportedRotaryError: frequencies that depend on the longest position of a pass.
    """
    program.graph.lint()
    known = set(program.weights) | set(program.constants) | set(program.caches)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.target in program.weights:
            weight, value = program.weights[node.target], node.meta["val"]
            if tuple(value.shape) != weight.shape:
                raise _error(node, phase, f"weight {weight.key} has shape {tuple(value.shape)}")
        if node.op == "call_function" and "val" not in node.meta:
            raise _error(node, phase, "no value is known for it")
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


def _check_call(node: fx.Node, phase: str) -> None:
    name = target_name(node.target)
    operator = name.rpartition(".")[0]
    if name in _MAXIMA and _reads_positions(node):
        raise UnsupportedRotaryError(
            f"layer {module_path(node) or node.name}: {name} over the positions of the pass",
            "rotary frequencies that depend on each token's own position only",
            "choose a rotary scaling without dependence on length (linear, llama3, yarn)",
        )
    if operator in _HOST_READS:
        raise _error(
            node, phase, f"{name} reads values on the host or makes a shape depend on them"
        )
    if operator in _TOKEN_MIXERS and _has_token_dimension(node):
        raise _error(node, phase, f"{name} mixes tokens outside attention")
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    if is_operator and node.target.namespace != "specc" and node.target._schema.is_mutable:
        raise _error(node, phase, f"{name} updates its input in place")


def _has_token_dimension(node: fx.Node) -> bool:
    """Whether the operator's dimension has a symbolic size."""
    value = node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, Tensor):
        return False
    dim = next((arg for arg in node.args[1:] if type(arg) is int), -1)
    if "conv" in str(node.target) or "pool" in str(node.target):
        dim = -1
    return value.dim() > 0 and not isinstance(value.shape[dim], int)


def _reads_positions(node: fx.Node) -> bool:
    return any(item.op == "placeholder" and item.target == "positions" for item in upstream(node))


def _error(node: fx.Node, phase: str, reason: str) -> UnsupportedGraphError:
    where = module_path(node)
    return UnsupportedGraphError(
        f"{where + ': ' if where else ''}node {node.name} after {phase}: {reason}",
        "token-wise operators of aten and specc, and attention",
        "choose a model of a supported architecture (see README, What is supported), or report it",
    )
