"""Take norms of the heads of q and of k into the rotation and the cache write after them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.rewrite.columns import only_user
from specc.passes.rewrite.fuse_rope_write import (
    MOVES,
    moved,
    require_heads_in_rows,
    side_by_side,
)


class FuseHeadNorm(Pass):
    """`rms_norm` of q and of k, then `specc.rope_write` → `specc.norm_rope_write`.

    The norms are those of heads, as in Qwen3 and Gemma 3: of the columns that are rotated, with one
    weight for all heads. That of OLMo 2, over all heads of a token, stays.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.rope_write):
            bound = bind_args(node)
            norms = [_norm_before(bound[name]) for name in ("q", "k")]
            if norms == [None, None]:
                continue
            with result.attempt(node.name):
                _fuse(program.graph, node, bound, norms)
        program.graph.eliminate_dead_code()
        return result


@dataclass(frozen=True)
class _Norm:
    """An `rms_norm`, and what moves its heads."""

    node: fx.Node
    moves: tuple[fx.Node, ...]


def _norm_before(operand: fx.Node) -> _Norm | None:
    moves = []
    node = operand
    while node.target in MOVES:
        moves.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return _Norm(node, tuple(reversed(moves))) if node.target is ops.rms_norm else None


def _fuse(
    graph: fx.Graph, node: fx.Node, bound: dict[str, fx.Node], norms: list[_Norm | None]
) -> None:
    rows, given = [], []
    for name, norm in zip(("q", "k"), norms, strict=True):
        if norm is None:
            raise NoMatch(f"{name} has no norm of its heads")
        require_heads_in_rows(list(norm.moves), name)
        for item in (*norm.moves, norm.node):
            if only_user(item) is None:
                raise NoMatch(f"{item.name}, the normalized {name}, is used elsewhere too")
        given.append(bind_args(norm.node))
        rows.append((given[-1]["x"], norm.moves))
    (eps, offset), other = ([item[name] for name in ("eps", "unit_offset")] for item in given)
    if [eps, offset] != other:
        raise NoMatch(f"eps and unit_offset are {eps}, {offset} of q, and {other} of k")
    with graph.inserting_before(node):
        q, k = (side_by_side(moved(x, moves)) for x, moves in rows)
        gammas = (item["weight"] for item in given)
        v, *rest = (bound[x.name] for x in ops.rope_write._schema.arguments[2:])
        if not bound["hadamard"]:
            rest.pop()  # graphs without it are what they were
        fused = emit_call(graph, ops.norm_rope_write, q, k, v, *gammas, eps, offset, *rest)
    fused.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    replace(node, fused)
