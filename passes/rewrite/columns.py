"""Which columns of another tensor a node takes: slices, chunks and splits of the last dimension."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from specc.passes.program import bind_args

aten = torch.ops.aten
_PIECES = (
    aten.chunk.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def columns(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """(source, first, last + 1) of a node that is some columns of its source, side by side."""
    if node.target is operator.getitem:
        return _piece(node)
    if node.target not in (aten.slice.Tensor, aten.narrow.default):
        return None
    bound = bind_args(node)
    source = bound["self"] if "self" in bound else bound["input"]
    value = source.meta["val"]
    if bound["dim"] % value.dim() != value.dim() - 1 or bound.get("step", 1) != 1:
        return None
    first = bound["start"] or 0
    if not isinstance(first, int):
        return None
    first = min(first + value.shape[-1] if first < 0 else first, value.shape[-1])
    return source, first, first + int(node.meta["val"].shape[-1])


def columns_of(node: fx.Node, source: fx.Node) -> tuple[int, int] | None:
    """Which columns of this source a node is, also through slices of slices; None if it is not."""
    first = 0
    width = int(node.meta["val"].shape[-1])
    while node is not source:
        found = columns(node)
        if found is None:
            return None
        node, first = found[0], first + found[1]
    return first, first + width


def through_widening(node: fx.Node) -> fx.Node:
    """The node before conversions that lose nothing: to the same or to a wider float."""
    while is_conversion(node):
        source = node.args[0]
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if before != after and not (before in _FLOATS[1:] and after is torch.float32):
            break
        node = source
    return node


def is_conversion(node: fx.Node) -> bool:
    """Whether a node changes the dtype of its first argument, at most."""
    return node.target in (aten.to.dtype, aten.type_as.default)


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that reads this one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def same_shape(first: Tensor, second: Tensor) -> bool:
    """Compare shapes by their symbols, without a guard on sizes."""
    return str(list(first.shape)) == str(list(second.shape))


def _piece(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    pieces, index = node.args
    if not isinstance(pieces, fx.Node) or pieces.target not in _PIECES:
        return None
    source = pieces.args[0]
    value = source.meta["val"]
    if bind_args(pieces)["dim"] % value.dim() != value.dim() - 1:
        return None
    widths = [int(piece.shape[-1]) for piece in pieces.meta["val"]]
    first = sum(widths[:index])
    return source, first, first + widths[index]
