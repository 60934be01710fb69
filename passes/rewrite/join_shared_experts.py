"""Let experts that every token takes be some of a mixture's: no launches of their own."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from specc.kernels import ops
from specc.kernels.operators.mixtures import MOST_CHOSEN
from specc.kernels.reference.fused import CLAMPED
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.rewrite.columns import only_user, same_shape
from specc.passes.rewrite.expert_groups import node_of, output_of

aten = torch.ops.aten
_VIEWS = (
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
)  # fmt: skip


class JoinSharedExperts(Pass):
    """`experts(x, …) + linear(act_and_mul(linear(x, Wgu)), Wd)` → `specc.experts` of more experts.

    What is added may have a weight, sigmoid(linear(x, Wg)), as in Qwen2-MoE. An expert that all
    tokens share has the width of the others, or a multiple: then it is as many of them side by
    side, whose sum it is. The router gives their ids and weights with those of the chosen ones.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.experts):
            with result.attempt(node.name):
                _join(program, node)
        program.graph.eliminate_dead_code()
        return result


def _join(program: Program, experts: fx.Node) -> None:
    bound = bind_args(experts)
    if bound["gate_up_layout"] or bound["down_layout"]:
        raise NoMatch("the chosen experts are quantized")
    if bound["gate_up_bias"] is not None or bound["activation"] == CLAMPED:
        raise NoMatch("the chosen experts have biases, or a gate of their own")
    total, shared = _sum(experts)
    gate = None
    if shared.target is aten.mul.Tensor:
        shared, gate = _gated(program, shared, bound["x"])
    gate_up, down = _weights(program, shared, bound)
    route = output_of(bound["ids"], ops.route, 0, "no router gives the ids")
    if output_of(bound["weights"], ops.route, 1, "no router gives the weights") is not route:
        raise NoMatch("ids and weights are of two routers")
    size, width = (int(item.meta["val"].shape[-1]) for item in (bound["down"], down))
    count = width // size
    if width % size:
        raise NoMatch(f"{width} columns between their products, where others have {size}")
    if bind_args(route)["top_k"] + count > MOST_CHOSEN:
        raise NoMatch(f"{count} experts more than the {bind_args(route)['top_k']} of a token")
    graph = program.graph
    with graph.inserting_before(experts):
        routed = emit_call(graph, ops.route, *route.args, count, gate)
        given = [emit_call(graph, operator.getitem, routed, i) for i in range(2)]
        joined = emit_call(
            graph, ops.experts, bound["x"], *given, bound["gate_up"], bound["down"],
            bound["activation"], None, None, 0, "", "", gate_up, down,
        )  # fmt: skip
    for new, old in ((routed, route), (joined, experts)):
        new.meta["nn_module_stack"] = old.meta.get("nn_module_stack")
    experts.replace_all_uses_with(joined)
    (of_experts,) = (item for item in total.args[:2] if _behind_views(item) is joined)
    total.replace_all_uses_with(of_experts)  # type: ignore[arg-type]


def _sum(experts: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What alone reads the experts' result, a sum, and what it adds, behind views."""
    node = experts
    while (user := only_user(node)) is not None and user.target in _VIEWS:
        node = user
    total = node_of(user, aten.add.Tensor, "nothing is added to the experts' result alone")
    bound = bind_args(total)
    others = [bound[name] for name in ("self", "other") if bound[name] is not node]
    if bound["alpha"] != 1 or len(others) != 1 or not isinstance(others[0], fx.Node):
        raise NoMatch("something else than an expert is added")
    same = same_shape(others[0].meta["val"], node.meta["val"])
    if not same or total.meta["val"].dtype != experts.meta["val"].dtype:
        raise NoMatch("what is added has another shape or type")
    return total, _behind_views(others[0])


def _gated(program: Program, product: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """An expert's result, and the weight [1, H] of the gate that it is multiplied with."""
    reason = "what is added is no expert with a gate"
    operands = [_behind_views(item) for item in product.all_input_nodes]
    gates = [item for item in operands if item.target is aten.sigmoid.default]
    if len(gates) != 1 or len(operands) != 2:
        raise NoMatch(reason)
    (result,) = (item for item in operands if item is not gates[0])
    linear = _behind_views(gates[0].args[0])
    weight = _weight(program, linear, reason)
    if not _reads(linear, x) or weight.meta["val"].shape[0] != 1:
        raise NoMatch("the gate of what is added reads something else")
    return result, weight


def _weights(program: Program, last: fx.Node, bound: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    """[2 I, H] and [H, I] of an expert of the same rows and activation."""
    reason = "what is added is no expert"
    down = _weight(program, last, reason)
    gate = node_of(_behind_views(last.args[0]), ops.act_and_mul, reason)
    if gate.args[1] != bound["activation"]:
        raise NoMatch(f"it has {gate.args[1]} between its products, not {bound['activation']}")
    first = _behind_views(gate.args[0])
    gate_up = _weight(program, first, reason)
    if not _reads(first, bound["x"]):
        raise NoMatch("it reads other rows")
    if len({item.meta["val"].dtype for item in (gate_up, down, bound["gate_up"])}) > 1:
        raise NoMatch("it has weights of another type")
    return gate_up, down


def _weight(program: Program, linear: Any, reason: str) -> fx.Node:
    """The parameter [N, K] of a linear layer without a bias."""
    bound = bind_args(node_of(linear, aten.linear.default, reason))
    weight = bound["weight"]
    if bound["bias"] is not None or weight.target not in program.weights:
        raise NoMatch("a product of what is added has a bias, or computes its weight")
    if program.weights[weight.target].is_turned:
        raise NoMatch("weights are stored transposed")
    return weight


def _reads(linear: fx.Node, x: fx.Node) -> bool:
    """Whether a linear layer has these rows, however they are numbered."""
    return _behind_views(linear.args[0]) is _behind_views(x)


def _behind_views(node: Any) -> Any:
    """What is seen in another shape, with rows of the same columns."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        source: Any = node.args[0]
        if source.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            break
        node = source
    return node
