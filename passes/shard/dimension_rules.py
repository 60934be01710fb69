"""What each operator says about the dimensions of its operands and results.

Those of torch are here and in `view_rules.py`; what specc's own say is in their table
(`specc.kernels.operators`), which `cut_rules.py` reads.

A rule that is missing costs memory: the operator's dimensions stay whole. A rule that is wrong
costs correctness; `shard.py` checks every shape after the cut.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.program import Program, bind_args
from specc.passes.proof.token_routing import CONVERSIONS, POINTWISE, name_of
from specc.passes.shard.cut_rules import apply_cut
from specc.passes.shard.norms_over_heads import ADDS_HEADS
from specc.passes.shard.relations import Relations, is_tensor
from specc.passes.shard.view_rules import VIEW_RULES, Rule

# element by element, beside those that torch tags so
_POINTWISE = (POINTWISE | CONVERSIONS | {"empty_like", "expand"}) - {"repeat", "stack"}


def relations_of(program: Program) -> Relations:
    """What all operators of a program say; linear in its nodes."""
    found = Relations()
    by_key: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            _input(program, found, node, by_key)
        elif node.op == "call_function":
            _call(found, node)
    return found


def _input(program: Program, found: Relations, node: fx.Node, by_key: dict[str, fx.Node]) -> None:
    if node.target in program.weights:
        # inputs of one key are one tensor of the weight file
        first = by_key.setdefault(program.weights[node.target].key, node)
        if first is not node:
            for dim in range(node.meta["val"].dim()):
                found.same(first, dim, node, dim)
    elif node.target not in program.caches | program.states and not _is_of_heads(program, node):
        found.block_all(node, f"{node.target} is the same on every rank")


def _is_of_heads(program: Program, node: fx.Node) -> bool:
    """A constant of which a rank reads its own heads' values, see `Shard`.

    Slopes of attention; and factors of the columns of a projection, before a layer keeps states.
    """
    if node.target not in program.constants:
        return False
    sizes = [size for size in node.meta["val"].shape if size != 1]
    if program.state_layers and len(sizes) == 1:
        return all(user.target is torch.ops.aten.mul.Tensor for user in node.users)
    return all(
        user.target is ops.tree_attention and bind_args(user)["slopes"] is node
        for user in node.users
    )


def _call(found: Relations, node: fx.Node) -> None:
    if node.target is operator.getitem:
        _getitem(found, node)
        return
    value = node.meta.get("val")
    if value is None:
        # it writes: hidden states are kept whole, for drafts that one rank has
        for item in node.all_input_nodes:
            found.block_all(item, f"{node.target} takes it as it is")
    if not isinstance(value, torch.Tensor | tuple | list):
        return
    own = ops.operator_of(node.target)
    name = name_of(node)
    if own is not None:
        apply_cut(found, node, own.name, own.cut)
    elif name in _RULES:
        _RULES[name](found, node)
    elif name in _POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        _pointwise(found, node)
    else:
        for item in (*node.all_input_nodes, node):
            found.block_all(item, f"no rule says how {name} could be cut")


def _getitem(found: Relations, node: fx.Node) -> None:
    source, index = node.args
    if name_of(source) in ("split", "chunk", "split_with_sizes"):
        whole, dim, bounds = parts_of(source)
        found.part(whole, node, dim, *bounds[index])
    elif is_tensor(node):
        found.block_all(node, f"{name_of(source)} has several results")


def parts_of(node: fx.Node) -> tuple[fx.Node, int, list[tuple[int, int]]]:
    """Of a split or chunk: what it cuts, along which dimension, and where."""
    given = bind_args(node)
    whole, dim = given["self"], given["dim"]
    values = node.meta["val"]
    bounds, start = [], 0
    for value in values:
        size = value.shape[dim]
        bounds.append((start, start + size))
        start += size
    return whole, dim, bounds


def _pointwise(found: Relations, node: fx.Node) -> None:
    rank = node.meta["val"].dim()
    # of the others only a dtype is taken
    operands = node.args[:1] if name_of(node) == "type_as" else node.all_input_nodes
    for item in operands:
        if is_tensor(item):
            shape = item.meta["val"].shape
            for dim, size in enumerate(shape):
                # a dimension of size 1 is spread over whatever the others have
                if isinstance(size, int) and size > 1:
                    found.same(item, dim, node, dim + rank - len(shape))


def _slice(found: Relations, node: fx.Node) -> None:
    given = bind_args(node)
    if not isinstance(given["self"].meta["val"].shape[given["dim"]], int):
        _pointwise(found, node)
    elif bounds := slice_of(node):
        found.part(given["self"], node, given["dim"], *bounds)
    else:
        rank = node.meta["val"].dim()
        for dim in range(rank):
            if dim == given["dim"] % rank:
                found.block(given["self"], dim, "a slice with steps, or to where tokens say")
                found.block(node, dim, "a slice with steps, or to where tokens say")
            else:
                found.same(given["self"], dim, node, dim)


def slice_of(node: fx.Node) -> tuple[int, int] | None:
    """First index of a slice and the one after its last; None where it is not such a run."""
    given = bind_args(node)
    size = given["self"].meta["val"].shape[given["dim"]]
    ends = (given["start"], given["end"])
    if given["step"] != 1 or not all(isinstance(end, int | None) for end in ends):
        return None
    start, stop, _ = slice(*ends).indices(size)
    return start, max(start, stop)


def _linear(found: Relations, node: fx.Node) -> None:
    given = bind_args(node)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    last = node.meta["val"].dim() - 1
    for dim in range(last):
        found.same(x, dim, node, dim)
    found.same(weight, 0, node, last)
    _contract(found, node, x, last, weight, 1)
    if bias is not None:
        found.same(bias, 0, node, last)


def _addmm(found: Relations, node: fx.Node) -> None:
    given = bind_args(node)
    bias, x, weight = given["self"], given["mat1"], given["mat2"]
    if given["beta"] != 1 or given["alpha"] != 1:
        for item in (bias, x, weight, node):
            found.block_all(item, "a product with factors")
        return
    _mm(found, node, x, weight)
    found.same(bias, bias.meta["val"].dim() - 1, node, 1)


def _mm(found: Relations, node: fx.Node, *operands: fx.Node) -> None:
    x, weight = operands or node.args
    found.same(x, 0, node, 0)
    found.same(weight, 1, node, 1)
    _contract(found, node, x, 1, weight, 0)


def _bmm(found: Relations, node: fx.Node) -> None:
    """[H, M, K] by [H, K, N]."""
    x, weight = node.args
    found.same(x, 0, node, 0)
    found.same(weight, 0, node, 0)
    found.same(x, 1, node, 1)
    found.same(weight, 2, node, 2)
    _contract(found, node, x, 2, weight, 1)


def _matmul(found: Relations, node: fx.Node) -> None:
    """[B, H, M, K] by [H, K, N], a weight of each head; others stay whole."""
    x, weight = node.args
    if (x.meta["val"].dim(), weight.meta["val"].dim()) != (4, 3):
        for item in (x, weight, node):
            found.block_all(item, "a product of other dimensions than heads and rows")
        return
    found.same(x, 1, weight, 0)
    found.same(x, 1, node, 1)
    found.same(x, 2, node, 2)
    found.same(weight, 2, node, 3)
    _contract(found, node, x, 3, weight, 1)


def _contract(
    found: Relations, node: fx.Node, x: fx.Node, dim: int, weight: fx.Node, weight_dim: int
) -> None:
    found.same(x, dim, weight, weight_dim)
    if (element := found.element(x, dim)) is not None:
        found.contracted[node] = element


def _embedding(found: Relations, node: fx.Node) -> None:
    table, ids = node.args[:2]
    found.same(table, 1, node, node.meta["val"].dim() - 1)
    for dim in range(ids.meta["val"].dim()):
        found.same(ids, dim, node, dim)
    if table.op != "placeholder":
        found.block(table, 0, "rows of a computed table are chosen")
    elif (element := found.element(table, 0)) is not None:
        found.looked_up[node] = element


def _index_select(found: Relations, node: fx.Node) -> None:
    given = bind_args(node)
    chosen = given["dim"] % node.meta["val"].dim()
    found.block_all(given["index"], "it chooses")
    for dim in range(node.meta["val"].dim()):
        if dim == chosen:
            found.block(given["self"], dim, "its indices are chosen")
            found.block(node, dim, "its indices are chosen")
        else:
            found.same(given["self"], dim, node, dim)


def _index(found: Relations, node: fx.Node) -> None:
    source, indices = node.args
    for item in indices:
        found.block_all(item, "it chooses")
    if len(indices) != 1 or indices[0].meta["val"].dim() != 1:
        for item in (source, node):
            found.block_all(item, "its indices are chosen")
        return
    found.block(source, 0, "its indices are chosen")
    found.block(node, 0, "its indices are chosen")
    for dim in range(1, source.meta["val"].dim()):
        found.same(source, dim, node, dim)


def _reduce(found: Relations, node: fx.Node) -> None:
    given = bind_args(node)
    source, dims = given["self"], given.get("dim")
    rank = source.meta["val"].dim()
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    gone = {dim % rank for dim in dims}
    keeps, place = node.meta["val"].dim() == rank, 0
    for dim in range(rank):
        if dim in gone and node.meta.get(ADDS_HEADS):
            if (element := found.element(source, dim)) is not None:
                found.contracted[node] = element
            place += keeps
        elif dim in gone:
            found.block(source, dim, f"{name_of(node)} goes over it")
            place += keeps
        else:
            found.same(source, dim, node, place)
            place += 1


def _along(found: Relations, node: fx.Node) -> None:
    """Operators that go along one dimension and keep the shape."""
    given = bind_args(node)
    source, along = given["self"], given["dim"] % given["self"].meta["val"].dim()
    for dim in range(source.meta["val"].dim()):
        if not is_tensor(node):
            found.block(source, dim, f"{name_of(node)} has several results")
        elif dim == along:
            found.block(source, dim, f"{name_of(node)} goes along it")
            found.block(node, dim, f"{name_of(node)} goes along it")
        else:
            found.same(source, dim, node, dim)


def _cat(found: Relations, node: fx.Node) -> None:
    """Each operand is a part of the result."""
    given = bind_args(node)
    along, start = given["dim"] % node.meta["val"].dim(), 0
    sizes = [item.meta["val"].shape[along] for item in given["tensors"]]
    if not all(isinstance(size, int) for size in sizes):
        for item in (*given["tensors"], node):
            found.block_all(item, "several values are joined along tokens")
        return
    for item, size in zip(given["tensors"], sizes, strict=True):
        found.part(node, item, along, start, start + size)
        start += size


def _layer_norm(found: Relations, node: fx.Node) -> None:
    given = bind_args(node)
    x = given["input"]
    rank, kept = x.meta["val"].dim(), x.meta["val"].dim() - len(given["normalized_shape"])
    for dim in range(rank):
        if dim < kept:
            found.same(x, dim, node, dim)
        else:
            found.block(x, dim, "a norm goes over it")
            found.block(node, dim, "a norm goes over it")
    for parameter in (given["weight"], given.get("bias")):
        if parameter is not None:
            found.block_all(parameter, "a norm goes over it")


def _nothing(found: Relations, node: fx.Node) -> None:
    """Its parts are looked at one by one, see `_getitem`."""


_RULES: Mapping[str, Rule] = VIEW_RULES | {
    "slice": _slice,
    "split": _nothing,
    "split_with_sizes": _nothing,
    "chunk": _nothing,
    "linear": _linear,
    "addmm": _addmm,
    "mm": _mm,
    "bmm": _bmm,
    "matmul": _matmul,
    "embedding": _embedding,
    "index_select": _index_select,
    "index": _index,
    "mean": _reduce,
    "sum": _reduce,
    "softmax": _along,
    "cumsum": _along,
    "topk": _along,
    "cat": _cat,
    "layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
}
