"""Attention of padded programs over cached latents; `AbsorbLatent` does it to flat ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from specc.errors import UnsupportedAttentionError
from specc.passes.base import NoMatch
from specc.passes.program import Program, emit_call, module_path
from specc.passes.rewrite.latent import (
    has_shared_keys,
    latent_of,
    query_columns,
    rows_of_heads,
    width_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class CachedLatent:
    """What attention reads in place of queries, keys and values of heads.

    Args:
        queries: [B, H, N, R + r], those of the latent and of the part of keys that heads share.
        row: [B, 1, N, R + r], the latent and that part: a key, whose first R columns are the value.
        up: [H, R, DV], what values of heads are expanded by.
    """

    queries: fx.Node
    row: fx.Node
    up: fx.Node

    def expand(self, graph: fx.Graph, attended: fx.Node) -> fx.Node:
        """[B, H, N, DV] of what attention returns where rows are keys and values both.

        Columns of the shared part are dropped from the output, rather than from the rows, which
        would be copied.
        """
        size = int(self.up.meta["val"].shape[1])
        own = emit_call(graph, aten.slice.Tensor, attended, -1, 0, size)
        return emit_call(graph, aten.matmul.default, own, self.up)


def cached_latent(
    program: Program, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node
) -> CachedLatent:
    """What a layer reads whose cache holds latents in the flat program, too.

    Args:
        program: of padded batches; calls are put before `node`.
        query: [B, H, N, D].
        key: [B, H, N, D].
        value: [B, H, N, DV].
    Raises:
        UnsupportedAttentionError: keys and values are not expanded from a latent here.
    """
    graph = program.graph
    try:
        if not has_shared_keys(key):
            raise NoMatch("keys have no part that heads share")
        found = latent_of(program, query, key, value)
    except NoMatch as error:
        raise UnsupportedAttentionError(
            f"layer {module_path(node) or node.name}: keys and values of one latent where tokens"
            f" are flat, and where they are [batch, nodes] {error}",
            "a model that computes the same for both",
            "compile with --mla-cache expanded, or --backend cpu, which takes flat tokens",
        ) from error
    keys = found.keys
    with graph.inserting_before(node):
        own = query_columns(graph, query, found.own_first, keys.last - keys.first)
        # [B, H, N, n] · [H, n, R]
        absorbed = emit_call(graph, aten.matmul.default, own, rows_of_heads(graph, keys))
        rest = [query_columns(graph, query, x.first, width_of(x.source)) for x in found.shared]
        queries = emit_call(graph, aten.cat.default, [absorbed, *rest], -1)
        parts = [found.latent, *(x.source for x in found.shared)]
        row = emit_call(graph, aten.cat.default, [_one_head(graph, x) for x in parts], -1)
        up = emit_call(graph, aten.transpose.int, rows_of_heads(graph, found.values), 1, 2)
    return CachedLatent(queries, row, up)


def _one_head(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[B, 1, N, D] of [B, N, D] or [B, 1, N, D]."""
    return (
        node if node.meta["val"].dim() == 4 else emit_call(graph, aten.unsqueeze.default, node, 1)
    )
