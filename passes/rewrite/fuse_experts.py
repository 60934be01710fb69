"""Fuse what a mixture does with its experts into one operator, which reads nothing on the host."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import turned
from specc.kernels import ops
from specc.kernels.reference.fused import CLAMPED
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.rewrite.clamped_gate import clamped_gate
from specc.passes.rewrite.columns import only_user, same_shape
from specc.passes.rewrite.replace_grouped_mm import has_no_foreign_ops
from specc.passes.rewrite.turn_stack import turn_stack

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# by matrices as they are, or quantized
_PRODUCTS = (ops.grouped_mm, ops.grouped_mm_q)
_RESHAPES = (aten.reshape.default, aten.view.default)


class FuseExperts(Pass):
    """Sort by expert, `grouped_mm`, `act_and_mul`, `grouped_mm`, sum → `specc.experts`.

    Or `grouped_mm_q`, where the matrices are quantized.

    gpt-oss has biases after both products, and a gate of its own between them (`clamped_gate`); its
    matrices are [inputs, outputs], and become [outputs, inputs]. The router before it stays as it
    is, and so does an expert that all tokens share. What is left alone reads on the host how many
    tokens each expert has.
    """

    requires = (attention_is_a_tree, has_no_foreign_ops)
    ensures = (attention_is_a_tree,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        seen: set[fx.Node] = set()
        for first in program.calls(*_PRODUCTS):
            if first in seen:
                continue
            try:
                gate = _gate_of(first)
                second = only_user(gate.result)
                if second is None or second.target not in _PRODUCTS:
                    raise _NoMatch("no second product alone reads the gate")
                seen.add(second)
                _fuse(program, first, gate, second)
            except _NoMatch as reason:
                result.decline(first.name, str(reason))
                continue
            result.rewrites += 1
        program.graph.eliminate_dead_code()
        return result


class _NoMatch(Exception):
    """Why a mixture stays as it is."""


@dataclass(frozen=True)
class _Gate:
    """What stands between two products.

    Args:
        result: what the second one reads.
        activation: of `specc.experts`.
        bias: what was added to the first product, or None.
    """

    result: fx.Node
    activation: str
    bias: fx.Node | None


def _gate_of(first: fx.Node) -> _Gate:
    user = only_user(first)
    if user is not None and user.target is ops.act_and_mul:
        return _Gate(user, user.args[1], None)  # type: ignore[arg-type]
    rows = _with_bias(first)
    result = None if rows is first else clamped_gate(rows)
    if result is None:
        raise _NoMatch("no gate alone reads the first product")
    return _Gate(result, CLAMPED, _other_of(rows, first))


def _with_bias(product: fx.Node) -> fx.Node:
    """The sum of a product and of the biases of its rows' experts, or the product."""
    user = only_user(product)
    if user is None or user.target is not aten.add.Tensor:
        return product
    is_plain = bind_args(user)["alpha"] == 1 and len(user.all_input_nodes) == 2
    return user if is_plain else product


def _other_of(node: fx.Node, operand: fx.Node) -> fx.Node:
    (other,) = (item for item in node.all_input_nodes if item is not operand)
    return other


def _bias_of(program: Program, rows: fx.Node, sort: fx.Node, outputs: int) -> fx.Node:
    """The parameter [E, N] of which these are the rows of the sorted ids."""
    reason = "what is added to a product is not a row of its expert"
    _require(rows, aten.embedding.default, reason)
    weight, index = rows.args[:2]
    if _sort_of(index, 0) is not sort or weight.target not in program.weights:  # type: ignore[union-attr]
        raise _NoMatch(reason)
    if weight.meta["val"].shape[1] != outputs:  # type: ignore[union-attr]
        raise _NoMatch(reason)
    return weight  # type: ignore[return-value]


def _fuse(program: Program, first: fx.Node, gate: _Gate, second: fx.Node) -> None:
    bound, last = bind_args(first), bind_args(second)
    x, tokens = _row_of(bound["x"], "rows of the first product")
    sort, top_k = _permutation_of(tokens)
    ids = _flattened(sort.args[0], top_k, "expert ids")
    if bound["ends"] is not last["ends"]:
        raise _NoMatch("the products have groups of their own")
    num_experts = _require_ends(bound["ends"], sort)
    stacks = [_stack(program, args) for args in (bound, last)]
    if last["x"] is not gate.result:
        raise _NoMatch("the second product reads the gate as its matrix")
    value = x.meta["val"]
    shapes = value.shape[1], gate.result.meta["val"].shape[1]
    wanted = (num_experts, 2 * shapes[1], shapes[0]), (num_experts, shapes[0], shapes[1])
    if value.dim() != 2 or tuple(stack.shape for stack in stacks) != wanted:
        raise _NoMatch("matrices are not one of each expert")
    sum_of_second = _with_bias(second)
    biases: list[fx.Node | None] = [None, None]
    if gate.bias is not None:
        added = gate.bias, _other_of(sum_of_second, second) if sum_of_second is not second else None
        sizes = (rows for _, rows, _ in wanted)
        biases = [_bias_of(program, rows, sort, n) for rows, n in zip(added, sizes, strict=True)]
    elif sum_of_second is not second:
        raise _NoMatch("what is added to the second product alone")
    floats = (stack.source for stack in stacks if not stack.layout)
    dtypes = {_dtype(item) for item in (x, *floats, *filter(None, biases))}
    if len(dtypes) != 1 or value.dtype not in _DTYPES:
        raise _NoMatch(f"the products are of {', '.join(map(str, sorted(dtypes, key=str)))}")
    weights, total = _weighted_sum(sum_of_second, sort, top_k)
    total = _rounded(total, value.dtype)
    if not same_shape(total.meta["val"], value) or _dtype(total) != value.dtype:
        raise _NoMatch("the sum is not a row of the input's dtype for each token")
    if not same_shape(weights.meta["val"], ids.meta["val"]):
        raise _NoMatch("weights are not those of a token's experts")
    if _dtype(weights) not in (torch.float32, value.dtype):
        raise _NoMatch(f"the weights are of {_dtype(weights)}")
    graph = program.graph
    for stack, product in zip(stacks, (first, second), strict=True):
        if stack.is_turned:
            program.weights[stack.source.target] = turn_stack(program, stack.source, [product])  # type: ignore[index]
    gate_up, down = (stack.source for stack in stacks)
    own: tuple[Any, ...] = () if gate.bias is None else tuple(biases)
    if any(stack.layout for stack in stacks):
        own = (*biases, shapes[1], *(stack.layout for stack in stacks))
    with graph.inserting_before(total):
        fused = emit_call(graph, ops.experts, x, ids, weights, gate_up, down, gate.activation, *own)
    fused.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
    total.replace_all_uses_with(fused)


def _permutation_of(tokens: Any) -> tuple[fx.Node, int]:
    """The sort of expert ids whose places, by tokens, these are; and experts a token."""
    _require(tokens, aten.floor_divide.default, "rows are not of tokens in the order of a sort")
    permutation, top_k = tokens.args
    sort = _sort_of(permutation, 1)
    if type(top_k) is not int:
        raise _NoMatch("tokens have no fixed number of experts")
    return sort, top_k


def _sort_of(node: Any, output: int) -> fx.Node:
    """The ascending sort of a vector that this is an output of: 0 has values, 1 places."""
    _require(node, operator.getitem, "rows are not in the order of a sort")
    sort = node.args[0]
    _require(sort, aten.sort.default, "rows are not in the order of a sort")
    bound = bind_args(sort)
    if node.args[1] != output or bound["descending"] or bound["dim"] not in (0, -1):
        raise _NoMatch("rows are in the order of another sort")
    if _dtype(bound["self"]) != torch.int64:
        raise _NoMatch(f"expert ids are {_dtype(bound['self'])}, not torch.int64")
    return sort


def _row_of(node: Any, what: str) -> tuple[fx.Node, Any]:
    """(source, index) of rows picked by one index."""
    _require(node, aten.index.Tensor, f"{what} are not picked by one index")
    source, indices = node.args
    if len(indices) != 1:
        raise _NoMatch(f"{what} are not picked by one index")
    return source, indices[0]


def _flattened(node: Any, top_k: int, what: str) -> fx.Node:
    """[N, K] of what is [N · K]."""
    source = node.args[0] if node.target in _RESHAPES else node
    shape = source.meta["val"].shape
    if len(shape) != 2 or shape[1] != top_k or node.meta["val"].dim() != 1:
        raise _NoMatch(f"{what} are not one for each of a token's {top_k} experts")
    return source


def _require_ends(ends: Any, sort: fx.Node) -> int:
    """Experts, if this is the running count of each one's ids."""
    reason = "groups are not the running count of each expert's tokens"
    _require(ends, aten.cumsum.default, reason)
    counts = _without_conversions(ends.args[0])
    _require(counts, aten.sum.dim_IntList, reason)
    same = counts.args[0]
    _require(same, aten.eq.Tensor, reason)
    column, experts = same.args
    _require(column, aten.unsqueeze.default, reason)
    _require(experts, aten.arange.default, reason)
    if ends.args[1] not in (0, -1) or counts.args[1] != [0] or bind_args(counts)["keepdim"]:
        raise _NoMatch(reason)
    if column.args[1] not in (1, -1) or len(experts.args) != 1:
        raise _NoMatch(reason)
    values = column.args[0]
    if isinstance(values, fx.Node) and values.target in _RESHAPES:
        values = values.args[0]
    if _sort_of(_without_conversions(values), 0) is not sort:
        raise _NoMatch(reason)
    return int(experts.args[0])


def _without_conversions(node: Any) -> Any:
    """What was converted to wider types, or to float32; ids and counts are small."""
    while isinstance(node, fx.Node) and node.target is aten.to.dtype:
        if _dtype(node) not in (torch.int32, torch.int64, torch.float32):
            raise _NoMatch(f"counts or ids pass through {_dtype(node)}")
        node = node.args[0]
    return node


@dataclass(frozen=True)
class _Stack:
    """A parameter with a matrix of each expert.

    Args:
        source: [E, outputs, inputs], as many [inputs, outputs], or quantized.
        shape: [E, outputs, inputs].
        layout: name of that of quantized ones.
        is_turned: the parameter is [E, inputs, outputs].
    """

    source: fx.Node
    shape: tuple[Any, ...]
    layout: str = ""
    is_turned: bool = False


def _stack(program: Program, product: dict[str, Any]) -> _Stack:
    """What holds the experts' matrices that a product reads."""
    node = product["weight"]
    if "out_features" in product:
        return _quantized(node, product)
    reason = "matrices of experts are not parameters of rows of their inputs"
    if isinstance(node, fx.Node) and node.target in program.weights:
        key = program.weights[node.target].key  # type: ignore[index]
        if len(node.users) > 1 or sum(x.key == key for x in program.weights.values()) > 1:
            raise _NoMatch("another reads the matrices of experts, too")
        return _Stack(node, turned(tuple(node.meta["val"].shape)), is_turned=True)
    if not isinstance(node, fx.Node) or node.target is not aten.transpose.int:
        raise _NoMatch(reason)
    bound = bind_args(node)
    source: fx.Node = bound["self"]
    if {bound["dim0"] % 3, bound["dim1"] % 3} != {1, 2} or source.target not in program.weights:
        raise _NoMatch(reason)
    return _Stack(source, tuple(source.meta["val"].shape))


def _quantized(blocks: fx.Node, product: dict[str, Any]) -> _Stack:
    names = ("bits", "group", "has_zeros", "is_float", "row_bits", "format")
    layout = QuantizedLayout.of_facts([product[name] for name in names])
    shape = product["out_features"], int(product["x"].meta["val"].shape[1])
    count = int(blocks.meta["val"].shape[0]) // layout.stored_shape(shape)[0]
    return _Stack(blocks, (count, *shape), layout.name)


def _weighted_sum(second: fx.Node, sort: fx.Node, top_k: int) -> tuple[fx.Node, fx.Node]:
    """Weights [N, K], and the node that has the sum over each token's experts."""
    reason = "nothing but a product with the router's weights reads the second product"
    product = _require(only_user(second), aten.mul.Tensor, reason)
    factors = [item for item in product.args if item is not second]
    factor = _require(factors[0] if len(factors) == 1 else None, aten.unsqueeze.default, reason)
    column, dim = factor.args
    if dim not in (1, -1):
        raise _NoMatch(reason)
    source, index = _row_of(column, "weights")
    if _sort_of(index, 1) is not sort:
        raise _NoMatch("weights are in the order of another sort")
    weights = _flattened(source, top_k, "weights")
    reason = "weighted rows do not go back to the order of tokens"
    rows = _require(only_user(product), aten.index.Tensor, reason)
    if rows.args[0] is not product:
        raise _NoMatch("weighted rows are an index")
    _require_inverse(_row_of(rows, "weighted rows")[1], sort)
    view = only_user(rows)
    if view is None or view.target not in _RESHAPES:
        raise _NoMatch("weighted rows are not those of each token's experts")
    value, shape = view.meta["val"], view.meta["val"].shape
    if value.dim() != 3 or shape[1] != top_k or shape[2] != second.meta["val"].shape[1]:
        raise _NoMatch("weighted rows are not those of each token's experts")
    reason = "the rows of a token's experts are not added up"
    total = _require(only_user(view), aten.sum.dim_IntList, reason)
    bound = bind_args(total)
    if bound["dim"] not in ([1], [-2]) or bound["keepdim"]:
        raise _NoMatch(reason)
    return weights, total


def _rounded(total: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The sum, or what converts it to this type and alone reads it."""
    user = only_user(total)
    if user is None or user.target is not aten.to.dtype or _dtype(total) == dtype:
        return total
    return user if _dtype(user) == dtype else total


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _require_inverse(index: Any, sort: fx.Node) -> None:
    """Counting up at the places of the sort: where each place of before is after it."""
    reason = "weighted rows do not go back to the order of tokens"
    _require(index, aten.index_put.default, reason)
    bound = bind_args(index)
    _require(bound["values"], aten.arange.default, reason)
    if bound["accumulate"] or len(bound["indices"]) != 1 or len(bound["values"].args) != 1:
        raise _NoMatch(reason)
    if _sort_of(bound["indices"][0], 1) is not sort:
        raise _NoMatch(reason)
    # of the same length, so that every place is written
    if not same_shape(index.meta["val"], bound["indices"][0].meta["val"]):
        raise _NoMatch(reason)


def _require(node: Any, target: Any, reason: str) -> fx.Node:
    if not isinstance(node, fx.Node) or node.target is not target:
        raise _NoMatch(reason)
    return node
