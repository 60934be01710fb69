"""`specc::accept`: three launches where rows are known to be unfiltered, else nine and more.

What each program has to do it reads from its row's sampling options, so one captured graph serves
all requests: programs of greedy rows compare logits, and leave every other launch at once.

1. `tree_context`: depths of nodes; counts of tokens, for rows with penalties.
2. `row_filters` of the target, four launches: rows with filters, and MSS and SWOR rows.
3. The same of the drafts, where proposals were drawn from their logits: MSS and SWOR rows.
4. `node_best`: best tokens of parts of all rows.
5. `accept_walk`: one launch, and those of passes that MSS and SWOR rows wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.cuda.accept_walk import accept_walk
from specc.kernels.cuda.launch import is_unfiltered
from specc.kernels.cuda.node_best import node_best
from specc.kernels.cuda.row_filters import row_filters
from specc.kernels.cuda.row_options import check_options
from specc.kernels.cuda.tree_context import tree_context
from specc.kernels.cuda.tree_expand import check_logits
from specc.sampling.rows import Rule
from specc.speculation.tree import MAX_NODES

MAX_COLUMNS = 4096
TRIED_RULES = (Rule.MSS, Rule.SWOR)


def accept(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    max_depth: int,
    image: Tensor | None,
    q_rows: Tensor | None,
    draft_logits: list[Tensor],
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    history: Tensor,
    block_table: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specc.kernels.reference.accept.accept_reference`.

    Where `q_rows` is given, draft logits of several levels are copied into one tensor [B * G, V]:
    2 * B * G * V elements are moved once a step, whatever the rules of its rows. Those of one
    level, and those that no column was drawn from, are not; none are where rows are `unfiltered`.
    """
    check_trees("accept", logits, tokens, parents)
    batch, num_nodes = tokens.shape
    if logits.shape[0] != tokens.numel() or not 0 <= max_depth < MAX_NODES:
        raise ValueError(
            f"accept: found {logits.shape[0]} rows of logits, max_depth {max_depth}; needed B * N,"
            f" which is {tokens.numel()}, 0 … {MAX_NODES - 1}"
        )
    check_options("accept", batch, values, words, cache_len)
    _check_columns(tokens, image, q_rows)
    check_history("accept", batch, history, block_table)
    if batch == 0:
        shape = (0, max_depth + 1)
        return parents.new_empty(shape), parents.new_empty(0), tokens.new_empty(shape)
    # without proposals, all rules draw what the target alone does
    is_tried = num_nodes > 1 and max_depth > 0
    rows = (values, words, cache_len)
    depths, counts = tree_context(parents, max_depth, *rows, history, block_table, logits.shape[1])
    tree = (depths, counts, tokens, parents)
    walked: tuple[Rule, ...] = (Rule.COUPLED, Rule.DELTA) if is_tried else tuple(Rule)
    tried_rules: tuple[Rule, ...] = TRIED_RULES if is_tried else ()
    stats = row_filters(logits, *rows, filtered=walked, weighed=tried_rules, tree=tree)
    drafts = draft_stats = None
    if is_unfiltered():
        image = q_rows = None
    elif q_rows is not None and draft_logits and is_tried:
        drafts = _one_tensor(draft_logits, batch, logits.shape[1])
        draft_stats = row_filters(drafts, *rows, filtered=(), weighed=tried_rules)
    best = node_best(logits, *rows, stats, tree, all_rules=not is_tried)
    return accept_walk(
        best, logits, tokens, parents, max_depth, image, q_rows, drafts,
        (stats, draft_stats), *rows, counts,
        is_tried=is_tried and not is_unfiltered(),
    )  # fmt: skip


def _one_tensor(draft_logits: list[Tensor], batch: int, vocab: int) -> Tensor:
    """Rows [B * G, V] of all frontier nodes, a sequence's in the order of the list."""
    for level in draft_logits:
        check_logits(level)
        if level.shape[0] % batch or level.shape[1] != vocab:
            raise ValueError(
                f"accept: found draft logits {list(level.shape)}; needed [{batch} * F, {vocab}]"
            )
    if len(draft_logits) == 1:
        return draft_logits[0]
    levels = [level.unflatten(0, (batch, -1)) for level in draft_logits]
    return torch.cat(levels, dim=1).flatten(0, 1)


def check_trees(operator: str, logits: Tensor, tokens: Tensor, parents: Tensor) -> None:
    """Refuse trees [B, N] that are none, and logits of another dtype or layout."""
    check_logits(logits)
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or parents.dtype != torch.int32:
        raise ValueError(
            f"{operator}: found tokens {list(tokens.shape)} of {tokens.dtype}, parents of"
            f" {parents.dtype}; needed [B, N] of int64, int32"
        )
    num_nodes = tokens.shape[1]
    if parents.shape != tokens.shape:
        raise ValueError(
            f"{operator}: found tokens {list(tokens.shape)}, parents {list(parents.shape)};"
            " needed [B, N], [B, N]"
        )
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{operator}: found {num_nodes} nodes; needed 1 … {MAX_NODES}")
    if num_nodes > 1 and (tokens.stride(1) != 1 or parents.stride(1) != 1):
        raise ValueError(
            f"{operator}: found strides {tokens.stride()} and {parents.stride()};"
            " needed rows of one piece, (any, 1)"
        )


def _check_columns(tokens: Tensor, image: Tensor | None, q_rows: Tensor | None) -> None:
    batch, num_columns = tokens.shape if image is None else image.shape
    if image is not None:
        is_dense = num_columns == 1 or image.stride(1) == 1
        if batch != len(tokens) or image.dtype != torch.int32 or not is_dense:
            raise ValueError(
                f"accept: found image {list(image.shape)} of {image.dtype}, strides"
                f" {image.stride()}; needed [{len(tokens)}, T] of int32, rows of one piece"
            )
    if not 1 <= num_columns <= MAX_COLUMNS:
        raise ValueError(f"accept: found {num_columns} columns; needed 1 … {MAX_COLUMNS}")
    if q_rows is not None and (q_rows.shape != (num_columns,) or q_rows.dtype != torch.int32):
        raise ValueError(
            f"accept: found q_rows {list(q_rows.shape)} of {q_rows.dtype};"
            f" needed [{num_columns}] of int32"
        )


def check_history(operator: str, batch: int, history: Tensor, block_table: Tensor) -> None:
    """Refuse a history or a block table of another dtype or layout."""
    for name, tensor in (("history", history), ("block_table", block_table)):
        is_dense = tensor.dim() == 2 and (tensor.shape[1] <= 1 or tensor.stride(1) == 1)
        if not is_dense or tensor.dtype != torch.int32:
            raise ValueError(
                f"{operator}: found {name} {list(tensor.shape)} of {tensor.dtype}, strides"
                f" {tensor.stride()}; needed two dimensions of int32, rows of one piece"
            )
    if len(block_table) != batch:
        raise ValueError(
            f"{operator}: found block_table of {len(block_table)} rows; needed {batch}"
        )
