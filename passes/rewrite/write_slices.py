"""Functionalize writes into slices of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from specc.passes.program import bind_args, emit_call, is_view, replace
from specc.passes.rewrite.join_copies import EMPTY

aten = torch.ops.aten


def write_slices(graph: fx.Graph, functional: Mapping[Any, Any]) -> int:
    """`x[..., a:b:s].copy_(y)` → `slice_scatter(x, y, …)`; later readers of x read the result.

    `x[a:b].add_(y)` is rewritten the same way. This is safe only if nothing else reads the memory:
    x is no input, no other view of x is read afterwards, and the base of x is not read, or, for
    `x = z[i]`, only at other indices. Other in-place writes stay, and `verify_graph` refuses them.
    So are uninitialized tensors, except those of `join_copies`.

    Args:
        functional: in-place operator → its functional variant.
    Returns:
        Number of rewritten slices.
    """
    count = 0
    for node in list(graph.nodes):
        is_copy = node.target is aten.copy_.default and not node.users
        if not is_copy and node.target not in functional:
            continue
        part = node.args[0]
        if part.target is not aten.slice.Tensor or set(part.users) != {node}:
            continue
        whole, bound = part.args[0], bind_args(part)
        if whole.op != "call_function" or whole.target in EMPTY or not _is_alone(whole, node):
            continue
        with graph.inserting_before(node):
            value = _written(node, None if is_copy else functional[node.target])
            if value is None:
                continue
            places = (bound["dim"], bound["start"], bound["end"], bound["step"])
            written = emit_call(graph, aten.slice_scatter.default, whole, value, *places)
        written.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        for user in [user for user in whole.users if user > node]:
            user.replace_input_with(whole, written)
        replace(node, value)
        if not part.users:
            graph.erase_node(part)
        count += 1
    return count


def _written(node: fx.Node, operator: Any) -> fx.Node | None:
    """Value of the slice after the call: the copied value, or the functional operator's result."""
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    if operator is not None:
        source = emit_call(node.graph, operator, *node.args, **node.kwargs)
    else:
        source = node.args[1]  # type: ignore[assignment]
    shapes = [str(list(item.shape)) for item in (source.meta["val"], value)]
    if shapes[0] != shapes[1]:
        return None
    if source.meta["val"].dtype != value.dtype:
        source = emit_call(node.graph, aten.to.dtype, source, value.dtype)
    return source


def _is_alone(whole: fx.Node, copy: fx.Node) -> bool:
    """Whether only later readers of `whole` itself can observe the write."""
    views = [user for user in whole.users if is_view(user) and user < copy]
    if any(reader > copy for view in views for reader in _readers(view)):
        return False
    while is_view(whole):
        source = whole.args[0]
        if source.op != "call_function":
            return False
        for user in source.users:
            if user is whole or _is_elsewhere(user, whole):
                continue
            if any(reader > copy for reader in (user, *_readers(user))):
                return False
        whole = source
    return True


def _readers(view: fx.Node) -> list[fx.Node]:
    """Readers of a node, directly or through views."""
    found: list[fx.Node] = []
    for user in view.users:
        found.append(user)
        if is_view(user):
            found += _readers(user)
    return found


def _is_elsewhere(node: fx.Node, other: fx.Node) -> bool:
    """Whether two indices surely differ: unequal ones of the same sign do."""
    if not node.target is other.target is aten.select.int or node.args[1] != other.args[1]:
        return False
    places = node.args[2], other.args[2]
    return places[0] != places[1] and (places[0] < 0) == (places[1] < 0)  # type: ignore[operator]
