"""How models write a rotary embedding of neighboring columns, beside that of halves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from specc.passes.base import NoMatch
from specc.passes.program import bind_args, emit_call
from specc.passes.rewrite.columns import through_widening
from specc.passes.rewrite.rotated import difference_and_sum, rotated

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
_MOVES = (aten.unsqueeze.default, aten.squeeze.dim)


class RotatedPairs(NamedTuple):
    """Rows `x` whose pairs of columns are rotated.

    Args:
        x: [..., P].
        tables: cosines and sines [..., P], or [..., P / 2] for both columns of a pair; or the one
            complex table of both.
        pairs: see `specc.kernels.reference.latent.PAIRS`.
    """

    x: fx.Node
    tables: tuple[fx.Node, ...]
    pairs: str


def rotated_pairs(node: fx.Node) -> RotatedPairs:
    """What a node is the rotation of.

    Raises:
        NoMatch: it is none, or one of another form.
    """
    if (halves := rotated(node)) is not None:
        return RotatedPairs(halves.x, (halves.cos, halves.sin), "halves")
    found = _apart(node) or _complex(node)
    if found is None:
        raise NoMatch("what heads share is rotated in another form, or not at all")
    return found


def _apart(node: fx.Node) -> RotatedPairs | None:
    """`cat([a · cos - b · sin, b · cos + a · sin])` of neighbors a, b, as DeepSeek V3."""
    factors = difference_and_sum(node)
    if factors is None:
        return None
    a, b, cos, sin = factors
    x = a.args[0]
    is_every_second = all(
        part.target is aten.slice.Tensor and part.args[0] is x and _columns(part) == (start, 2)
        for start, part in enumerate((a, b))
    )
    return RotatedPairs(x, (cos, sin), "apart") if is_every_second else None  # type: ignore[arg-type]


def _columns(part: fx.Node) -> tuple[int, int] | None:
    """First one and step of the columns that a slice has, up to the last one."""
    bound, size = bind_args(part), part.args[0].meta["val"].shape  # type: ignore[union-attr]
    is_last = bound["dim"] % len(size) == len(size) - 1
    is_whole = bound["end"] is None or bound["end"] >= size[-1]
    return (bound["start"] or 0, bound["step"]) if is_last and is_whole else None


def _complex(node: fx.Node) -> RotatedPairs | None:
    """`view_as_real(view_as_complex(x) · table)`, as DeepSeek V2."""
    real = _reshaped(node, 2)
    if real is None or real.target is not aten.view_as_real.default:
        return None
    product = real.args[0]
    if product.target is not aten.mul.Tensor:  # type: ignore[union-attr]
        return None
    for number, table in (product.args, product.args[::-1]):  # type: ignore[union-attr]
        if not isinstance(table, fx.Node) or number.target is not aten.view_as_complex.default:
            continue
        x = _reshaped(number.args[0], 2, to_pairs=True)
        if x is not None and table.meta["val"].dtype == torch.complex64:
            return RotatedPairs(through_widening(x), (table,), "neighbors")
    return None


def _reshaped(node: Any, width: int, *, to_pairs: bool = False) -> fx.Node | None:
    """[..., P] of [..., P / 2, 2], which a node has under the other shape."""
    if node.target not in _RESHAPES:
        return None
    source: fx.Node = node.args[0]
    pairs, rows = (node, source) if to_pairs else (source, node)
    shape, flat = (item.meta["val"].shape for item in (pairs, rows))
    is_same = len(shape) == len(flat) + 1 and shape[-1] == width
    is_same = is_same and list(map(str, shape[:-2])) == list(map(str, flat[:-1]))
    return source if is_same and int(flat[-1]) == width * int(shape[-2]) else None


def real_tables(tables: tuple[fx.Node, ...]) -> tuple[fx.Node, fx.Node]:
    """Cosines and sines; those of a complex table are emitted where it is computed."""
    if len(tables) == 2:
        return tables  # type: ignore[return-value]
    (table,) = tables
    while table.target in _MOVES:
        table = table.args[0]  # type: ignore[assignment]
    graph = table.graph
    with graph.inserting_after(table):
        both = emit_call(graph, aten.view_as_real.default, table)
    with graph.inserting_after(both):
        sin = emit_call(graph, aten.select.int, both, -1, 1)
        cos = emit_call(graph, aten.select.int, both, -1, 0)
    return cos, sin
