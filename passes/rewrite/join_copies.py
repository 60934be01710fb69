"""Turn a tensor that is filled slice by slice into the concatenation of what it is filled with."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.passes.program import bind_args, emit_call

aten = torch.ops.aten
EMPTY = (aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default)


def join_copies(graph: fx.Graph) -> int:
    """`x = empty(…); x[..., :a].copy_(p); x[..., a:].copy_(q)` → `cat([p, q], -1)`.

    Only where slices of one dimension fill all of the tensor, each entry once, before anything
    reads it. What is left is refused when the graph is verified: it updates in place.

    Returns:
        tensors that were replaced.
    """
    count = 0
    for node in list(graph.nodes):
        if node.target in EMPTY and _join(node):
            count += 1
    return count


def _join(empty: fx.Node) -> bool:
    parts: dict[fx.Node, fx.Node] = {}
    for user in empty.users:
        if user.target is not aten.slice.Tensor or len(user.users) != 1:
            continue
        copy = next(iter(user.users))
        if copy.target is aten.copy_.default and not copy.users and copy.args[0] is user:
            parts[user] = copy
    if not parts:
        return False
    pieces = [_piece(part) for part in parts]
    dims, places = {dim for dim, _, _ in pieces}, sorted(place for _, *place in pieces)
    dim = dims.pop()
    size = empty.meta["val"].shape[dim]
    ends = [0, *(end for _, end in places)]
    is_whole = ends[-1] == size and [start for start, _ in places] == ends[:-1]
    last = max(parts.values())
    is_read_early = any(user < last for user in empty.users if user not in parts)
    if dims or not is_whole or is_read_early or not all(map(_is_of_its_shape, parts.values())):
        return False
    sources = []
    with empty.graph.inserting_after(last):
        anchor = empty.graph.call_function(aten.alias.default, (empty,))
    with empty.graph.inserting_before(anchor):
        for part in sorted(parts, key=lambda item: _piece(item)[1]):
            source: Any = parts[part].args[1]
            value, wanted = source.meta["val"], part.meta["val"]
            if value.dtype != wanted.dtype:
                source = emit_call(empty.graph, aten.to.dtype, source, wanted.dtype)
            sources.append(source)
        joined = emit_call(empty.graph, aten.cat.default, sources, dim)
    joined.meta["nn_module_stack"] = last.meta.get("nn_module_stack")
    empty.graph.erase_node(anchor)
    for copy in parts.values():
        empty.graph.erase_node(copy)
    empty.replace_all_uses_with(joined, lambda user: user not in parts)
    return True


def _is_of_its_shape(copy: fx.Node) -> bool:
    """Whether what is copied is as large as what it goes to, rather than repeated."""
    shapes = [tuple(map(str, item.meta["val"].shape)) for item in copy.args[:2]]  # type: ignore[union-attr]
    return shapes[0] == shapes[1]


def _piece(part: fx.Node) -> tuple[int, int, int]:
    """Dimension, first entry and the one after the last of a slice; (-1, 0, 0) is another kind."""
    bound, whole = bind_args(part), part.args[0].meta["val"]  # type: ignore[union-attr]
    dim = bound["dim"] % whole.dim()
    size, taken = whole.shape[dim], part.meta["val"].shape[dim]
    start = bound["start"] or 0
    if not all(isinstance(x, int) for x in (size, taken, start)) or bound["step"] != 1:
        return -1, 0, 0
    start = start + size if start < 0 else start
    return dim, start, start + taken
