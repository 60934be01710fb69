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
from specc.kernels.cuda.shipped import ALIGNMENT
from specc.sampling.rows import Rule
from tests.kernels.cuda.meta_tensors import FLOATS, I32, I64, meta

WALKED, TRIED = (Rule.COUPLED, Rule.DELTA), (Rule.MSS, Rule.SWOR)
# sequences and sizes of the vocabulary; the second is no multiple of 16, and a batch of one row
# must not make another binary
BATCHES = ((4, 131072), (4, 131071), (1, 131072))


def _dtypes(vocab: int) -> tuple[torch.dtype, ...]:
    """Of logits: of odd vocabularies, bfloat16 alone is compiled ahead of time."""
    return FLOATS if vocab % ALIGNMENT == 0 else (torch.bfloat16,)


def _options(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return meta(batch, 6), meta(batch, 4, dtype=I64), meta(batch, dtype=I32)


def _tree(batch: int, vocab: int, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depths, counts, tokens and parents."""
    nodes = meta(batch, num_nodes, dtype=I32)
    counts = meta(batch, vocab, dtype=I32)
    return nodes, counts, meta(batch, num_nodes, dtype=I64), nodes


def _tree_context_calls(batch: int, vocab: int) -> Iterator[Any]:
    history, table = meta(300, 16, dtype=I32), meta(batch, 100, dtype=I32)
    for num_nodes in (1, 60, 250, 1024):
        parents = meta(batch, num_nodes, dtype=I32)
        yield tree_context.tree_context(parents, 5, *_options(batch), history, table, vocab)


def _row_filters_calls(batch: int, vocab: int) -> Iterator[Any]:
    for dtype in _dtypes(vocab):
        logits = meta(batch * 7, vocab, dtype=dtype)
        for filtered, weighed in ((WALKED, TRIED), (tuple(Rule), ())):
            yield row_filters.row_filters(
                logits,
                *_options(batch),
                filtered=filtered,
                weighed=weighed,
                tree=_tree(batch, vocab, 7),
            )
        for filtered, weighed in (((), TRIED), ((Rule.COUPLED, *TRIED), ())):
            yield row_filters.row_filters(
                logits, *_options(batch), filtered=filtered, weighed=weighed
            )


def _node_best_calls(batch: int, vocab: int) -> Iterator[Any]:
    for dtype in _dtypes(vocab):
        for all_rules, num_nodes in ((True, 1), (False, 60)):
            rows = batch * num_nodes
            yield node_best.node_best(
                meta(rows, vocab, dtype=dtype), *_options(batch), meta(rows, 3),
                _tree(batch, vocab, num_nodes),
                all_rules=all_rules,
            )  # fmt: skip


def _node_winners_calls(batch: int, vocab: int) -> Iterator[Any]:
    for count in (1, 60):
        depths = meta(batch, count, dtype=I32)
        best = meta(batch * count, node_best.config(batch * count, vocab)["num_parts"], dtype=I64)
        yield node_winners.row_winners(best, depths, vocab)


def _accept_walk_calls(batch: int, vocab: int) -> Iterator[Any]:
    for num_nodes in (1, 13, 1024):
        yield _walk(batch, vocab, torch.bfloat16, num_nodes, num_nodes, 5, 9, is_tried=False)
    # nodes, columns, levels
    trees = ((13, 13, 5), (60, 120, 7), (250, 250, 10), (1000, 1024, 63), (1024, 4096, 1023))
    for dtype in _dtypes(vocab):
        for num_nodes, num_columns, max_depth in trees:
            for num_drafts in (9, None):
                yield _walk(batch, vocab, dtype, num_nodes, num_columns, max_depth, num_drafts)


def _walk(
    batch: int,
    vocab: int,
    dtype: torch.dtype,
    num_nodes: int,
    num_columns: int,
    max_depth: int,
    num_drafts: int | None,
    *,
    is_tried: bool = True,
) -> Any:
    rows = batch * num_nodes
    _, counts, tokens, parents = _tree(batch, vocab, num_nodes)
    image = None if num_columns == num_nodes else meta(batch, num_columns, dtype=I32)
    drafts = draft_stats = None
    if num_drafts is not None and is_tried:
        drafts = meta(batch * num_drafts, vocab, dtype=dtype)
        draft_stats = meta(batch * num_drafts, 3)
    best = meta(rows, node_best.config(rows, vocab)["num_parts"], dtype=I64)
    return accept_walk.accept_walk(
        best, meta(rows, vocab, dtype=dtype), tokens, parents, max_depth, image,
        meta(num_columns, dtype=I32), drafts, (meta(rows, 3), draft_stats),
        *_options(batch), counts,
        is_tried=is_tried,
    )  # fmt: skip


def _child_keys_calls(batch: int, vocab: int) -> Iterator[Any]:
    for dtype in _dtypes(vocab):
        for num_children in (1, 2, 4, 8, 16):
            yield _children(batch, vocab, dtype, num_children)
        for num_children in (8, 10):
            yield _children(batch, vocab, dtype, num_children, scored=True)
    yield _children(batch, vocab, torch.bfloat16, 64)
    for size in (vocab // 4, vocab * 2):
        yield _children(batch, size - (vocab & 1), torch.bfloat16, 4)


def _children(
    batch: int, vocab: int, dtype: torch.dtype, num_children: int, *, scored: bool = False
) -> Any:
    rows = batch * 3
    return child_keys.best_children(
        meta(rows, vocab, dtype=dtype), num_children, meta(3, dtype=I32), 2,
        *_options(batch), meta(rows, 3),
        scored=scored,
    )  # fmt: skip


def _of_all_batches(
    calls: Callable[[int, int], Iterator[Any]],
) -> Callable[[], Iterator[Any]]:
    return lambda: (call for sizes in BATCHES for call in calls(*sizes))


CALLS: dict[str, Callable[[], Iterator[Any]]] = {
    "accept_walk": _of_all_batches(_accept_walk_calls),
    "child_keys": _of_all_batches(_child_keys_calls),
    "node_best": _of_all_batches(_node_best_calls),
    "node_winners": _of_all_batches(_node_winners_calls),
    "row_filters": _of_all_batches(_row_filters_calls),
    "tree_context": _of_all_batches(_tree_context_calls),
}
