"""Schemas and fake implementations of the `specc::` operators; importing this registers them.

The default implementation of each operator is its oracle in one of `specc.kernels.reference.core*`.
Other lowerings register for their own dispatch key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specc.kernels.reference import accept as reference_accept
from specc.kernels.reference import core as reference
from specc.kernels.reference import experts as reference_experts
from specc.kernels.reference import fused as reference_fused
from specc.kernels.reference import product_fakes as fakes_products
from specc.kernels.reference import products as reference_products
from specc.kernels.reference import rectangular as reference_rectangular
from specc.kernels.reference import sampling as reference_sampling
from specc.kernels.reference import trees as reference_trees
from specc.speculation.tree import WORD_BITS

# operator → what computes shapes, for every implementation of it
FAKES: dict[str, Callable] = {}
_LIBRARY = torch.library.Library("specc", "DEF")


def _define(schema: str, implementation: Callable, fake: Callable) -> torch._ops.OpOverload:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specc::{name}", fake, lib=_LIBRARY)
    FAKES[name] = fake
    return getattr(torch.ops.specc, name).default


def _tree_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object
) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v.shape[2]).transpose(0, 1)


def _linear_fake(input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return input.new_empty(input.shape[0], out_features)


def _embedding_of_blocks_fake(
    weight: Tensor, tokens: Tensor, num_embeddings: int, width: int
) -> Tensor:
    return weight.new_empty(tokens.shape[0], width)


def _tree_expand_fake(logits: Tensor, num_children: int) -> Tensor:
    return logits.new_empty(logits.shape[0], num_children, dtype=torch.int64)


def _accept_winners_fake(
    winners: Tensor, tokens: Tensor, parents: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    return (
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int64),
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


def _accept_fake(
    logits: Tensor, tokens: Tensor, parents: Tensor, max_depth: int, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _accept_winners_fake(logits, tokens, parents, max_depth)


def _node_winners_fake(logits: Tensor, tokens: Tensor, *args: object) -> Tensor:
    return tokens.new_empty(logits.shape[0])


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


def _rerank_tree_fake(
    tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (tokens.shape[0], num_nodes)
    return tokens.new_empty(shape), parents.new_empty(shape), parents.new_empty(shape)


def _ancestor_words_fake(parents: Tensor) -> tuple[Tensor, Tensor]:
    rows, num_words = parents.numel(), -(-parents.shape[1] // WORD_BITS)
    return parents.new_empty(rows, num_words, dtype=torch.int64), parents.new_empty(rows)


def _image_slots_fake(image: Tensor, slots: Tensor, num_nodes: int) -> Tensor:
    return image.new_empty(image.shape[0], num_nodes)


def _vote_chain_fake(tokens: Tensor, weights: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], tokens.shape[2])


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


def _tree_rows_fake(cache_len: Tensor, nodes: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    count = cache_len.shape[0] * nodes.shape[0]
    return cache_len.new_empty(count), cache_len.new_empty(count, dtype=torch.int64)


def _commit_rows_fake(path: Tensor, cache_len: Tensor, slot_of: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(path), torch.empty_like(cache_len)


def _next_tokens_fake(last_tokens: Tensor, output_tokens: Tensor, num_accepted: Tensor) -> Tensor:
    return torch.empty_like(last_tokens)


def _commit_kv_fake(slab: Tensor, source: Tensor, target: Tensor, block_table: Tensor) -> None:
    return None


def _write_kv_fake(*args: object) -> None:
    return None


def _attend_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: object, **_: object) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v_cache.shape[3]).transpose(0, 1)


def _rope_write_fake(q: Tensor, *args: object) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _act_and_mul_fake(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _cache_write_fake(cache: Tensor, update: Tensor, write_index: Tensor) -> Tensor:
    return cache.new_empty(cache.shape)


def _masked_attention_fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _experts_fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _grouped_mm_fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


tree_attention = _define(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors,"
    " Tensor block_table, *, float scale, int window=0, int sink=0) -> Tensor",
    reference.tree_attention_reference,
    _tree_attention_fake,
)
linear = _define(
    "linear(Tensor input, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    reference.linear_reference,
    _linear_fake,
)
embedding_of_blocks = _define(
    "embedding_of_blocks(Tensor weight, Tensor tokens, int num_embeddings, int width) -> Tensor",
    reference.embedding_of_blocks_reference,
    _embedding_of_blocks_fake,
)
tree_expand = _define(
    "tree_expand(Tensor logits, int num_children) -> Tensor",
    reference.tree_expand_reference,
    _tree_expand_fake,
)
accept_winners = _define(
    "accept_winners(Tensor winners, Tensor tokens, Tensor parents, int max_depth)"
    " -> (Tensor path, Tensor num_accepted, Tensor output_tokens)",
    reference.accept_winners_reference,
    _accept_winners_fake,
)
draft_children = _define(
    "draft_children(Tensor logits, int num_children, Tensor cache_len, Tensor columns, int depth,"
    " Tensor values, Tensor words, bool scored=False) -> (Tensor tokens, Tensor scores)",
    reference_accept.draft_children_reference,
    _draft_children_fake,
)
accept = _define(
    "accept(Tensor logits, Tensor tokens, Tensor parents, int max_depth, Tensor? image,"
    " Tensor? q_rows, Tensor[] draft_logits, Tensor values, Tensor words, Tensor cache_len,"
    " Tensor history, Tensor block_table)"
    " -> (Tensor path, Tensor num_accepted, Tensor output_tokens)",
    reference_accept.accept_reference,
    _accept_fake,
)
node_winners = _define(
    "node_winners(Tensor logits, Tensor tokens, Tensor parents, int first_node, Tensor values,"
    " Tensor words, Tensor cache_len, Tensor history, Tensor block_table) -> Tensor",
    reference_accept.node_winners_reference,
    _node_winners_fake,
)
merge_trees = _define(
    "merge_trees(Tensor tokens, Tensor parents, Tensor start)"
    " -> (Tensor tokens, Tensor parents, Tensor image, Tensor count)",
    reference_sampling.merge_trees_reference,
    _merge_trees_fake,
)
rerank_tree = _define(
    "rerank_tree(Tensor tokens, Tensor parents, Tensor scores, int num_nodes)"
    " -> (Tensor tokens, Tensor parents, Tensor kept)",
    reference_sampling.rerank_tree_reference,
    _rerank_tree_fake,
)
ancestor_words = _define(
    "ancestor_words(Tensor parents) -> (Tensor words, Tensor depths)",
    reference_sampling.ancestor_words_reference,
    _ancestor_words_fake,
)
image_slots = _define(
    "image_slots(Tensor image, Tensor slots, int num_nodes) -> Tensor",
    reference_trees.image_slots_reference,
    _image_slots_fake,
)
vote_chain = _define(
    "vote_chain(Tensor tokens, Tensor weights) -> Tensor",
    reference_trees.vote_chain_reference,
    _vote_chain_fake,
)
lookup = _define(
    "lookup(Tensor history, Tensor block_table, Tensor cache_len, Tensor last_tokens, int ngram,"
    " int num_tokens) -> (Tensor tokens, Tensor parents)",
    reference_trees.lookup_reference,
    _lookup_fake,
)
record_tokens = _define(
    "record_tokens(Tensor(a!) history, Tensor block_table, Tensor cache_len, Tensor last_tokens,"
    " Tensor output_tokens, Tensor num_accepted) -> ()",
    reference_trees.record_tokens_reference,
    lambda *args: None,
)
tree_rows = _define(
    "tree_rows(Tensor cache_len, Tensor nodes, Tensor depths) -> (Tensor slot, Tensor position)",
    reference.tree_rows_reference,
    _tree_rows_fake,
)
commit_rows = _define(
    "commit_rows(Tensor path, Tensor cache_len, Tensor slot_of) -> (Tensor source, Tensor length)",
    reference.commit_rows_reference,
    _commit_rows_fake,
)
next_tokens = _define(
    "next_tokens(Tensor last_tokens, Tensor output_tokens, Tensor num_accepted) -> Tensor",
    reference.next_tokens_reference,
    _next_tokens_fake,
)
leave_step = _define(
    "leave_step(Tensor(a!) results, Tensor(b!) last_tokens, Tensor(c!) cache_len,"
    " Tensor num_accepted, Tensor output_tokens, Tensor next_cache_len, Tensor next_last_tokens,"
    " Tensor? draft_lens) -> ()",
    reference.leave_step_reference,
    lambda *args: None,
)
commit_kv = _define(
    "commit_kv(Tensor(a!) slab, Tensor source, Tensor target, Tensor block_table) -> ()",
    reference.commit_kv_reference,
    _commit_kv_fake,
)
grouped_mm = _define(
    "grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    reference.grouped_mm_reference,
    _grouped_mm_fake,
)
# tree_attention in two: what follows rotary embedding directly, and the rest
write_kv = _define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start,"
    " Tensor slot, Tensor block_table) -> ()",
    reference.write_kv_reference,
    _write_kv_fake,
)
attend = _define(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor position,"
    " Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor block_table, *, float scale,"
    " int window=0, int sink=0) -> Tensor",
    reference.attend_reference,
    _attend_fake,
)
rope_write = _define(
    "rope_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache,"
    " Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table) -> Tensor",
    reference_fused.rope_write_reference,
    _rope_write_fake,
)
rms_norm = _define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> Tensor",
    reference_fused.rms_norm_reference,
    _rms_norm_fake,
)
add_rms_norm = _define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool unit_offset=False)"
    " -> (Tensor, Tensor)",
    reference_fused.add_rms_norm_reference,
    _add_rms_norm_fake,
)
add_norm_linear = _define(
    "add_norm_linear(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias) -> (Tensor y, Tensor total)",
    reference_products.add_norm_linear_reference,
    fakes_products.add_norm_linear_fake,
)
add_norm_gate_up = _define(
    "add_norm_gate_up(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, str activation) -> (Tensor y, Tensor total)",
    reference_products.add_norm_gate_up_reference,
    fakes_products.add_norm_gate_up_fake,
)
add_norm_rope_write = _define(
    "add_norm_rope_write(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor q_start, Tensor slot, Tensor block_table) -> (Tensor q, Tensor total)",
    reference_products.add_norm_rope_write_reference,
    fakes_products.add_norm_rope_write_fake,
)
embed_norm_rope_write = _define(
    "embed_norm_rope_write(Tensor tokens, Tensor embedding, Tensor gamma, float eps,"
    " bool unit_offset, Tensor weight, Tensor? bias, Tensor cos, Tensor sin,"
    " Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table)"
    " -> (Tensor q, Tensor total)",
    reference_products.embed_norm_rope_write_reference,
    fakes_products.embed_norm_rope_write_fake,
)
add_norm_head = _define(
    "add_norm_head(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias, Tensor rows) -> Tensor",
    reference_products.add_norm_head_reference,
    fakes_products.add_norm_head_fake,
)
act_and_mul = _define(
    "act_and_mul(Tensor gate_up, str activation) -> Tensor",
    reference_fused.act_and_mul_reference,
    _act_and_mul_fake,
)
experts = _define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, str activation)"
    " -> Tensor",
    reference_experts.experts_reference,
    _experts_fake,
)
# what ONNX and TensorRT have of their own
cache_write = _define(
    "cache_write(Tensor cache, Tensor update, Tensor write_index) -> Tensor",
    reference_rectangular.cache_write_reference,
    _cache_write_fake,
)
masked_attention = _define(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor",
    reference_rectangular.masked_attention_reference,
    _masked_attention_fake,
)
