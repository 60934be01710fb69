"""Commits to caches in HND layout, heads before rows: [layers, 2, requests, HK, L, D].

Runtimes of padded batches want them so. A step touches caches in one operator only, the commit; its
graph is that of every other backend, and the commit is done here head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.cache_rows import CacheRows

_COMMIT = torch.ops.specc.commit_kv.default


def place_commits(
    graph: fx.GraphModule, rows: CacheRows, operators: Any = torch.ops.specc
) -> fx.GraphModule:
    """Let the commits of a stage move rows of HND caches; changes the graph.

    Args:
        operators: namespace of the `specc::` operators that run here.
    """
    commit = commit_by_heads(rows, operators.commit_kv)
    for node in graph.graph.find_nodes(op="call_function", target=_COMMIT):
        node.target = commit
    graph.recompile()
    return graph


def commit_by_heads(rows: CacheRows, commit: Callable[..., Any]) -> Callable[..., None]:
    """`specc::commit_kv` for HND caches: every head of a request is a block of its own.

    Args:
        commit: the operator for caches [layers, 2, blocks, block_size, heads, D].
    """

    def commit_heads(slab: Tensor, source: Tensor, target: Tensor, block_table: Tensor) -> None:
        layers, parts, requests, heads, length, dim = slab.shape
        # rows are moved bit by bit, and the library for CPUs knows one type of 16 bits
        bits = slab.view(torch.bfloat16) if slab.dtype is torch.float16 else slab
        blocks = bits.view(layers, parts, requests * heads, length, 1, dim)
        head = torch.arange(heads, dtype=torch.int32, device=slab.device)
        table = (block_table[:, :1] * heads + head).view(-1, 1)
        commit(blocks, _repeat(source, heads, rows), _repeat(target, heads, rows), table)

    return commit_heads


def _repeat(slots: Tensor, heads: int, rows: CacheRows) -> Tensor:
    """Slots [B, P] as rows [B · HK, P] of each head; -1 stays."""
    found = torch.where(slots >= 0, slots + rows.front, -1)
    # of one request, or one row, the result could be a view of the repeated one
    return found[:, None].expand(-1, heads, -1).flatten(0, 1).contiguous()
