"""Send tokens to the experts that they chose, where a model sends every token to all of them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import is_off_meta_device
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.proof.token_routing import POINTWISE

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default)
_SPLITS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)


class RouteExperts(Pass):
    """All rows times all experts, weighted before → `specc.grouped_mm` over those that are chosen.

    Llama 4 scales the rows that experts read: by the sigmoid of a chosen expert's logit, and by 0,
    the sigmoid of minus infinity, for all others. An expert of a zero row is zero, so a token's sum
    over all experts is that over its own: the rows of which are sorted by expert, multiplied in
    groups and put back, as other mixtures do. That 0 comes of minus infinity and of a zero row is
    computed here, not assumed.
    """

    requires = (is_off_meta_device,)
    ensures = (is_off_meta_device,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for first in program.calls(aten.bmm.default):
            if first.args[1].target not in program.weights:
                continue
            with result.attempt(first.name):
                _route(program, first)
        program.graph.eliminate_dead_code()
        return result


@dataclass(frozen=True)
class _Choice:
    """Rows of a mixture before they are repeated, and the router's choice of experts for them."""

    rows: fx.Node  # [T, K]
    ids: fx.Node  # [T, C] int64
    weights: fx.Node  # [T, C], made of values that `topk` chose


def _route(program: Program, first: fx.Node) -> None:
    graph, up = program.graph, first.args[1]
    gates, second = _gates(first)
    down = second.args[1]
    if down.target not in program.weights:
        raise NoMatch("the second matrices are computed")
    total = _total(second)
    with graph.inserting_before(total):
        choice = _choice(graph, first.args[0])
        count = int(up.meta["val"].shape[0])
        taken = int(choice.ids.meta["val"].shape[1])
        sort, places, ends = _sorted(graph, choice.ids, count)
        tokens = emit_call(graph, aten.floor_divide.default, places, taken)
        rows = emit_call(graph, aten.index.Tensor, choice.rows, [tokens])
        flat = emit_call(graph, aten.reshape.default, choice.weights, [-1])
        scales = emit_call(graph, aten.index.Tensor, flat, [places])
        column = emit_call(graph, aten.unsqueeze.default, scales, 1)
        scaled = emit_call(graph, aten.mul.Tensor, rows, column)
        value = emit_call(graph, ops.grouped_mm, scaled, up, ends)
        known = {first: value}
        for node in gates:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: known.get(x, x))
            if node.target in _SPLITS:
                args = (*args[:2], 1)
            known[node] = emit_call(graph, node.target, *args, **kwargs)
        gated = known[gates[-1]]
        out = emit_call(graph, ops.grouped_mm, gated, down, ends)
        back = emit_call(graph, aten.index.Tensor, out, [_inverse(graph, sort, places)])
        width = int(down.meta["val"].shape[2])
        by_token = emit_call(graph, aten.reshape.default, back, [-1, taken, width])
        summed = emit_call(graph, aten.sum.dim_IntList, by_token, [1])
    for node in (value, out):
        node.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
    replace(total, summed)


def _gates(first: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """What lies between two products, in order, and the second one."""
    found: list[fx.Node] = []
    seen = {first}
    for node in list(first.graph.nodes):
        if not seen.intersection(node.all_input_nodes):
            continue
        if node.target is aten.bmm.default:
            if node.args[0] not in seen or node.args[1] in seen or not found:
                raise NoMatch("its product is multiplied by another one")
            _require_zero(first, found, node.args[0])
            inside = {first, *found}
            users = {user for item in inside for user in item.users}
            if not users <= {*found, node}:
                raise NoMatch("something else reads what experts compute")
            if found[-1] is not node.args[0]:
                raise NoMatch("its second product reads an earlier value")
            return found, node
        if not _keeps_rows(node):
            raise NoMatch(f"{node.target} is computed between two products of experts")
        if any(item not in seen for item in node.all_input_nodes):
            raise NoMatch("experts read a value besides their rows")
        found.append(node)
        seen.add(node)
    raise NoMatch("no second product follows")


def _keeps_rows(node: fx.Node) -> bool:
    """Whether a call computes element by element, or takes columns apart."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in _SPLITS:
        dim = bind_args(node)["dim"]
        return bool(dim in (-1, 2))
    return torch.Tag.pointwise in node.target.tags


def _require_zero(first: fx.Node, gates: list[fx.Node], output: fx.Node) -> None:
    """Raises NoMatch: what experts compute of a zero row is not zero."""
    columns = int(first.meta["val"].shape[2])
    value = _evaluate(gates, first, torch.zeros(1, 1, columns), output)
    if value.any() or value.isnan().any():
        raise NoMatch("an expert of a row of zeros is not zero")


def _evaluate(nodes: list[fx.Node], given: fx.Node, value: Tensor, wanted: fx.Node) -> Tensor:
    known: dict[fx.Node, Any] = {given: value.to(given.meta["val"].dtype)}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    found: Tensor = known[wanted]
    return found


def _total(second: fx.Node) -> fx.Node:
    """The sum of what the experts of a token return: of [E, T, N], or of that as [E · T, N]."""
    reason = "what experts return is not added up over experts"
    node, shape = second, tuple(map(str, second.meta["val"].shape))
    while True:
        if len(node.users) != 1:
            raise NoMatch(reason)
        (node,) = node.users
        if node.target is aten.sum.dim_IntList:
            bound = bind_args(node)
            source = tuple(map(str, bound["self"].meta["val"].shape))
            if source != shape or bound["dim"] not in ([0], [-3]) or bound["keepdim"]:
                raise NoMatch(reason)
            if bound["dtype"] not in (None, second.meta["val"].dtype):
                raise NoMatch("what experts return is added up in another type")
            return node
        if node.target not in _RESHAPES:
            raise NoMatch(reason)


def _choice(graph: fx.Graph, given: Any) -> _Choice:
    """What the rows [E, T, K] of all experts are; weights are computed before where calls go."""
    reason = "its rows are not those of all tokens, times a weight for each expert"
    product = _require(_reshaped(given), aten.mul.Tensor, reason)
    repeated = _require(product.args[0], aten.repeat.default, reason)
    column = product.args[1]
    rows, times = repeated.args
    experts = int(given.meta["val"].shape[0])
    if rows.meta["val"].dim() != 2 or list(times) != [experts, 1]:
        raise NoMatch(reason)
    turned = _require(_reshaped(column), aten.transpose.int, reason)
    scores, value = turned.args[0], column.meta["val"]
    if {dim % 2 for dim in turned.args[1:]} != {0, 1} or value.dim() != 2 or value.shape[1] != 1:
        raise NoMatch(reason)
    if rows.meta["val"].dtype != product.meta["val"].dtype:
        raise NoMatch("weighted rows have another type")
    chain: list[fx.Node] = []
    while isinstance(scores, fx.Node) and scores.target is not aten.scatter.src:
        unary = len(scores.all_input_nodes) == 1 and isinstance(
            scores.target, torch._ops.OpOverload
        )
        name = scores.target._schema.name.partition("::")[2] if unary else ""  # type: ignore[union-attr]
        is_pointwise = unary and (
            torch.Tag.pointwise in scores.target.tags  # type: ignore[union-attr]
            or scores.target is aten.to.dtype
            or name in POINTWISE
        )
        if not is_pointwise:
            raise NoMatch("its weights are not made of the values that topk chose")
        chain.insert(0, scores)
        scores = scores.all_input_nodes[0]
    scatter = _require(scores, aten.scatter.src, reason)
    blank, dim, ids, values = scatter.args[:4]
    blank = _require(blank, aten.full_like.default, "weights of other experts are not one number")
    topk = _topk(ids, values, int(blank.args[0].meta["val"].shape[1]), experts)
    if dim not in (1, -1) or bind_args(topk)["dim"] not in (1, -1):
        raise NoMatch("topk chooses tokens, not experts")
    last = chain[-1] if chain else scatter
    fill = blank.args[1]
    if type(fill) not in (int, float):
        raise NoMatch("weights of other experts are computed")
    others = _evaluate(chain, scatter, torch.full((1, 1), float(fill)), last)
    if others.any() or others.isnan().any():
        raise NoMatch("experts that a token did not choose have a weight")
    known = {scatter: values}
    for node in chain:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: known.get(x, x))
        known[node] = emit_call(graph, node.target, *args, **kwargs)
    return _Choice(rows, ids, known[last])


def _topk(ids: Any, values: Any, columns: int, experts: int) -> fx.Node:
    """The `topk` that chose both among as many columns as there are experts."""
    reason = "its weights are not made of the values that topk chose"
    for number, item in ((1, ids), (0, values)):
        if _require(item, operator.getitem, reason).args[1] != number:
            raise NoMatch(reason)
    topk = _require(ids.args[0], aten.topk.default, reason)
    if values.args[0] is not topk or columns != experts:
        raise NoMatch(reason)
    # of the smallest logits, the sum would be that of other experts, but the same sum
    return topk


def _sorted(graph: fx.Graph, ids: fx.Node, experts: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The sort of a pass' choices by expert, its places, and where each expert's rows end."""
    flat = emit_call(graph, aten.reshape.default, ids, [-1])
    sort = emit_call(graph, aten.sort.default, flat)
    by_expert = emit_call(graph, operator.getitem, sort, 0)
    places = emit_call(graph, operator.getitem, sort, 1)
    numbers = emit_call(graph, aten.arange.default, experts, device=torch.device("cpu"))
    with ids.meta["val"].fake_mode:
        device = ids.meta["val"].device
        numbers.meta["val"] = torch.empty(experts, dtype=torch.int64, device=device)
    column = emit_call(graph, aten.unsqueeze.default, by_expert, 1)
    same = emit_call(graph, aten.eq.Tensor, column, numbers)
    counts = emit_call(graph, aten.sum.dim_IntList, same, [0])
    ends = emit_call(graph, aten.cumsum.default, counts, 0, dtype=torch.int32)
    return sort, places, ends


def _inverse(graph: fx.Graph, sort: fx.Node, places: fx.Node) -> fx.Node:
    """Where the row of each choice is after the sort."""
    again = emit_call(graph, aten.sort.default, places)
    return emit_call(graph, operator.getitem, again, 1)


def _reshaped(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in _RESHAPES:
        node = node.args[0]
    return node


def _require(node: Any, target: Any, reason: str) -> fx.Node:
    if not isinstance(node, fx.Node) or node.target is not target:
        raise NoMatch(reason)
    return node
