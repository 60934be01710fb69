"""Find projections that a model writes as products of matrices."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import fx

from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import is_flat_call_graph
from specc.passes.program import Program, bind_args, emit_call, replace

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.addmm.default)
# of a matrix
_TRANSPOSED = (
    aten.numpy_T.default, aten.t.default, aten.mT.default,
    aten.transpose.int, aten.permute.default,
)  # fmt: skip


class _Product(NamedTuple):
    x: Any
    matrix: Any
    bias: Any


class RecoverLinear(Pass):
    """`matmul(x, w.T)` → `linear(x, w)`, of a weight w [N, K] of the model.

    `x @ w` or `addmm(b, x, w)`, of a weight w [K, N] → `linear(x, w, b)`, and the input w becomes
    [N, K]: the engine's file holds its transpose, see `Weight.is_turned`. What else reads a weight
    [K, N] keeps it as it is.

    Falcon writes its projections in the first way, GPT-2 (Conv1D of transformers) in the second. As
    projections they are stored, quantized, fused and split like those of other models.
    """

    requires = (is_flat_call_graph,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        # key of a weight [K, N] → its products
        turned: dict[str, list[fx.Node]] = {}
        for node in program.calls(*_PRODUCTS):
            matrix = _product(node).matrix
            weight = bind_args(matrix)["self"] if _is_transposed(matrix) else matrix
            if not isinstance(weight, fx.Node) or weight.name not in program.weights:
                continue
            if weight is matrix:
                turned.setdefault(program.weights[weight.name].key, []).append(node)
            elif reason := _why_no_bias(node):
                result.decline(node.name, reason)
            else:
                _replace(node, weight)
                result.rewrites += 1
        for key, nodes in turned.items():
            try:
                _turn(program, key, nodes)
            except NoMatch as reason:
                result.decline(nodes[0].name, str(reason))
                continue
            for node in nodes:
                _replace(node, _product(node).matrix)
            result.rewrites += len(nodes)
        program.graph.eliminate_dead_code()
        return result


def _turn(program: Program, key: str, products: list[fx.Node]) -> None:
    """Make the inputs of a weight [K, N] inputs [N, K].

    Raises:
        NoMatch: something else reads it, or a product is not that of a projection.
    """
    inputs = [
        node
        for node in program.graph.find_nodes(op="placeholder")
        if node.target in program.weights and program.weights[node.target].key == key
    ]
    for node in inputs:
        if node.meta["val"].dim() != 2:
            raise NoMatch(f"a weight of {node.meta['val'].dim()} dimensions")
        for user in node.users:
            if user not in products:
                raise NoMatch(f"{user.name} reads {key} in another way")
            operands = _product(user)
            if operands.matrix is not node or node in (operands.x, operands.bias):
                raise NoMatch(f"{user.name} reads {key} in another way")
    for product in products:
        if reason := _why_no_bias(product):
            raise NoMatch(reason)
    for node in inputs:
        weight, value = program.weights[node.target], node.meta["val"]
        program.weights[node.target] = dataclasses.replace(
            weight, shape=weight.shape[::-1], is_turned=not weight.is_turned
        )
        node.meta["val"] = value.new_empty(value.shape[::-1])


def _product(node: fx.Node) -> _Product:
    if node.target is not aten.addmm.default:
        return _Product(node.args[0], node.args[1], None)
    bound = bind_args(node)
    return _Product(bound["mat1"], bound["mat2"], bound["self"])


def _why_no_bias(node: fx.Node) -> str | None:
    """Why what a product is added to is no bias [N] of a projection; None where it is, or none."""
    if node.target is not aten.addmm.default:
        return None
    bound, outputs = bind_args(node), node.meta["val"].shape[-1]
    if (bound["beta"], bound["alpha"]) != (1, 1):
        return f"a product that is scaled by {bound['alpha']}, and its addend by {bound['beta']}"
    shape = tuple(bound["self"].meta["val"].shape)
    return None if shape == (outputs,) else f"a product that is added to {list(shape)}"


def _replace(node: fx.Node, weight: fx.Node) -> None:
    x, _, bias = _product(node)
    with node.graph.inserting_before(node):
        replace(node, emit_call(node.graph, aten.linear.default, x, weight, bias))


def _is_transposed(node: object) -> bool:
    """Whether the rows of a matrix become columns."""
    if not isinstance(node, fx.Node) or node.target not in _TRANSPOSED:
        return False
    bound = bind_args(node)
    if bound["self"].meta["val"].dim() != 2:
        return False
    # two dimensions may also be left as they are
    if node.target is aten.transpose.int:
        return (bound["dim0"] - bound["dim1"]) % 2 == 1
    return node.target is not aten.permute.default or bound["dims"][0] % 2 == 1
