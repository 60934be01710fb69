"""Pattern-match attention that a model spells out as matmul, softmax, matmul."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import is_flat_call_graph
from specc.passes.program import Program, bind_args, emit_call, replace, upstream
from specc.passes.rewrite.columns import through_widening

aten = torch.ops.aten
_SOFTMAXES = (aten.softmax.int, aten._softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.contiguous.default,
    aten.clone.default,
)
_SKIPPED = (*_RESHAPES, aten.to.dtype)


@dataclass
class _Scores:
    """Input of a softmax: q k^T * scale, then `changes`, innermost first.

    Args:
        changes: (operator, its other operands): masks that are added or filled in. The second
            operand of an added one is a factor applied to the sum.
    """

    q: fx.Node
    k: fx.Node
    scale: float
    changes: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)


class RecoverAttention(Pass):
    """`softmax(q @ k.T * scale + mask) @ v` -> `specc.dense_attention(q, k, v, mask)`.

    The mask combines everything the model adds to its scores or fills in, in the model's order;
    later passes classify it like any other mask. Scores that are changed in another way do not
    match, and their softmax is refused by name.
    """

    requires = (is_flat_call_graph,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(*_SOFTMAXES):
            # the softmax of a router or gate
            if _product_of_weights(node) is None:
                continue
            with result.attempt(node.name):
                _recover(program, node)
        if result.rewrites:
            program.graph.eliminate_dead_code()
        return result


def _recover(program: Program, softmax: fx.Node) -> None:
    bound = bind_args(softmax)
    rank = softmax.meta["val"].dim()
    if bound["dim"] not in (-1, rank - 1):
        raise NoMatch("its softmax goes over another dimension than the last")
    product = _product_of_weights(softmax)
    assert product is not None
    scores = _scores(program, bound["self"])
    value = product.args[1]
    if not scores.changes:
        raise NoMatch("no mask is added to its scores")
    is_flat = [item.meta["val"].dim() == 3 for item in (scores.q, scores.k, value)]
    if len(set(is_flat)) > 1 or scores.q.meta["val"].dim() not in (3, 4):
        raise NoMatch("its queries, keys and values have other numbers of dimensions")
    graph = program.graph
    with graph.inserting_before(product):
        # the operator computes in float32 for operands of any dtype
        operands = [_as_narrow(item, value) for item in (scores.q, scores.k)] + [value]
        if is_flat[0]:
            operands = [emit_call(graph, aten.unsqueeze.default, x, 0) for x in operands]
        mask = _mask(graph, scores, is_flat[0])
        attended = emit_call(graph, ops.dense_attention, *operands, mask, None, scale=scores.scale)
        attended.meta["nn_module_stack"] = product.meta.get("nn_module_stack")
        output = emit_call(graph, aten.squeeze.dim, attended, 0) if is_flat[0] else attended
    replace(product, output)


def _product_of_weights(softmax: fx.Node) -> fx.Node | None:
    """The matmul of unchanged softmax weights with the values."""
    node = softmax
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in _PRODUCTS and user.args[0] is node and user.args[1] is not node:
            return user
        if user.target not in _SKIPPED:
            return None
        node = user
    return None


def _scores(program: Program, node: fx.Node) -> _Scores:
    """Trace scores back to the matmul of queries and keys."""
    changes: list[tuple[Any, tuple[Any, ...]]] = []
    scale = 1.0
    while True:
        bound = bind_args(node) if hasattr(node.target, "_schema") else {}
        if node.target in _SKIPPED:
            node = node.args[0]
        elif node.target is aten.add.Tensor:
            node, added = _score_and_mask(program, bound["self"], bound["other"])
            if bound["alpha"] != 1 or not scale > 0:
                raise NoMatch("a mask that is turned around with its scores")
            changes.append((aten.add.Tensor, (added, scale)))
        elif node.target is aten.masked_fill.Scalar:
            if scale != 1.0:
                raise NoMatch("a mask that is scaled with its scores")
            changes.append((node.target, (bound["mask"], bound["value"])))
            node = bound["self"]
        elif node.target in (aten.mul.Tensor, aten.div.Tensor):
            factor = bound["other"]
            if not isinstance(factor, int | float):
                raise NoMatch("scores are multiplied by a tensor")
            scale *= factor if node.target is aten.mul.Tensor else 1 / factor
            node = bound["self"]
        elif node.target is aten.baddbmm.default:
            if bound["beta"] != 1 or scale != 1.0:
                raise NoMatch("a bias that is scaled with its scores")
            changes.append((aten.add.Tensor, (bound["self"], 1.0)))
            key = _transposed(bound["batch2"])
            return _Scores(bound["batch1"], key, float(bound["alpha"]), changes[::-1])
        elif node.target in _PRODUCTS:
            return _Scores(node.args[0], _transposed(node.args[1]), scale, changes[::-1])
        else:
            name = getattr(node.target, "__name__", str(node.target))
            raise NoMatch(f"its scores go through {name}")


def _score_and_mask(program: Program, *operands: Any) -> tuple[fx.Node, fx.Node]:
    """Operands of an addition: the one that contains the scores, and the other one."""
    if not all(isinstance(item, fx.Node) for item in operands):
        raise NoMatch("a number is added to its scores")
    holds = [
        any(node.target in program.weights for node in upstream(item) if node.op == "placeholder")
        for item in operands
    ]
    if holds == [True, False]:
        return operands[0], operands[1]
    if holds == [False, True]:
        return operands[1], operands[0]
    raise NoMatch("what is added to its scores is computed from weights")


def _as_narrow(node: fx.Node, value: fx.Node) -> fx.Node:
    """Queries or keys before their cast to a wider dtype; in the dtype of the values."""
    narrow = through_widening(node)
    is_same = narrow.meta["val"].dtype == value.meta["val"].dtype
    return narrow if is_same else node


def _transposed(node: fx.Node) -> fx.Node:
    """Keys [..., T, D] from their transpose [..., D, T]."""
    rank = node.meta["val"].dim()
    if node.target is aten.transpose.int:
        dims = {int(dim) % rank for dim in node.args[1:3]}
        if dims == {rank - 1, rank - 2}:
            return node.args[0]
    raise NoMatch("its keys are no transpose")


def _mask(graph: fx.Graph, scores: _Scores, is_flat: bool) -> fx.Node:
    """All changes as one additive mask; -inf, or the filled value, at hidden positions."""
    mask: fx.Node | None = None
    for target, operands in scores.changes:
        other = operands[0]
        if is_flat and other.meta["val"].dim() == 3:
            # [heads, tokens, keys] of the only sequence
            other = emit_call(graph, aten.unsqueeze.default, other, 0)
        if target is aten.add.Tensor:
            if operands[1] != 1.0:
                # (score + mask) · factor
                other = emit_call(graph, aten.mul.Tensor, other, operands[1])
            mask = other if mask is None else emit_call(graph, target, mask, other)
            continue
        if mask is None:
            wide = emit_call(graph, aten.to.dtype, other, torch.float32)
            mask = emit_call(graph, aten.zeros_like.default, wide)
        mask = emit_call(graph, target, mask, other, operands[1])
    assert mask is not None
    return mask
