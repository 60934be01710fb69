"""The end of a step: rows of accepted nodes move, and what the next step begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.operator import Operator, nothing
from specc.kernels.operators.acceptance import OF_STEPS
from specc.kernels.reference import commit


def _tree_rows_fake(cache_len: Tensor, nodes: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    size = cache_len.shape[0] * nodes.shape[0]
    return cache_len.new_empty(size), cache_len.new_empty(size, dtype=torch.int64)


TREE_ROWS = Operator(
    "tree_rows(Tensor cache_len, Tensor nodes, Tensor depths) -> (Tensor slot, Tensor position)",
    reference=commit.tree_rows_reference,
    fake=_tree_rows_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="rows:tree_rows",
    cpu=True,
)


def _commit_rows_fake(path: Tensor, cache_len: Tensor, slot_of: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(path), torch.empty_like(cache_len)


COMMIT_ROWS = Operator(
    "commit_rows(Tensor path, Tensor cache_len, Tensor slot_of) -> (Tensor source, Tensor length)",
    reference=commit.commit_rows_reference,
    fake=_commit_rows_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="rows:commit_rows",
    cpu=True,
)


def _next_tokens_fake(last_tokens: Tensor, output_tokens: Tensor, num_accepted: Tensor) -> Tensor:
    return torch.empty_like(last_tokens)


NEXT_TOKENS = Operator(
    "next_tokens(Tensor last_tokens, Tensor output_tokens, Tensor num_accepted) -> Tensor",
    reference=commit.next_tokens_reference,
    fake=_next_tokens_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="rows:next_tokens",
    cpu=True,
)

LEAVE_STEP = Operator(
    "leave_step(Tensor(a!) results, Tensor(b!) last_tokens, Tensor(c!) cache_len,"
    " Tensor num_accepted, Tensor output_tokens, Tensor next_cache_len, Tensor next_last_tokens,"
    " Tensor? draft_lens) -> ()",
    reference=commit.leave_step_reference,
    fake=nothing,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="leave_step:leave_step",
    # captured steps call it after their graphs
    stored=False,
)

COMMIT_KV = Operator(
    "commit_kv(Tensor(a!) slab, Tensor source, Tensor target, Tensor block_table) -> ()",
    reference=commit.commit_kv_reference,
    fake=nothing,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="commit_kv:commit_kv",
    cpu=True,
)
