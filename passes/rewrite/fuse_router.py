"""Fuse a mixture's router into one operator, from its product to the weights of the experts."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.rewrite.columns import is_conversion, through_widening
from specc.passes.rewrite.expert_groups import Groups, grouped, node_of, output_of

aten = torch.ops.aten
_FUNCTIONS = {aten.softmax.int: "softmax", aten.sigmoid.default: "sigmoid"}


class FuseRouter(Pass):
    """Linear layer, softmax or sigmoid, groups, `topk`, weights of `specc.experts` → `specc.route`.

    What it takes: a softmax over all experts or over the chosen ones, or a sigmoid; a correction
    that is added for the choice alone; the best groups, by their best or their two best experts;
    weights that are divided by their sum, and scaled.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.experts):
            with result.attempt(node.name):
                _fuse(program, node)
        program.graph.eliminate_dead_code()
        return result


@dataclass(frozen=True)
class _Weights:
    """What becomes of the weights of chosen experts; arguments of `specc.route`."""

    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class _Choice:
    """How experts are chosen.

    Args:
        logits: of all experts.
        scores: of `specc.kernels.reference.routing.SCORES`.
        correction: see `route_reference`; a parameter, a constant, or None.
        groups: see there.
    """

    logits: fx.Node
    scores: str
    correction: fx.Node | None
    groups: Groups


def _fuse(program: Program, experts: fx.Node) -> None:
    bound = bind_args(experts)
    topk = output_of(bound["ids"], aten.topk.default, 1, "ids are not the places of a topk")
    taken = bind_args(topk)
    if taken["dim"] not in (1, -1) or not taken["largest"]:
        raise NoMatch("ids are not those of a token's best experts")
    value, how = _scaled(bound["weights"])
    choice = _choice(program, value, topk)
    x, weight, bias = _product(program, choice.logits)
    if choice.groups.top_groups * _size(weight, choice.groups) < taken["k"]:
        raise NoMatch("the best groups have fewer experts than a token takes")
    with program.graph.inserting_before(experts):
        found = emit_call(
            program.graph, ops.route, x, weight, bias, choice.correction, choice.scores,
            taken["k"], how.normalize, how.eps, how.scale, *choice.groups,
        )  # fmt: skip
        outputs = [emit_call(program.graph, operator.getitem, found, i) for i in range(2)]
    found.meta["nn_module_stack"] = topk.meta.get("nn_module_stack")
    for name, new in zip(("ids", "weights"), outputs, strict=True):
        experts.replace_input_with(bound[name], new)


def _size(weight: fx.Node, groups: Groups) -> int:
    return int(weight.meta["val"].shape[0]) // groups.groups


def _scaled(node: fx.Node) -> tuple[fx.Node, _Weights]:
    """What was divided by its sum, then scaled."""
    how = _Weights()
    while True:
        node = _through_conversions(node)
        if node.target is aten.mul.Tensor and isinstance(node.args[1], int | float):
            if how.normalize:
                raise NoMatch("weights are scaled before they are divided by their sum")
            how = replace(how, scale=how.scale * node.args[1])
        elif node.target is aten.div.Tensor and not how.normalize:
            how = replace(how, normalize=True, eps=_eps_of_sum(node))
        else:
            return node, how
        node = node.args[0]  # type: ignore[assignment]


def _eps_of_sum(quotient: fx.Node) -> float:
    """What is added to the sum of a token's weights that they are divided by."""
    reason = "weights are divided by something else than their sum"
    value, total = quotient.args
    eps = 0.0
    if isinstance(total, fx.Node) and total.target is aten.add.Tensor:
        added = bind_args(total)
        if added["alpha"] != 1 or not isinstance(added["other"], float):
            raise NoMatch(reason)
        total, eps = added["self"], added["other"]
    bound = bind_args(node_of(total, aten.sum.dim_IntList, reason))
    if bound["self"] is not value or bound["dim"] not in ([1], [-1]) or not bound["keepdim"]:
        raise NoMatch(reason)
    return eps


def _choice(program: Program, value: fx.Node, topk: fx.Node) -> _Choice:
    """How experts are chosen whose weights are of this value, before they are scaled."""
    compared: fx.Node = topk.args[0]  # type: ignore[assignment]
    if value.target is aten.softmax.int:
        best = _through_conversions(value.args[0])
        if value.args[1] not in (1, -1) or not _is_output(best, topk, 0):
            raise NoMatch("a softmax over something else than a token's best experts")
        return _Choice(compared, "chosen", None, Groups())
    choice, groups, hidden = grouped(compared)
    correction = None
    if value.target is aten.gather.default:
        bound = bind_args(value)
        scores = bound["self"]
        if bound["dim"] not in (1, -1) or not _is_output(bound["index"], topk, 1):
            raise NoMatch("weights are those of other experts")
        if through_widening(choice) is not through_widening(scores):
            correction = _correction(program, choice, scores)
    elif _is_output(value, topk, 0):
        scores = choice
    else:
        raise NoMatch("weights are not those of a token's best experts")
    scores = _through_conversions(scores)
    name = _FUNCTIONS.get(scores.target)  # type: ignore[arg-type]
    if name is None:
        raise NoMatch("scores are neither a softmax nor a sigmoid of logits")
    if name == "softmax" and scores.args[1] not in (1, -1):
        raise NoMatch("a softmax over tokens")
    # with 0, experts of other groups may be better than those whose scores are negative
    if hidden != -math.inf and (hidden != 0 or correction is not None):
        raise NoMatch(f"experts of other groups have the score {hidden}")
    return _Choice(scores.args[0], name, correction, groups)  # type: ignore[arg-type]


def _correction(program: Program, choice: fx.Node, scores: fx.Node) -> fx.Node:
    """The parameter [E] that is added to scores where they are compared."""
    reason = "compared is something else than scores and a correction"
    bound = bind_args(node_of(choice, aten.add.Tensor, reason))
    if through_widening(bound["self"]) is not through_widening(scores) or bound["alpha"] != 1:
        raise NoMatch(reason)
    if not isinstance(bound["other"], fx.Node):
        raise NoMatch(reason)
    found = through_widening(bound["other"])
    if found.target not in program.weights and found.target not in program.constants:
        raise NoMatch("the correction is computed, not a parameter")
    if found.meta["val"].shape != scores.meta["val"].shape[1:]:
        raise NoMatch(reason)
    return found


def _product(program: Program, logits: Any) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Rows, weight and bias of a linear layer, without what widens them."""
    linear = node_of(
        _through_conversions(logits), aten.linear.default, "logits are not those of a linear layer"
    )
    x, weight, *more = (through_widening(item) for item in linear.args if item is not None)  # type: ignore[arg-type]
    if x.meta["val"].dim() != 2:
        raise NoMatch("rows of the router are not [tokens, columns]")
    for item in (weight, *more):
        if item.target not in program.weights:
            raise NoMatch(f"{item.name} is computed, not a parameter")
        if item.meta["val"].dtype != x.meta["val"].dtype:
            raise NoMatch(f"{item.name} is {item.meta['val'].dtype}, rows {x.meta['val'].dtype}")
    return x, weight, more[0] if more else None


def _through_conversions(node: Any) -> Any:
    """What was converted to another float: the operator rounds once, at the end."""
    while isinstance(node, fx.Node) and is_conversion(node):
        if not node.meta["val"].dtype.is_floating_point:
            break
        node = node.args[0]
    return node


def _is_output(node: Any, source: fx.Node, number: int) -> bool:
    is_item = isinstance(node, fx.Node) and node.target is operator.getitem
    return is_item and tuple(node.args) == (source, number)
