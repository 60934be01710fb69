"""`specc::draft_children` in six launches: filters, best keys of parts of rows, best of those.

What each program has to do it reads from its row's sampling options: those of rows without filters
leave the first four launches at once, and greedy rows make no noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.cuda.child_keys import best_children, config
from specc.kernels.cuda.row_filters import row_filters
from specc.kernels.cuda.row_options import check_options
from specc.kernels.cuda.strided_rows import check, check_tensors
from specc.kernels.cuda.tree_expand import check_children, check_logits
from specc.sampling.rows import Rule

FILTERED_RULES = (Rule.COUPLED, Rule.MSS, Rule.SWOR)


def draft_children(
    logits: Tensor,
    num_children: int,
    cache_len: Tensor,
    columns: Tensor,
    depth: int,
    values: Tensor,
    words: Tensor,
    scored: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `specc.kernels.reference.accept.draft_children_reference`; padding rows get token 0."""
    check_logits(logits)
    num_rows, vocab = logits.shape
    check_options("draft_children", len(cache_len), values, words, cache_len)
    check_tensors("draft_children", torch.int32, ("F",), columns=columns)
    check(len(columns) > 0, "draft_children", f"columns {list(columns.shape)}", "1 or more")
    check(
        num_rows == len(cache_len) * len(columns),
        "draft_children",
        f"{num_rows} rows of logits, {len(cache_len)} sequences and {len(columns)} columns",
        "B * F, B, F",
    )
    check_children("draft_children", num_children, vocab, config)
    rows = (values, words, cache_len)
    if num_rows == 0:
        tokens = torch.empty(0, num_children, dtype=torch.int64, device=logits.device)
        return tokens, logits.new_empty(0, num_children if scored else 0, dtype=torch.float32)
    stats = row_filters(logits, *rows, filtered=FILTERED_RULES, weighed=())
    return best_children(logits, num_children, columns, depth, *rows, stats, scored=scored)
