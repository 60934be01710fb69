"""What keys and values of attention are expanded from: one latent of each token (MLA).

Operands are [B, H, T, D]: of all tokens of a pass, B = 1, or of a batch of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from specc.passes.base import NoMatch
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.rewrite.columns import columns

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.contiguous.default, aten.clone.default)


@dataclass(frozen=True)
class Shared:
    """Part of a key that all heads have: [B, 1, T, r], at this column of the key."""

    source: fx.Node
    first: int


@dataclass(frozen=True)
class _Keys:
    """Operands of attention whose keys have a part that all heads share.

    Args:
        own: the other part [B, H, T, n].
        first: its column.
        shared: in order.
    """

    own: fx.Node
    first: int
    shared: tuple[Shared, ...]


@dataclass(frozen=True)
class Expanded:
    """[B, H, T, last - first]: columns of what a weight [H · width, R] makes of each token."""

    latent: fx.Node
    weight: fx.Node
    num_heads: int
    width: int
    first: int
    last: int


@dataclass(frozen=True)
class Latent:
    """What attention reads: a latent [B, T, R], or [T, R] of one sequence, and what expands it.

    Args:
        keys: columns of each head's own part of keys.
        own_first: column of a key, and of a query, where the own part begins.
        shared: parts of a key that all heads have, in order.
    """

    keys: Expanded
    values: Expanded
    own_first: int
    shared: tuple[Shared, ...]

    @property
    def latent(self) -> fx.Node:
        return self.keys.latent

    @property
    def size(self) -> int:
        return width_of(self.latent)


def has_shared_keys(key: fx.Node) -> bool:
    """Whether keys [B, H, T, D] have a part that is one head's and shared by all."""
    return _shared_keys(key) is not None


def latent_of(program: Program, query: fx.Node, key: fx.Node, value: fx.Node) -> Latent:
    """What keys and values of attention are expanded from.

    Args:
        query: [B, H, T, D].
        key: [B, H, T, D], of which `has_shared_keys`.
        value: [B, H, T, DV].
    Raises:
        NoMatch: not from one latent, or not by a weight of each head alone.
    """
    parts = _shared_keys(key)
    assert parts is not None
    keys = _expanded(program, parts.own, "keys")
    values = _expanded(program, value, "values")
    if keys.latent is not values.latent:
        raise NoMatch("keys and values are not expanded from one latent")
    num_heads = int(query.meta["val"].shape[1])
    if not keys.num_heads == values.num_heads == num_heads:
        raise NoMatch(f"{num_heads} heads of queries read {keys.num_heads} of keys")
    items = (query, keys.latent, keys.weight, values.weight, *(x.source for x in parts.shared))
    dtypes = {str(item.meta["val"].dtype) for item in items}
    if len(dtypes) > 1:
        raise NoMatch(f"its operands are of {', '.join(sorted(dtypes))}")
    return Latent(keys, values, parts.first, parts.shared)


def rows_of_heads(graph: fx.Graph, item: Expanded) -> fx.Node:
    """Of a weight [H · width, R], the rows of these columns of each head: [H, n, R], a view."""
    size = width_of(item.weight)
    heads = emit_call(graph, aten.view.default, item.weight, [item.num_heads, item.width, size])
    if (item.first, item.last) == (0, item.width):
        return heads
    return emit_call(graph, aten.slice.Tensor, heads, 1, item.first, item.last)


def query_columns(graph: fx.Graph, q: fx.Node, first: int, width: int) -> fx.Node:
    """Columns of queries [B, H, T, D]; what they were joined from, where that is the same."""
    if q.target is aten.cat.default:
        start, parts = 0, bind_args(q)
        for part in parts["tensors"] if parts["dim"] % 4 == 3 else ():
            if (start, width_of(part)) == (first, width):
                return part
            start += width_of(part)
    return emit_call(graph, aten.slice.Tensor, q, -1, first, first + width)


def width_of(node: fx.Node) -> int:
    """Columns."""
    return int(node.meta["val"].shape[-1])


def _shared_keys(key: fx.Node) -> _Keys | None:
    """The parts of keys that are one head's and shared by all; None where they are not made so."""
    if key.target is not aten.cat.default or key.meta["val"].dim() != 4:
        return None
    bound = bind_args(key)
    if bound["dim"] % 4 != 3 or key.meta["val"].shape[1] == 1:
        return None
    own, shared, first = [], [], 0
    for part in bound["tensors"]:
        if (source := _of_all_heads(part)) is not None:
            shared.append(Shared(source, first))
        else:
            own.append((part, first))
        first += width_of(part)
    if len(own) != 1 or not shared:
        return None
    return _Keys(*own[0], tuple(shared))


def _of_all_heads(part: fx.Node) -> fx.Node | None:
    """The [B, 1, T, r] that is spread over heads."""
    if part.target is not aten.expand.default:
        return None
    source: fx.Node = part.args[0]
    own, spread = source.meta["val"].shape, part.meta["val"].shape
    is_one = len(own) == 4 and str(own[1]) == "1"
    rest = [[str(shape[dim]) for dim in (0, 2, 3)] for shape in (own, spread[-4:])]
    return source if is_one and len(spread) == 4 and rest[0] == rest[1] else None


def _expanded(program: Program, node: fx.Node, what: str) -> Expanded:
    """Follow columns of heads back to the projection that makes them.

    Raises:
        NoMatch: there is none, or it is not a product with a parameter alone.
    """
    first, width, is_turned = 0, width_of(node), False
    while True:
        if (found := columns(node)) is not None:
            node, first = found[0], first + found[1]
        elif node.target is aten.transpose.int and _turns_heads(node):
            node, is_turned = node.args[0], not is_turned
        elif node.target in _COPIES:
            node = node.args[0]
        else:
            break
    linear = node.args[0] if node.target in _VIEWS else None
    if not is_turned or linear is None or linear.target is not aten.linear.default:
        raise NoMatch(f"its {what} are not columns of a projection to heads")
    bound, sizes, rows = bind_args(linear), node.meta["val"].shape, linear.meta["val"].shape
    # [B, T, H, w] of [..., T, H · w]
    leading = [str(size) for size in rows[:-2] if str(size) != "1"]
    is_split = len(sizes) == 4 and leading == [x for x in (str(sizes[0]),) if x != "1"]
    if not is_split or str(sizes[1]) != str(rows[-2]) or sizes[2] * sizes[3] != rows[-1]:
        raise NoMatch(f"its {what} are not the heads of a projection, one after the other")
    if bound["bias"] is not None:
        raise NoMatch(f"the projection to its {what} has a bias")
    if bound["weight"].target not in program.weights:
        raise NoMatch(f"the weight of the projection to its {what} is computed")
    place = first, first + width
    return Expanded(bound["input"], bound["weight"], int(sizes[2]), int(sizes[3]), *place)


def _turns_heads(node: fx.Node) -> bool:
    """Whether a transpose of four dimensions exchanges heads and tokens."""
    bound, rank = bind_args(node), node.meta["val"].dim()
    return rank == 4 and {bound["dim0"] % rank, bound["dim1"] % rank} == {1, 2}
