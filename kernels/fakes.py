"""What the `specc::` operators return, without values: shapes and types for tracing.

Functions have the names and the arguments of the operators in `specc.kernels.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.speculation.tree import WORD_BITS


def tree_attention(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v.shape[2]).transpose(0, 1)


def attend_expanded(absorbed: Tensor, q: Tensor, *args: object, **kwargs: object) -> Tensor:
    num_heads, num_tokens, value_dim = absorbed.shape
    return q.new_empty(num_tokens, num_heads, value_dim).transpose(0, 1)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return input.new_empty(input.shape[0], out_features)


def linear_q(
    input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, *args: object
) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


def embedding_of_blocks(weight: Tensor, tokens: Tensor, num_embeddings: int, width: int) -> Tensor:
    return weight.new_empty(tokens.shape[0], width)


def tree_expand(logits: Tensor, num_children: int) -> Tensor:
    return logits.new_empty(logits.shape[0], num_children, dtype=torch.int64)


def accept_winners(
    winners: Tensor, tokens: Tensor, parents: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    return (
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int64),
    )


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
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, num_children, dtype=torch.int64),
        logits.new_empty(rows, num_children if scored else 0, dtype=torch.float32),
    )


def accept(
    logits: Tensor, tokens: Tensor, parents: Tensor, max_depth: int, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    return accept_winners(logits, tokens, parents, max_depth)


def node_winners(logits: Tensor, tokens: Tensor, *args: object) -> Tensor:
    return tokens.new_empty(logits.shape[0])


def column_winners(
    logits: Tensor, temperature: Tensor, seeds: Tensor, *args: object
) -> tuple[Tensor, Tensor]:
    return temperature.new_empty(logits.shape[0]), seeds.new_empty(logits.shape[0])


def merge_trees(
    tokens: Tensor, parents: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, num_nodes = tokens.shape[0], 1 + tokens.shape[1] - (start.shape[0] - 1)
    return (
        tokens.new_empty(batch, num_nodes),
        parents.new_empty(batch, num_nodes),
        parents.new_empty(tokens.shape),
        parents.new_empty(batch, num_nodes),
    )


def rerank_tree(
    tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (tokens.shape[0], num_nodes)
    return tokens.new_empty(shape), parents.new_empty(shape), parents.new_empty(shape)


def ancestor_words(parents: Tensor) -> tuple[Tensor, Tensor]:
    rows, num_words = parents.numel(), -(-parents.shape[1] // WORD_BITS)
    return parents.new_empty(rows, num_words, dtype=torch.int64), parents.new_empty(rows)


def image_slots(image: Tensor, slots: Tensor, num_nodes: int) -> Tensor:
    return image.new_empty(image.shape[0], num_nodes)


def vote_chain(tokens: Tensor, weights: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], tokens.shape[2])


def lookup(
    history: Tensor,
    block_table: Tensor,
    cache_len: Tensor,
    last_tokens: Tensor,
    ngram: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    shape = (cache_len.shape[0], num_tokens + 1)
    return last_tokens.new_empty(shape), cache_len.new_empty(shape)


def tree_rows(cache_len: Tensor, nodes: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    count = cache_len.shape[0] * nodes.shape[0]
    return cache_len.new_empty(count), cache_len.new_empty(count, dtype=torch.int64)


def commit_rows(path: Tensor, cache_len: Tensor, slot_of: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(path), torch.empty_like(cache_len)


def next_tokens(last_tokens: Tensor, output_tokens: Tensor, num_accepted: Tensor) -> Tensor:
    return torch.empty_like(last_tokens)


def take_rows(slab: Tensor, slots: Tensor, *args: object) -> Tensor:
    return slab.new_empty(*slots.shape, slab.shape[2])


def commit_kv(slab: Tensor, source: Tensor, target: Tensor, block_table: Tensor) -> None:
    return None


def write_kv(*args: object, **_: object) -> None:
    return None


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: object, **_: object) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v_cache.shape[3]).transpose(0, 1)


def rope_write(q: Tensor, *args: object) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def cache_write(cache: Tensor, update: Tensor, write_index: Tensor) -> Tensor:
    return cache.new_empty(cache.shape)


def distance_bias(
    mask: Tensor, positions: Tensor, slopes: Tensor, *args: object, **kwargs: object
) -> Tensor:
    batch, _, nodes, rows = mask.shape
    return slopes.new_empty(batch, slopes.shape[0], nodes, rows)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def experts(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def grouped_mm_q(
    x: Tensor, weight: Tensor, ends: Tensor, out_features: int, *args: object
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def add_norm_linear(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), x.new_empty(x.shape)


def add_norm_gate_up(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2), x.new_empty(x.shape)


def add_norm_rope_write(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    *args: object,
) -> tuple[Tensor, Tensor]:
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = weight.shape[0] // head_dim - 2 * kv_heads
    q = x.new_empty(cos.shape[0], num_heads, head_dim)
    return q.transpose(0, 1), x.new_empty(x.shape)


def embed_norm_rope_write(
    tokens: Tensor,
    embedding: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    *args: object,
) -> tuple[Tensor, Tensor]:
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = weight.shape[0] // head_dim - 2 * kv_heads
    q = embedding.new_empty(cos.shape[0], num_heads, head_dim)
    return q.transpose(0, 1), embedding.new_empty(*tokens.shape, embedding.shape[1])


def add_norm_head(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
) -> Tensor:
    return x.new_empty(*x.shape[:-2], rows.shape[0], weight.shape[0])


def skinny_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def all_reduce(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def gather_rows(x: Tensor) -> Tensor:
    # how many ranks there are, and which one this is, is known where it runs
    return x.new_empty(x.shape[0], torch.library.get_ctx().new_dynamic_size(min=0))


def from_first(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def over_link(x: Tensor, link: str) -> Tensor:
    return x.new_empty(x.shape)


def best_of_ranks(score: Tensor, token: Tensor) -> Tensor:
    return token.new_empty(token.shape)
