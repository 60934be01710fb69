"""What operators that only move or regroup elements say about dimensions: views and transposes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from specc.passes.program import bind_args
from specc.passes.shard.relations import Relations, size_of

Rule = Callable[[Relations, fx.Node], None]


def _moved(order: Callable[[fx.Node, dict[str, Any]], Sequence[int]]) -> Rule:
    """A rule for operators whose result's dimension i is their operand's order[i]."""

    def rule(found: Relations, node: fx.Node) -> None:
        given = bind_args(node)
        for dim, source in enumerate(order(node, given)):
            if source >= 0:
                found.same(given["self"], source, node, dim)

    return rule


def _transposed(node: fx.Node, given: dict[str, Any]) -> list[int]:
    rank = node.meta["val"].dim()
    order = list(range(rank))
    a, b = given["dim0"] % rank, given["dim1"] % rank
    order[a], order[b] = order[b], order[a]
    return order


def _permuted(node: fx.Node, given: dict[str, Any]) -> list[int]:
    return [dim % node.meta["val"].dim() for dim in given["dims"]]


def _reversed(node: fx.Node, given: dict[str, Any]) -> list[int]:
    return list(range(node.meta["val"].dim()))[::-1]


def _unsqueezed(node: fx.Node, given: dict[str, Any]) -> list[int]:
    rank = node.meta["val"].dim()
    dim = given["dim"] % rank
    return [-1 if i == dim else i - (i > dim) for i in range(rank)]


def _squeezed(node: fx.Node, given: dict[str, Any]) -> list[int]:
    before = given["self"].meta["val"].shape
    rank = node.meta["val"].dim()
    if len(before) == rank:
        return list(range(rank))
    named = given.get("dim", range(len(before)))
    named = [dim % len(before) for dim in ([named] if isinstance(named, int) else named)]
    return [i for i, size in enumerate(before) if i not in named or str(size) != "1"]


def _complex(found: Relations, node: fx.Node) -> None:
    """[..., n, 2] real numbers are [..., n] complex ones, either way."""
    source = node.args[0]
    wide = max(source, node, key=lambda item: item.meta["val"].dim())
    last = wide.meta["val"].dim() - 1
    for dim in range(last):
        found.same(source, dim, node, dim)
    found.block(wide, last, "real and imaginary parts belong together")


def _view(found: Relations, node: fx.Node) -> None:
    """Dimensions that become others one to one keep their class, as do the outermost of groups."""
    source = node.args[0]
    for before, after in _groups(source.meta["val"].shape, node.meta["val"].shape):
        if len(before) == len(after) == 1:
            found.same(source, before[0], node, after[0])
            continue
        sizes = [source.meta["val"].shape[i] for i in before]
        sizes += [node.meta["val"].shape[i] for i in after]
        if not all(isinstance(size, int) for size in sizes):
            _block(found, source, before, "it becomes one dimension with tokens")
            _block(found, node, after, "it becomes one dimension with tokens")
        elif len(before) == 1:
            _nest(found, source, before[0], node, after)
        elif len(after) == 1:
            _nest(found, node, after[0], source, before)
        else:
            _regroup(found, source, before, node, after)


def _nest(found: Relations, joined: fx.Node, dim: int, apart: fx.Node, dims: Sequence[int]) -> None:
    """One dimension is several: the outermost has its class, the inner ones stay whole."""
    shape = apart.meta["val"].shape
    inner = math.prod(int(shape[i]) for i in dims[1:])
    large, small = found.element(joined, dim), found.element(apart, dims[0])
    # groups have no dimensions of size 1
    assert large is not None
    assert small is not None
    found.nested(large, small, inner)
    _block(found, apart, dims[1:], "it is the inner part of a dimension")


def _regroup(
    found: Relations, source: fx.Node, before: Sequence[int], node: fx.Node, after: Sequence[int]
) -> None:
    """Several dimensions are several others: an index of the outermost is a run of another one."""
    sides = [(source, before), (node, after)]
    (few, many) = sorted(sides, key=lambda side: int(side[0].meta["val"].shape[side[1][0]]))
    small, large = (found.element(item, dims[0]) for item, dims in (few, many))
    # groups have no dimensions of size 1
    assert small is not None
    assert large is not None
    scale, rest = divmod(size_of(large), size_of(small))
    first = 0 if rest else 1
    if not rest:
        found.nested(large, small, scale)
    for item, dims in sides:
        _block(found, item, dims[first:], "dimensions become others")


def _block(found: Relations, node: fx.Node, dims: Sequence[int], why: str) -> None:
    for dim in dims:
        found.block(node, dim, why)


def _groups(before: Sequence[Any], after: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Least runs of dimensions of equal product, those of size 1 left out."""
    a = [(i, size) for i, size in enumerate(before) if str(size) != "1"]
    b = [(i, size) for i, size in enumerate(after) if str(size) != "1"]
    groups = []
    while a and b:
        (i, size_a), (j, size_b) = a.pop(0), b.pop(0)
        left, right, product_a, product_b = [i], [j], size_a, size_b
        while str(product_a) != str(product_b) and (a or b):
            gives_a = bool(a) and (not b or _is_less(product_a, product_b))
            index, size = (a if gives_a else b).pop(0)
            if gives_a:
                left, product_a = [*left, index], product_a * size
            else:
                right, product_b = [*right, index], product_b * size
        groups.append((left, right))
    return groups


def _is_less(a: Any, b: Any) -> bool:
    """Whether the first of two products has to grow to be the other.

    Sequences, tokens of each, and numbers do not compare: a product without what the other has
    is less, and of others the first is.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    symbols_a, symbols_b = _symbols(a), _symbols(b)
    return symbols_a <= symbols_b or not symbols_b <= symbols_a


def _symbols(size: Any) -> set[str]:
    return set() if isinstance(size, int) else set(map(str, size.node.expr.free_symbols))


VIEW_RULES: dict[str, Rule] = {
    "transpose": _moved(_transposed),
    "permute": _moved(_permuted),
    "t": _moved(_reversed),
    "unsqueeze": _moved(_unsqueezed),
    "squeeze": _moved(_squeezed),
    "view": _view,
    "reshape": _view,
    "_unsafe_view": _view,
    "flatten": _view,
    "unflatten": _view,
    "view_as_complex": _complex,
    "view_as_real": _complex,
}
