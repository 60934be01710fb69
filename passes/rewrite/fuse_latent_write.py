"""Take rotary embedding beside latents, and the write of their rows, out of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.rewrite.absorb_latent import values_in_keys
from specc.passes.rewrite.columns import columns, is_conversion, only_user
from specc.passes.rewrite.fuse_rope_write import (
    WRITE_INPUTS,
    attend_to_caches,
    flat_table,
    side_by_side,
)
from specc.passes.rewrite.rotated_pairs import RotatedPairs, real_tables, rotated_pairs

aten = torch.ops.aten
_MOVES = (aten.squeeze.dim, aten.unsqueeze.default)


class FuseLatentWrite(Pass):
    """Rotations, `cat` beside latents, `tree_attention` → `rope_write_latent`, `specc.attend`.

    Where long prompts read rotated queries, too (`ExpandPrompts`), they read columns of the result.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        known: _Known = {}
        for node in program.calls(ops.tree_attention):
            if values_in_keys(node):
                with result.attempt(node.name):
                    _fuse(program.graph, node, known)
        program.graph.eliminate_dead_code()
        return result


# of the first layer that has a table → as [Nt, P]
_Known = dict[tuple[tuple[fx.Node, int, int], ...], list[fx.Node]]


def _fuse(graph: fx.Graph, node: fx.Node, known: _Known) -> None:
    bound = bind_args(node)
    (q, q_rest, queries), (latent, _shared, keys) = (_parts(bound[name]) for name in "qk")
    same = [tuple(map(_columns, item.tables)) for item in (queries, keys)]
    if same[0] != same[1] or queries.pairs != keys.pairs:
        raise NoMatch("q and k are rotated by different tables")
    size = int(q_rest.meta["val"].shape[-1])
    if queries.x.meta["val"].dtype != q.meta["val"].dtype:
        raise NoMatch("rotated are numbers of another type than latents")
    for item in (queries, keys):
        for table in item.tables:
            _require_rows(table, item.x)
    if (key := same[0]) not in known:
        found = real_tables(queries.tables)
        is_shared = int(found[0].meta["val"].shape[-1]) != size
        known[key] = [flat_table(table, is_shared, {}) for table in found]
    cos, sin = known[key]
    with graph.inserting_before(node):
        rows = [side_by_side(item) for item in (q, _heads(queries.x), latent, _heads(keys.x))]
        inputs = (bound[name] for name in WRITE_INPUTS)
        turned = emit_call(graph, ops.rope_write_latent, *rows, cos, sin, *inputs, queries.pairs)
        rest = emit_call(graph, aten.slice.Tensor, turned, 2, int(q.meta["val"].shape[-1]))
    attend_to_caches(node, turned, bound)
    for user in list(q_rest.users):
        if turned < user:
            user.replace_input_with(q_rest, rest)


def _require_rows(table: fx.Node, x: fx.Node) -> None:
    """Raises NoMatch: a table that is not one row for each token, whatever the head."""
    shape = [str(size) for size in table.meta["val"].shape]
    if shape[-2:-1] != [str(x.meta["val"].shape[-2])] or set(shape[:-2]) - {"1"}:
        raise NoMatch(f"rotated by a table of [{', '.join(shape)}]")


def _parts(operand: Any) -> tuple[fx.Node, fx.Node, RotatedPairs]:
    """The part of latents [H, Nt, R], the part beside it [H, Nt, P], and what that is made of."""
    if operand.target is not aten.cat.default or len(operand.args[0]) != 2:
        raise NoMatch("rows are not latents and one part beside them")
    first, rest = operand.args[0]
    node = rest
    while node.target in _MOVES or (is_conversion(node) and only_user(node) is not None):
        node = node.args[0]
    found = rotated_pairs(node)
    if found.x.meta["val"].dim() != 4 or found.x.meta["val"].shape[0] != 1:
        raise NoMatch("rotated are not heads of one sequence")
    return first, rest, found


def _heads(x: fx.Node) -> fx.Node:
    """[H, Nt, P] of [1, H, Nt, P]."""
    return emit_call(x.graph, aten.squeeze.dim, x, 0)


def _columns(table: fx.Node) -> tuple[fx.Node, int, int]:
    """What the columns of a table are cut from, the first one, and how many: layers cut anew."""
    first, width = 0, int(table.meta["val"].shape[-1])
    while True:
        found = columns(table)
        if found is not None:
            table, first = found[0], first + found[1]
        elif table.target in _MOVES and table.meta["val"].shape[-1:] == _shape(table)[-1:]:
            table = table.args[0]  # type: ignore[assignment]
        else:
            return table, first, width


def _shape(move: fx.Node) -> torch.Size:
    return move.args[0].meta["val"].shape  # type: ignore[union-attr]
