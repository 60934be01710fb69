"""Calls of typed trees' kernels on tensors without data, for `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda import (
    accept_walk,
    child_keys,
    node_best,
    node_winners,
    row_filters,
    tree_context,
)
from specc.sampling_rows import Rule

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
I32, I64 = torch.int32, torch.int64
WALKED, TRIED = (Rule.COUPLED, Rule.DELTA), (Rule.MSS, Rule.SWOR)
BATCH, VOCAB = 4, 131072


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _options() -> tuple[Tensor, Tensor, Tensor]:
    return _meta(BATCH, 6), _meta(BATCH, 4, dtype=I64), _meta(BATCH, dtype=I32)


def _tree(num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depths, counts, tokens and parents."""
    nodes = _meta(BATCH, num_nodes, dtype=I32)
    counts = _meta(BATCH, VOCAB, dtype=I32)
    return nodes, counts, _meta(BATCH, num_nodes, dtype=I64), nodes


def _tree_context_calls() -> Iterator[Any]:
    history, table = _meta(300, 16, dtype=I32), _meta(BATCH, 100, dtype=I32)
    for num_nodes in (1, 60, 250, 1024):
        parents = _meta(BATCH, num_nodes, dtype=I32)
        yield tree_context.tree_context(parents, 5, *_options(), history, table, VOCAB)


def _row_filters_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        logits = _meta(BATCH * 7, VOCAB, dtype=dtype)
        for filtered, weighed in ((WALKED, TRIED), (tuple(Rule), ())):
            yield row_filters.row_filters(
                logits, *_options(), filtered=filtered, weighed=weighed, tree=_tree(7)
            )
        for filtered, weighed in (((), TRIED), ((Rule.COUPLED, *TRIED), ())):
            yield row_filters.row_filters(logits, *_options(), filtered=filtered, weighed=weighed)


def _node_best_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        for all_rules, num_nodes in ((True, 1), (False, 60)):
            rows = BATCH * num_nodes
            yield node_best.node_best(
                *(_meta(rows, VOCAB, dtype=dtype), *_options(), _meta(rows, 3)),
                _tree(num_nodes),
                all_rules=all_rules,
            )


def _node_winners_calls() -> Iterator[Any]:
    for count in (1, 60):
        depths = _meta(BATCH, count, dtype=I32)
        best = _meta(BATCH * count, node_best.config(BATCH * count, VOCAB)["num_parts"], dtype=I64)
        yield node_winners.row_winners(best, depths, VOCAB)


def _accept_walk_calls() -> Iterator[Any]:
    # nodes, columns, levels
    trees = ((13, 13, 5), (60, 60, 7), (60, 120, 7))
    for dtype in FLOATS:
        yield _walk(dtype, 1, 1, 0, None, is_tried=False)
        for num_nodes, num_columns, max_depth in trees:
            for num_drafts in (9, None) if num_columns == num_nodes else (9,):
                yield _walk(dtype, num_nodes, num_columns, max_depth, num_drafts)
    for num_nodes, max_depth in ((250, 10), (1000, 63), (1024, 1023)):
        for num_drafts in (9, None):
            yield _walk(torch.bfloat16, num_nodes, num_nodes, max_depth, num_drafts)


def _walk(
    dtype: torch.dtype,
    num_nodes: int,
    num_columns: int,
    max_depth: int,
    num_drafts: int | None,
    *,
    is_tried: bool = True,
) -> Any:
    rows = BATCH * num_nodes
    _, counts, tokens, parents = _tree(num_nodes)
    image = None if num_columns == num_nodes else _meta(BATCH, num_columns, dtype=I32)
    drafts = draft_stats = None
    if num_drafts is not None:
        drafts = _meta(BATCH * num_drafts, VOCAB, dtype=dtype)
        draft_stats = _meta(BATCH * num_drafts, 3)
    best = _meta(rows, node_best.config(rows, VOCAB)["num_parts"], dtype=I64)
    return accept_walk.accept_walk(
        *(best, _meta(rows, VOCAB, dtype=dtype), tokens, parents, max_depth, image),
        *(_meta(num_columns, dtype=I32), drafts, (_meta(rows, 3), draft_stats)),
        *(*_options(), counts),
        is_tried=is_tried,
    )


def _child_keys_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        for num_children in (1, 2, 4, 8, 16):
            yield _children(dtype, VOCAB, num_children)
        for num_children in (8, 10):
            yield _children(dtype, VOCAB, num_children, scored=True)
    yield _children(torch.bfloat16, VOCAB, 64)
    for vocab in (32768, 262144):
        yield _children(torch.bfloat16, vocab, 4)


def _children(dtype: torch.dtype, vocab: int, num_children: int, *, scored: bool = False) -> Any:
    rows = BATCH * 3
    return child_keys.best_children(
        *(_meta(rows, vocab, dtype=dtype), num_children, _meta(3, dtype=I32), 2),
        *(*_options(), _meta(rows, 3)),
        scored=scored,
    )


CALLS: dict[str, Callable[[], Iterator[Any]]] = {
    "accept_walk": _accept_walk_calls,
    "child_keys": _child_keys_calls,
    "node_best": _node_best_calls,
    "node_winners": _node_winners_calls,
    "row_filters": _row_filters_calls,
    "tree_context": _tree_context_calls,
}
