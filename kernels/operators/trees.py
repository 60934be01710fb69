"""Trees of tokens that are built in a step: merged, reranked, voted for, looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.operator import Operator, nothing
from specc.kernels.operators.acceptance import OF_STEPS
from specc.kernels.reference import sampling, trees
from specc.speculation.tree import WORD_BITS


def _merge_trees_fake(
    tokens: Tensor, parents: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, num_nodes = tokens.shape[0], 1 + tokens.shape[1] - (start.shape[0] - 1)
    return (
        tokens.new_empty(batch, num_nodes),
        parents.new_empty(batch, num_nodes),
        parents.new_empty(tokens.shape),
        parents.new_empty(batch, num_nodes),
    )


MERGE_TREES = Operator(
    "merge_trees(Tensor tokens, Tensor parents, Tensor start)"
    " -> (Tensor tokens, Tensor parents, Tensor image, Tensor count)",
    reference=sampling.merge_trees_reference,
    fake=_merge_trees_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="merge:merge_trees",
    cpu=True,
)


def _rerank_tree_fake(
    tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (tokens.shape[0], num_nodes)
    return tokens.new_empty(shape), parents.new_empty(shape), parents.new_empty(shape)


RERANK_TREE = Operator(
    "rerank_tree(Tensor tokens, Tensor parents, Tensor scores, int num_nodes)"
    " -> (Tensor tokens, Tensor parents, Tensor kept)",
    reference=sampling.rerank_tree_reference,
    fake=_rerank_tree_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="merge:rerank_tree",
    cpu=True,
)


def _ancestor_words_fake(parents: Tensor) -> tuple[Tensor, Tensor]:
    rows, num_words = parents.numel(), -(-parents.shape[1] // WORD_BITS)
    return parents.new_empty(rows, num_words, dtype=torch.int64), parents.new_empty(rows)


ANCESTOR_WORDS = Operator(
    "ancestor_words(Tensor parents) -> (Tensor words, Tensor depths)",
    reference=sampling.ancestor_words_reference,
    fake=_ancestor_words_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="merge:ancestor_words",
    cpu=True,
)


def _image_slots_fake(image: Tensor, slots: Tensor, num_nodes: int) -> Tensor:
    return image.new_empty(image.shape[0], num_nodes)


IMAGE_SLOTS = Operator(
    "image_slots(Tensor image, Tensor slots, int num_nodes) -> Tensor",
    reference=trees.image_slots_reference,
    fake=_image_slots_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="trees:image_slots",
    cpu=True,
)


def _vote_chain_fake(tokens: Tensor, weights: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], tokens.shape[2])


VOTE_CHAIN = Operator(
    "vote_chain(Tensor tokens, Tensor weights) -> Tensor",
    reference=trees.vote_chain_reference,
    fake=_vote_chain_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="trees:vote_chain",
    cpu=True,
)


def _lookup_fake(
    history: Tensor,
    block_table: Tensor,
    cache_len: Tensor,
    last_tokens: Tensor,
    ngram: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    shape = (cache_len.shape[0], num_tokens + 1)
    return last_tokens.new_empty(shape), cache_len.new_empty(shape)


LOOKUP = Operator(
    "lookup(Tensor history, Tensor block_table, Tensor cache_len, Tensor last_tokens, int ngram,"
    " int num_tokens) -> (Tensor tokens, Tensor parents)",
    reference=trees.lookup_reference,
    fake=_lookup_fake,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="lookup:lookup",
    cpu=True,
)

RECORD_TOKENS = Operator(
    "record_tokens(Tensor(a!) history, Tensor block_table, Tensor cache_len, Tensor last_tokens,"
    " Tensor output_tokens, Tensor num_accepted) -> ()",
    reference=trees.record_tokens_reference,
    fake=nothing,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="trees:record_tokens",
    cpu=True,
)
