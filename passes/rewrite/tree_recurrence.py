"""Rewrite convolutions and recurrences over tokens into those over trees, with states as inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import has_no_dense_recurrence, is_off_meta_device, recurrences_are_trees
from specc.passes.program import (
    GEOMETRY,
    RUNTIME_INPUTS,
    STATES,
    Program,
    StateLayer,
    add_placeholder,
    bind_args,
    emit_call,
    last_placeholder,
    module_path,
    replace,
)

aten = torch.ops.aten
# inputs of both operators after state and rows, in order
_INPUTS = ("q_start", "slot", "cache_len", "ancestors")


class RewriteTreeRecurrence(Pass):
    """`dense_conv(x, …)` → `tree_conv(x, …, state, rows, …)`; `dense_recurrence` likewise.

    Each gets two inputs, in the order of execution: the states of all sequences, and the replay
    rows of the nodes of a step. All share one more, `states`, which says where a sequence has its
    own, and how many of its nodes are certain.
    """

    requires = (is_off_meta_device,)
    ensures = (has_no_dense_recurrence, recurrences_are_trees)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        nodes = program.calls(ops.dense_conv, ops.dense_recurrence)
        if not nodes:
            return result
        geometry = program.placeholder(GEOMETRY).meta["val"]
        inputs = [program.placeholder(name) for name in _INPUTS]
        inputs.append(_add_states(program))
        last = last_placeholder(graph)
        for number, node in enumerate(nodes):
            layer = state_layer(node, module_path(node) or node.name)
            caches = []
            for part in ("state", "rows"):
                sizes = state_sizes(layer, part, *geometry.shape[2:])
                value = geometry.new_empty(sizes, dtype=layer.dtype)
                last = add_placeholder(program, f"{part}_{number}", value, last)
                program.states[last.target] = (number, part)
                caches.append(last)
            with graph.inserting_before(node):
                flat, others = _flat_operands(node)
                target = ops.tree_conv if layer.kind == "conv" else ops.tree_recurrence
                computed = emit_call(graph, target, *flat, *caches, *inputs, **others)
                output = emit_call(graph, aten.unsqueeze.default, computed, 0)
            computed.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            program.state_layers.append(layer)
            replace(node, output)
            result.rewrites += 1
        graph.eliminate_dead_code()
        return result


def state_layer(node: fx.Node, name: str) -> StateLayer:
    """What a convolution or recurrence remembers of a sequence, dense or over trees.

    Raises:
        UnsupportedAttentionError: key heads that do not divide the value heads.
    """
    bound = bind_args(node)
    if node.target in (ops.dense_conv, ops.tree_conv):
        channels, width = (int(n) for n in bound["weight"].meta["val"].shape)
        dtype = bound["x"].meta["val"].dtype
        return StateLayer(name, "conv", (width - 1, channels), channels, dtype)
    key_heads, key_dim = (int(n) for n in bound["k"].meta["val"].shape[-2:])
    heads, value_dim = (int(n) for n in bound["v"].meta["val"].shape[-2:])
    if heads % key_heads:
        raise UnsupportedAttentionError(
            f"layer {name}: {heads} value heads and {key_heads} key heads of a recurrence",
            "a number of key heads that divides that of value heads",
            "check the model's configuration",
        )
    has_beta = bound["beta"] is not None
    is_by_row = bound["g"].meta["val"].dim() == bound["v"].meta["val"].dim()
    columns = key_heads * key_dim + heads * value_dim
    columns += heads * (key_dim if is_by_row else 1) + heads * has_beta
    shape = heads, key_dim, value_dim
    return StateLayer(name, "recurrence", shape, columns, torch.float32, key_heads, has_beta)


def state_sizes(layer: StateLayer, part: str, states: Any, rows: Any) -> tuple[Any, ...]:
    """Sizes of an input.

    Args:
        part: `state` or `rows`.
        states: how many sequences have one.
        rows: replay rows of each.
    """
    return (states, *layer.shape) if part == "state" else (states, rows, layer.columns)


def with_states(inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a program's inputs, and `states` directly after those that every program has."""
    count = len(RUNTIME_INPUTS)
    return (*inputs[:count], STATES, *inputs[count:])


def _add_states(program: Program) -> fx.Node:
    """The input `states` [B, 2], directly after those that every program has."""
    lengths: Tensor = program.placeholder("cache_len").meta["val"]
    value = lengths.new_empty((lengths.shape[0], 2))
    program.runtime_inputs = with_states(program.runtime_inputs)
    return add_placeholder(program, STATES, value, program.placeholder(RUNTIME_INPUTS[-1]))


def _flat_operands(node: fx.Node) -> tuple[list[fx.Node | None], dict[str, Any]]:
    """Operands of the operator over trees: those of tokens without the dimension of one batch."""
    graph, bound = node.graph, bind_args(node)
    if node.target is ops.dense_conv:
        x = emit_call(graph, aten.squeeze.dim, _turned_back(bound["x"]), 0)
        others = {"activation": bound["activation"]} if bound["activation"] else {}
        return [x, bound["weight"], bound["bias"]], others
    operands = (bound[name] for name in ("q", "k", "v", "g", "beta"))
    flat = [None if x is None else emit_call(graph, aten.squeeze.dim, x, 0) for x in operands]
    return flat, {}


def _turned_back(node: fx.Node) -> fx.Node:
    """What is transposed twice, as it was: models convolve [1, C, T]."""
    pair = node, node.args[0]
    if all(x.target is aten.transpose.int for x in pair):
        dims = [{d % node.meta["val"].dim() for d in x.args[1:]} for x in pair]
        if dims[0] == dims[1]:
            return pair[1].args[0]
    return node
