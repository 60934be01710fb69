"""What draws drafts and accepts them: `draft_children`, `accept`, and what ranks have of both."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.operator import NoRule, Operator
from specc.kernels.reference import accept, core

OF_STEPS = NoRule("steps call it, models do not")


def _tree_expand_fake(logits: Tensor, num_children: int) -> Tensor:
    return logits.new_empty(logits.shape[0], num_children, dtype=torch.int64)


TREE_EXPAND = Operator(
    "tree_expand(Tensor logits, int num_children) -> Tensor",
    reference=core.tree_expand_reference,
    fake=_tree_expand_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="tree_expand:tree_expand",
    cpu=True,
)


def _draft_children_fake(
    logits: Tensor,
    num_children: int,
    cache_len: Tensor,
    columns: Tensor,
    depth: int,
    values: Tensor,
    words: Tensor,
    scored: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, num_children, dtype=torch.int64),
        logits.new_empty(rows, num_children if scored else 0, dtype=torch.float32),
    )


DRAFT_CHILDREN = Operator(
    "draft_children(Tensor logits, int num_children, Tensor cache_len, Tensor columns, int depth,"
    " Tensor values, Tensor words, bool scored=False) -> (Tensor tokens, Tensor scores)",
    reference=accept.draft_children_reference,
    fake=_draft_children_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="draft_children:draft_children",
    cpu=True,
)


def _accept_winners_fake(
    winners: Tensor, tokens: Tensor, parents: Tensor, max_depth: int, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    return (
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int64),
    )


ACCEPT_WINNERS = Operator(
    "accept_winners(Tensor winners, Tensor tokens, Tensor parents, int max_depth)"
    " -> (Tensor path, Tensor num_accepted, Tensor output_tokens)",
    reference=core.accept_winners_reference,
    fake=_accept_winners_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="accept_winners:accept_winners",
    cpu=True,
)

ACCEPT = Operator(
    "accept(Tensor logits, Tensor tokens, Tensor parents, int max_depth, Tensor? image,"
    " Tensor? q_rows, Tensor[] draft_logits, Tensor values, Tensor words, Tensor cache_len,"
    " Tensor history, Tensor block_table)"
    " -> (Tensor path, Tensor num_accepted, Tensor output_tokens)",
    reference=accept.accept_reference,
    fake=_accept_winners_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="accept:accept",
    cpu=True,
)


def _node_winners_fake(logits: Tensor, tokens: Tensor, *args: object) -> Tensor:
    return tokens.new_empty(logits.shape[0])


NODE_WINNERS = Operator(
    "node_winners(Tensor logits, Tensor tokens, Tensor parents, int first_node, Tensor values,"
    " Tensor words, Tensor cache_len, Tensor history, Tensor block_table) -> Tensor",
    reference=accept.node_winners_reference,
    fake=_node_winners_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="node_winners:node_winners",
    cpu=True,
)


def _column_winners_fake(
    logits: Tensor, temperature: Tensor, seeds: Tensor, *args: object
) -> tuple[Tensor, Tensor]:
    return temperature.new_empty(logits.shape[0]), seeds.new_empty(logits.shape[0])


COLUMN_WINNERS = Operator(
    "column_winners(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, int first,"
    " int vocab_size) -> (Tensor scores, Tensor tokens)",
    reference=accept.column_winners_reference,
    fake=_column_winners_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cpu=True,
    # ranks call it around the graphs of steps
    stored=False,
)
