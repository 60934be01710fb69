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
from specc.kernels.cuda.strided_rows import check, check_tensors
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
    check(
        logits.shape[0] == tokens.numel() and 0 <= max_depth < MAX_NODES,
        "accept",
        f"{logits.shape[0]} rows of logits, max_depth {max_depth}",
        f"B * N, which is {tokens.numel()}, 0 … {MAX_NODES - 1}",
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
        is_right = level.shape[0] % batch == 0 and level.shape[1] == vocab
        found = f"draft logits {list(level.shape)}"
        check(is_right, "accept", found, f"[{batch} * F, {vocab}]")
    if len(draft_logits) == 1:
        return draft_logits[0]
    levels = [level.unflatten(0, (batch, -1)) for level in draft_logits]
    return torch.cat(levels, dim=1).flatten(0, 1)


def check_trees(operator: str, logits: Tensor, tokens: Tensor, parents: Tensor) -> None:
    """Refuse trees [B, N] that are none, and logits of another dtype or layout."""
    check_logits(logits)
    check_tensors(operator, torch.int64, ("B", "N"), tokens=tokens)
    check_tensors(operator, torch.int32, tokens.shape, parents=parents)
    num_nodes = tokens.shape[1]
    check(1 <= num_nodes <= MAX_NODES, operator, f"{num_nodes} nodes", f"1 … {MAX_NODES}")


def _check_columns(tokens: Tensor, image: Tensor | None, q_rows: Tensor | None) -> None:
    if image is not None:
        check_tensors("accept", torch.int32, (len(tokens), "T"), image=image)
    num_columns = (tokens if image is None else image).shape[1]
    is_right = 1 <= num_columns <= MAX_COLUMNS
    check(is_right, "accept", f"{num_columns} columns", f"1 … {MAX_COLUMNS}")
    if q_rows is not None:
        check_tensors("accept", torch.int32, (num_columns,), q_rows=q_rows)


def check_history(operator: str, batch: int, history: Tensor, block_table: Tensor) -> None:
    """Refuse a history or a block table of another dtype or layout."""
    check_tensors(operator, torch.int32, ("blocks", "block_size"), history=history)
    check_tensors(operator, torch.int32, (batch, "n"), block_table=block_table)
