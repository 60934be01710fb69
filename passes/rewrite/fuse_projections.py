"""Fuse linear layers that read one input into one: q/k/v, gate/up, and those of a recurrence.

The weights are concatenated when the engine is written, not here: the program only records which
parameters a weight input is made of.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_cached, recurrences_are_trees
from specc.passes.program import Program, Weight, emit_call
from specc.passes.rewrite.absorb_latent import values_in_keys

aten = torch.ops.aten

# from a projection to attention: head split, rotary embedding, norms; stops at linear layers
_MAX_DISTANCE = 24


class FuseQKV(Pass):
    """`linear(x, Wq), linear(x, Wk), linear(x, Wv)` → one linear and three slices."""

    requires = (attention_is_cached,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.tree_attention, ops.masked_attention):
            linears = [_nearest_linear(operand) for operand in node.args[:3]]
            if any(linear is None for linear in linears):
                result.decline(
                    node.name, "q, k or v does not come from a linear layer (fused in the model?)"
                )
                continue
            _fuse(program, result, _unique(linears), node.name)
        program.graph.eliminate_dead_code()
        return result


class FuseLatentDown(Pass):
    """Projections to latents of queries and of keys → one linear and two slices.

    Where queries come from a latent, too (`q_lora_rank` of DeepSeek V3), `FuseQKV` finds the
    projections from the latents, which read two inputs. For backends that read the rows of what
    they normalize at any distance.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.tree_attention):
            if not values_in_keys(node):
                continue
            query, key = (_nearest_linear(operand) for operand in node.args[:2])
            if query is not None and key is not None and query.args[0] is not key.args[0]:
                query = _nearest_linear(query.args[0])
            if query is None or key is None or query.args[0] is not key.args[0]:
                result.decline(node.name, "no linear layers of one input lead to q and k")
                continue
            _fuse(program, result, _unique((query, key)), node.name)
        program.graph.eliminate_dead_code()
        return result


class FuseGateUp(Pass):
    """`act(linear(x, Wgate)) * linear(x, Wup)` → one linear and two slices."""

    requires = (attention_is_cached,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(program.calls(aten.mul.Tensor)):
            operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
            if len(operands) != 2:
                continue
            linears = [_through_activation(operand) for operand in operands]
            if None in linears or linears[0] is linears[1]:
                continue
            _fuse(program, result, sorted(linears), node.name)
        program.graph.eliminate_dead_code()
        return result


class FuseRecurrent(Pass):
    """Projections beside each other in a layer that keeps a state become one.

    Whatever reads the input of one that leads to a convolution or recurrence: q, k, v, gates of
    the output, decays. Those of fewer than 32 outputs stay alone, since none of them is ever
    quantized; and one that is stored in another way is no part of what the others become.
    """

    requires = (recurrences_are_trees,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        calls = program.calls(ops.tree_conv, ops.tree_recurrence)
        # before anything is fused: of a convolution x, of a recurrence q, k, v, g and beta
        operands = [
            operand
            for node in calls
            for operand in node.args[: 1 if node.target is ops.tree_conv else 5]
            if operand is not None
        ]
        found = [_nearest_linear(operand) for operand in operands]
        for x in _unique(linear.args[0] for linear in found if linear is not None):
            groups: dict[tuple[object, ...], list[fx.Node]] = {}
            for linear in _unique(x.users):
                if linear.target is aten.linear.default and linear.args[0] is x:
                    groups.setdefault(_kind(program, linear), []).append(linear)
            for (is_wide, *_), linears in groups.items():
                if is_wide and len(linears) > 1:
                    _fuse(program, result, sorted(linears), linears[0].name)
        program.graph.eliminate_dead_code()
        return result


def _kind(program: Program, linear: fx.Node) -> tuple[object, ...]:
    """Whether a linear layer has as many outputs as a block, and how its weight is stored."""
    value, weight = linear.args[1].meta["val"], program.weights.get(linear.args[1].target)
    kind = int(value.shape[0]) >= BLOCK, value.dtype, _bias(linear) is None
    if weight is None:
        return *kind, linear
    # of a weight that was fused before, `_why_not` compares the others
    return *kind, weight.is_turned, program.integers.get(weight.parameters[0])


def _fuse(program: Program, result: PassResult, linears: list[fx.Node], at: str) -> None:
    """Replace sibling linears by one, or decline with the reason."""
    if len(linears) < 2:
        result.decline(at, "one linear layer already computes all of them")
        return
    if reason := _why_not(program, linears):
        result.decline(at, reason)
        return
    graph = program.graph
    sizes = [int(linear.args[1].meta["val"].shape[0]) for linear in linears]
    weight = _concatenate(program, [linear.args[1] for linear in linears])
    operands = [linears[0].args[0], weight]
    if _bias(linears[0]) is not None:
        operands.append(_concatenate(program, [_bias(linear) for linear in linears]))
    with graph.inserting_before(min(linears)):
        fused = emit_call(graph, aten.linear.default, *operands)
        offset = 0
        for linear, size in zip(linears, sizes, strict=True):
            piece = emit_call(graph, aten.slice.Tensor, fused, -1, offset, offset + size)
            offset += size
            linear.replace_all_uses_with(piece)
    for linear in linears:
        parts = [operand for operand in (linear.args[1], _bias(linear)) if operand is not None]
        graph.erase_node(linear)
        for part in parts:
            program.weights.pop(part.target)
            graph.erase_node(part)
    result.rewrites += 1


def _why_not(program: Program, linears: list[fx.Node]) -> str | None:
    if len({linear.args[0] for linear in linears}) > 1:
        return "the linear layers read different inputs"
    if len({_bias(linear) is None for linear in linears}) > 1:
        return "some of the linear layers have a bias and some have none"
    for linear in linears:
        for operand in (linear.args[1], _bias(linear)):
            if operand is None:
                continue
            if operand.target not in program.weights:
                return f"{operand.name} is computed, not a parameter"
            if len(operand.users) > 1:
                return f"parameter {program.weights[operand.target].key} is used elsewhere too"
    if len({program.weights[linear.args[1].target].is_turned for linear in linears}) > 1:
        return "some of the weights are stored transposed and some are not"
    if len({linear.args[1].meta["val"].dtype for linear in linears}) > 1:
        return "the weights have different dtypes"
    names = [
        name for linear in linears for name in program.weights[linear.args[1].target].parameters
    ]
    layouts = {program.integers.get(name) for name in names}
    if len(layouts) > 1:
        told = sorted("not at all" if item is None else item.name for item in layouts)
        return f"the weights are quantized in different ways: {', '.join(told)}"
    return None


def _concatenate(program: Program, parts: list[fx.Node]) -> fx.Node:
    weights = [program.weights[part.target] for part in parts]
    rows = sum(weight.shape[0] for weight in weights)
    fused = Weight(
        tuple(name for weight in weights for name in weight.parameters),
        weights[0].dtype,
        (rows, *weights[0].shape[1:]),
        is_turned=weights[0].is_turned,
    )
    value = parts[0].meta["val"]
    with program.graph.inserting_before(parts[0]):
        node = program.graph.placeholder(f"{parts[0].target}_fused")
    node.meta["val"] = value.new_empty(fused.shape)
    program.weights[node.target] = fused
    return node


def _bias(linear: fx.Node) -> fx.Node | None:
    return linear.args[2] if len(linear.args) > 2 else None


def _unique(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))


def _nearest_linear(node: fx.Node) -> fx.Node | None:
    """The linear layer that an attention operand comes from, along its first tensor inputs."""
    frontier, seen = [node], {node}
    for _ in range(_MAX_DISTANCE):
        following = []
        for item in frontier:
            if item.target is aten.linear.default:
                return item
            if item.target in (aten.addmm.default, aten.mm.default):
                return None
            following += [
                n for n in item.all_input_nodes if n not in seen and n.op == "call_function"
            ]
            seen.update(item.all_input_nodes)
        frontier = following
    return None


def _through_activation(node: fx.Node) -> fx.Node | None:
    """A linear layer, directly or after one activation."""
    activations = (
        aten.silu.default,
        aten.gelu.default,
        aten.relu.default,
        aten.sigmoid.default,
        aten.tanh.default,
    )
    if node.target in activations and len(node.users) == 1:
        node = node.args[0]
    return node if node.target is aten.linear.default else None
