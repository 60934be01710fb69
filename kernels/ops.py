"""Schemas and fake implementations of the `specc::` operators; importing this registers them.

The default implementation of each operator is its oracle in a module of `specc.kernels.reference`.
Other lowerings register for their own dispatch key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specc.kernels import fakes
from specc.kernels.reference import accept as reference_accept
from specc.kernels.reference import block_mass as reference_mass
from specc.kernels.reference import commit as reference_commit
from specc.kernels.reference import core as reference
from specc.kernels.reference import dense as reference_dense
from specc.kernels.reference import fused as reference_fused
from specc.kernels.reference import latent as reference_latent
from specc.kernels.reference import padded as reference_padded
from specc.kernels.reference import products as reference_products
from specc.kernels.reference import quantized as reference_quantized
from specc.kernels.reference import ranks as reference_ranks
from specc.kernels.reference import sampling as reference_sampling
from specc.kernels.reference import slab_rows as reference_rows
from specc.kernels.reference import trees as reference_trees
from specc.kernels.reference.core import rows_at_once as rows_at_once

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


tree_attention = _define(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors,"
    " Tensor block_table, Tensor? sink_logits=None, Tensor? slopes=None, *, float scale,"
    " int window=0, int sink=0, float softcap=0.0, bool rounds_bias=False, int most_rows=0,"
    " int chunk=0) -> Tensor",
    reference.tree_attention_reference,
    fakes.tree_attention,
)
# of sequences with more tokens than `most_rows`, over keys and values that latents expand to
attend_expanded = _define(
    "attend_expanded(Tensor absorbed, Tensor q, Tensor k_cache, Tensor up_k, Tensor up_v,"
    " Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors,"
    " Tensor block_table, Tensor? sink_logits=None, *, int most_rows, float scale,"
    " float softcap=0.0) -> Tensor",
    reference_latent.attend_expanded_reference,
    fakes.attend_expanded,
)
# what models call, as torch's, with what that lacks; passes rewrite it
dense_attention = _define(
    "dense_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask,"
    " Tensor? sink_logits, *, float scale, float softcap=0.0) -> Tensor",
    reference_dense.dense_attention_reference,
    fakes.dense_attention,
)
# how much attention blocks get: what self-drafts choose theirs by
block_mass = _define(
    "block_mass(Tensor q, Tensor k_cache, Tensor q_start, Tensor position, Tensor slot,"
    " Tensor cache_len, Tensor? ancestors, Tensor block_table, Tensor(a!) mass, *, float scale)"
    " -> ()",
    reference_mass.block_mass_reference,
    lambda *args, **kwargs: None,
)
linear = _define(
    "linear(Tensor input, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    reference.linear_reference,
    fakes.linear,
)
# of the experts of a mixture, likewise
grouped_linear = _define(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends, int out_features) -> Tensor",
    reference.grouped_linear_reference,
    fakes.grouped_linear,
)
# of quantized weights: specc.kernels.reference.quantized
linear_q = _define(
    "linear_q(Tensor input, Tensor weight, Tensor? bias, int out_features, int bits, int group,"
    " bool has_zeros, bool is_float=False, int row_bits=0) -> Tensor",
    reference_quantized.linear_q_reference,
    fakes.linear_q,
)
# of the experts of a mixture, likewise
grouped_mm_q = _define(
    "grouped_mm_q(Tensor x, Tensor weight, Tensor ends, int out_features, int bits, int group,"
    " bool has_zeros, bool is_float=False, int row_bits=0) -> Tensor",
    reference_quantized.grouped_mm_q_reference,
    fakes.grouped_mm_q,
)
embedding_of_blocks = _define(
    "embedding_of_blocks(Tensor weight, Tensor tokens, int num_embeddings, int width) -> Tensor",
    reference.embedding_of_blocks_reference,
    fakes.embedding_of_blocks,
)
tree_expand = _define(
    "tree_expand(Tensor logits, int num_children) -> Tensor",
    reference.tree_expand_reference,
    fakes.tree_expand,
)
accept_winners = _define(
    "accept_winners(Tensor winners, Tensor tokens, Tensor parents, int max_depth)"
    " -> (Tensor path, Tensor num_accepted, Tensor output_tokens)",
    reference.accept_winners_reference,
    fakes.accept_winners,
)
draft_children = _define(
    "draft_children(Tensor logits, int num_children, Tensor cache_len, Tensor columns, int depth,"
    " Tensor values, Tensor words, bool scored=False) -> (Tensor tokens, Tensor scores)",
    reference_accept.draft_children_reference,
    fakes.draft_children,
)
accept = _define(
    "accept(Tensor logits, Tensor tokens, Tensor parents, int max_depth, Tensor? image,"
    " Tensor? q_rows, Tensor[] draft_logits, Tensor values, Tensor words, Tensor cache_len,"
    " Tensor history, Tensor block_table)"
    " -> (Tensor path, Tensor num_accepted, Tensor output_tokens)",
    reference_accept.accept_reference,
    fakes.accept,
)
node_winners = _define(
    "node_winners(Tensor logits, Tensor tokens, Tensor parents, int first_node, Tensor values,"
    " Tensor words, Tensor cache_len, Tensor history, Tensor block_table) -> Tensor",
    reference_accept.node_winners_reference,
    fakes.node_winners,
)
column_winners = _define(
    "column_winners(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, int first,"
    " int vocab_size) -> (Tensor scores, Tensor tokens)",
    reference_accept.column_winners_reference,
    fakes.column_winners,
)
merge_trees = _define(
    "merge_trees(Tensor tokens, Tensor parents, Tensor start)"
    " -> (Tensor tokens, Tensor parents, Tensor image, Tensor count)",
    reference_sampling.merge_trees_reference,
    fakes.merge_trees,
)
rerank_tree = _define(
    "rerank_tree(Tensor tokens, Tensor parents, Tensor scores, int num_nodes)"
    " -> (Tensor tokens, Tensor parents, Tensor kept)",
    reference_sampling.rerank_tree_reference,
    fakes.rerank_tree,
)
ancestor_words = _define(
    "ancestor_words(Tensor parents) -> (Tensor words, Tensor depths)",
    reference_sampling.ancestor_words_reference,
    fakes.ancestor_words,
)
image_slots = _define(
    "image_slots(Tensor image, Tensor slots, int num_nodes) -> Tensor",
    reference_trees.image_slots_reference,
    fakes.image_slots,
)
vote_chain = _define(
    "vote_chain(Tensor tokens, Tensor weights) -> Tensor",
    reference_trees.vote_chain_reference,
    fakes.vote_chain,
)
lookup = _define(
    "lookup(Tensor history, Tensor block_table, Tensor cache_len, Tensor last_tokens, int ngram,"
    " int num_tokens) -> (Tensor tokens, Tensor parents)",
    reference_trees.lookup_reference,
    fakes.lookup,
)
record_tokens = _define(
    "record_tokens(Tensor(a!) history, Tensor block_table, Tensor cache_len, Tensor last_tokens,"
    " Tensor output_tokens, Tensor num_accepted) -> ()",
    reference_trees.record_tokens_reference,
    lambda *args: None,
)
tree_rows = _define(
    "tree_rows(Tensor cache_len, Tensor nodes, Tensor depths) -> (Tensor slot, Tensor position)",
    reference_commit.tree_rows_reference,
    fakes.tree_rows,
)
commit_rows = _define(
    "commit_rows(Tensor path, Tensor cache_len, Tensor slot_of) -> (Tensor source, Tensor length)",
    reference_commit.commit_rows_reference,
    fakes.commit_rows,
)
next_tokens = _define(
    "next_tokens(Tensor last_tokens, Tensor output_tokens, Tensor num_accepted) -> Tensor",
    reference_commit.next_tokens_reference,
    fakes.next_tokens,
)
leave_step = _define(
    "leave_step(Tensor(a!) results, Tensor(b!) last_tokens, Tensor(c!) cache_len,"
    " Tensor num_accepted, Tensor output_tokens, Tensor next_cache_len, Tensor next_last_tokens,"
    " Tensor? draft_lens) -> ()",
    reference_commit.leave_step_reference,
    lambda *args: None,
)
commit_kv = _define(
    "commit_kv(Tensor(a!) slab, Tensor source, Tensor target, Tensor block_table) -> ()",
    reference_commit.commit_kv_reference,
    fakes.commit_kv,
)
# rows of any width, paged as K and V are: hidden states that drafts read
write_rows = _define(
    "write_rows(Tensor x, Tensor(a!) slab, Tensor q_start, Tensor slot, Tensor block_table) -> ()",
    reference_rows.write_rows_reference,
    lambda *args: None,
)
take_rows = _define(
    "take_rows(Tensor slab, Tensor slots, Tensor q_start, Tensor block_table) -> Tensor",
    reference_rows.take_rows_reference,
    fakes.take_rows,
)
grouped_mm = _define(
    "grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    reference.grouped_mm_reference,
    fakes.grouped_mm,
)
# tree_attention in two: what follows rotary embedding directly, and the rest
write_kv = _define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start,"
    " Tensor slot, Tensor block_table, *, bool values_in_keys=False) -> ()",
    reference.write_kv_reference,
    fakes.write_kv,
)
attend = _define(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor position,"
    " Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor block_table,"
    " Tensor? sink_logits=None, Tensor? slopes=None, *, float scale, int window=0, int sink=0,"
    " float softcap=0.0, bool values_in_keys=False, bool rounds_bias=False, int most_rows=0,"
    " int chunk=0) -> Tensor",
    reference.attend_reference,
    fakes.attend,
)
rope_write = _define(
    "rope_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache,"
    " Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table) -> Tensor",
    reference_fused.rope_write_reference,
    fakes.rope_write,
)
rms_norm = _define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> Tensor",
    reference_fused.rms_norm_reference,
    fakes.rms_norm,
)
add_rms_norm = _define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool unit_offset=False)"
    " -> (Tensor, Tensor)",
    reference_fused.add_rms_norm_reference,
    fakes.add_rms_norm,
)
add_norm_linear = _define(
    "add_norm_linear(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias) -> (Tensor y, Tensor total)",
    reference_products.add_norm_linear_reference,
    fakes.add_norm_linear,
)
add_norm_gate_up = _define(
    "add_norm_gate_up(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, str activation) -> (Tensor y, Tensor total)",
    reference_products.add_norm_gate_up_reference,
    fakes.add_norm_gate_up,
)
add_norm_rope_write = _define(
    "add_norm_rope_write(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor q_start, Tensor slot, Tensor block_table) -> (Tensor q, Tensor total)",
    reference_products.add_norm_rope_write_reference,
    fakes.add_norm_rope_write,
)
embed_norm_rope_write = _define(
    "embed_norm_rope_write(Tensor tokens, Tensor embedding, Tensor gamma, float eps,"
    " bool unit_offset, Tensor weight, Tensor? bias, Tensor cos, Tensor sin,"
    " Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table)"
    " -> (Tensor q, Tensor total)",
    reference_products.embed_norm_rope_write_reference,
    fakes.embed_norm_rope_write,
)
add_norm_head = _define(
    "add_norm_head(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias, Tensor rows) -> Tensor",
    reference_products.add_norm_head_reference,
    fakes.add_norm_head,
)
skinny_linear = _define(
    "skinny_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    reference_products.skinny_linear_reference,
    fakes.skinny_linear,
)
act_and_mul = _define(
    "act_and_mul(Tensor gate_up, str activation) -> Tensor",
    reference_fused.act_and_mul_reference,
    fakes.act_and_mul,
)
experts = _define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, str activation)"
    " -> Tensor",
    reference_products.experts_reference,
    fakes.experts,
)
# what ONNX and TensorRT have of their own
cache_write = _define(
    "cache_write(Tensor cache, Tensor update, Tensor write_index) -> Tensor",
    reference_padded.cache_write_reference,
    fakes.cache_write,
)
distance_bias = _define(
    "distance_bias(Tensor mask, Tensor positions, Tensor slopes, *, float hidden,"
    " float rounded_scale=0.0) -> Tensor",
    reference_padded.distance_bias_reference,
    fakes.distance_bias,
)
masked_attention = _define(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor",
    reference_padded.masked_attention_reference,
    fakes.masked_attention,
)
# of the ranks of a sharded engine
all_reduce = _define(
    "all_reduce(Tensor x) -> Tensor", reference_ranks.all_reduce_reference, fakes.all_reduce
)
gather_rows = _define(
    "gather_rows(Tensor x) -> Tensor", reference_ranks.gather_rows_reference, fakes.gather_rows
)
from_first = _define(
    "from_first(Tensor x) -> Tensor", reference_ranks.from_first_reference, fakes.from_first
)
over_link = _define(
    "over_link(Tensor x, str link) -> Tensor",
    reference_ranks.over_link_reference,
    fakes.over_link,
)
best_of_ranks = _define(
    "best_of_ranks(Tensor score, Tensor token) -> Tensor",
    reference_ranks.best_of_ranks_reference,
    fakes.best_of_ranks,
)
