"""How models write a rotary embedding whose pairs are the halves of what is rotated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from specc.passes.program import bind_args
from specc.passes.rewrite.columns import columns_of

aten = torch.ops.aten


class Rotated(NamedTuple):
    """(a, b) = `x` becomes (a · cos - b · sin, b · cos + a · sin).

    Args:
        x: [..., R], R even.
        cos: [..., R], or [..., R / 2] for both halves.
        sin: likewise.
    """

    x: fx.Node
    cos: fx.Node
    sin: fx.Node

    @property
    def is_shared(self) -> bool:
        """Both halves have the same columns of the tables."""
        return bool(self.cos.meta["val"].shape[-1] != self.x.meta["val"].shape[-1])


def rotated(node: fx.Node) -> Rotated | None:
    """What a node is the rotation of: `x · cos + rotate_half(x) · sin`, or its halves apart."""
    if node.target is aten.cat.default:
        return _of_halves(node)
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return None
    if node.kwargs.get("alpha", 1) != 1:
        return None
    terms = node.all_input_nodes
    for direct, turned in (terms, terms[::-1]):
        for half, sin in _orders(turned):
            for x, cos in _orders(direct):
                if _is_rotate_half(half, x):
                    return Rotated(x, cos, sin)
    return None


def _of_halves(node: fx.Node) -> Rotated | None:
    """`cat([a · cos - b · sin, b · cos + a · sin])` of the halves a, b of one node, as gpt-oss."""
    factors = difference_and_sum(node)
    if factors is None:
        return None
    a, b, cos, sin = factors
    x = _whole(a, b)
    return None if x is None else Rotated(x, cos, sin)


def difference_and_sum(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """(a, b, cos, sin) of `cat([a · cos - b · sin, b · cos + a · sin])` of the last dimension.

    Factors are told apart by what they are cut from: a and b have one source.
    """
    if node.target is not aten.cat.default:
        return None
    parts, dim = bind_args(node)["tensors"], bind_args(node)["dim"]
    if len(parts) != 2 or dim % node.meta["val"].dim() != node.meta["val"].dim() - 1:
        return None
    difference, total = parts
    if difference.target is not aten.sub.Tensor or total.target is not aten.add.Tensor:
        return None
    if any(len(part.args) != 2 or part.kwargs for part in parts):
        return None
    minuend, subtrahend = difference.args
    terms = {frozenset(pair) for term in total.args for pair in _orders(term)[:1]}
    for a, cos in _orders(minuend):  # type: ignore[arg-type]
        for b, sin in _orders(subtrahend):  # type: ignore[arg-type]
            is_sum = terms == {frozenset((b, cos)), frozenset((a, sin))}
            if is_sum and a.all_input_nodes == b.all_input_nodes:
                return a, b, cos, sin
    return None


def _whole(a: fx.Node, b: fx.Node) -> fx.Node | None:
    """What these are the first and the second half of."""
    for x in {item for half in (a, b) for item in half.all_input_nodes}:
        # a chunk is an item of a list of pieces
        x = x if isinstance(x.meta["val"], torch.Tensor) else x.all_input_nodes[0]
        size = int(x.meta["val"].shape[-1])
        if (columns_of(a, x), columns_of(b, x)) == ((0, size // 2), (size // 2, size)):
            return x if size % 2 == 0 else None
    return None


def _orders(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return []
    factors = [arg for arg in product.args if isinstance(arg, fx.Node)]
    return [(factors[0], factors[1]), (factors[1], factors[0])] if len(factors) == 2 else []


def _is_rotate_half(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node is (-b, a) of x = (a, b)."""
    if node.target is not aten.cat.default or len(node.args[0]) != 2:  # type: ignore[arg-type]
        return False
    dim = bind_args(node)["dim"] % node.meta["val"].dim()
    negated, first = node.args[0]  # type: ignore[misc]
    if negated.target is not aten.neg.default or dim != node.meta["val"].dim() - 1:
        return False
    size = int(x.meta["val"].shape[-1])
    halves = columns_of(first, x), columns_of(negated.args[0], x)
    return size % 2 == 0 and halves == ((0, size // 2), (size // 2, size))
