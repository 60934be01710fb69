// What operators of attention read of their tensors.
#pragma once

#include <limits>

#include "kv_rows.h"
#include "tensors.h"

namespace specc::operators {

// Columns of a head in a cache; -1 where it holds int8 and they are too many for it.
inline int64_t columns_of(const Tensor& cache) {
  if (cache.dtype != kInt8) return cache.sizes[3];
  const int64_t columns = cache.sizes[3] - kScaleBytes;
  return columns <= kMostInt8Columns ? columns : -1;
}

// What says which tokens of a pass are whose, and where they stand. All of it is checked once and
// read again, so what is written must lie elsewhere.
inline void set_tokens(TreeAttention& a, const Tensor& q_start, const Tensor& position,
                       const Tensor& slot, const Tensor& cache_len, const Tensor* ancestors,
                       const Tensor& block_table,
                       std::initializer_list<const Tensor*> written = {}) {
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  const int64_t tokens = a.num_tokens, batch = cache_len.sizes[0];
  check_index(q_start, 1, kInt32, "q_start is [B + 1] int32");
  check_index(position, 1, kInt64, "position is [Nt] int64");
  check_index(slot, 1, kInt32, "slot is [Nt] int32");
  check_index(block_table, 2, kInt32, "block_table is [B, n] int32");
  check(q_start.sizes[0] == batch + 1 && block_table.sizes[0] == batch &&
            position.sizes[0] == tokens && slot.sizes[0] == tokens,
        "the metadata fits the tokens");
  a.batch = batch;
  a.q_start = q_start.as<int32_t>();
  a.position = position.as<int64_t>();
  a.slot = slot.as<int32_t>();
  a.cache_len = cache_len.as<int32_t>();
  if (ancestors != nullptr) {
    // no words at all: causal, so that one program serves prefill and trees
    check_index(*ancestors, 2, kInt64, "ancestors is [Nt, W] int64");
    check(ancestors->sizes[0] == tokens, "ancestors has a row for each token");
    a.num_words = ancestors->sizes[1];
    a.ancestors = a.num_words > 0 ? ancestors->as<int64_t>() : nullptr;
  }
  a.block_table = block_table.as<int32_t>();
  a.blocks_per_sequence = block_table.sizes[1];
  for (const Tensor* each : written)
    check_apart(*each, {&q_start, &position, &slot, &cache_len, ancestors, &block_table});
}

inline void set_queries(TreeAttention& a, const Tensor& q) {
  a.num_tokens = q.sizes[1];
  a.head_dim = q.sizes[2];
  a.q = q.data;
  a.q_head_stride = q.strides[0];
  a.q_token_stride = q.strides[1];
}

inline void set_key_cache(TreeAttention& a, const Tensor& k_cache) {
  a.k_cache = k_cache.data;
  a.k_block_stride = k_cache.strides[0];
  a.k_row_stride = k_cache.strides[1];
  a.k_cache_head_stride = k_cache.strides[2];
  a.num_blocks = k_cache.sizes[0];
  a.block_size = k_cache.sizes[1];
}

inline void set_softcap(TreeAttention& a, double softcap) {
  check(softcap >= 0 && softcap <= std::numeric_limits<float>::max(),
        "softcap is a finite number of 0 or more");
  a.softcap = static_cast<float>(softcap);
}

inline void set_sink_logits(TreeAttention& a, const Tensor* sink_logits, Element dtype) {
  if (sink_logits == nullptr) return;
  check_index(*sink_logits, 1, dtype, "sink_logits is [H] in the dtype of q");
  check(sink_logits->sizes[0] == a.num_heads, "sink_logits is [H]");
  a.sink_logits = sink_logits->data;
}

// What a score is made of, beside the product of its query and key.
inline void set_scores(TreeAttention& a, double scale, double softcap, const Tensor* sink_logits,
                       const Tensor* slopes, bool rounds_bias, Element dtype) {
  a.scale = static_cast<float>(scale);
  set_softcap(a, softcap);
  set_sink_logits(a, sink_logits, dtype);
  if (slopes == nullptr) return;
  check_index(*slopes, 1, kFloat32, "slopes is [H] float32");
  check(slopes->sizes[0] == a.num_heads, "slopes is [H]");
  a.slopes = slopes->as<float>();
  a.rounds_bias = rounds_bias;
}

// Which keys a token sees; 0 is no limit.
inline void set_visible(TreeAttention& a, int64_t window, int64_t sink, int64_t most_rows,
                        int64_t chunk) {
  check(window >= 0 && sink >= 0, "window and sink are 0 or more");
  check(most_rows >= 0 && chunk >= 0, "most_rows and chunk are 0 or more");
  // no position is beyond that
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  a.window = std::min(window, kMost);
  a.sink = std::min(sink, kMost);
  a.chunk = std::min(chunk, kMost);
  a.most_rows = most_rows;
}

// [heads, tokens, columns], in memory [tokens, heads, columns]: what follows is a projection over
// all heads of a token.
inline Tensor empty_heads(int64_t heads, int64_t tokens, int64_t columns, Element dtype) {
  Tensor out = empty({tokens, heads, columns}, dtype);
  std::swap(out.sizes[0], out.sizes[1]);
  std::swap(out.strides[0], out.strides[1]);
  return out;
}
inline Tensor empty_heads(TreeAttention& a, Element dtype) {
  const Tensor out = empty_heads(a.num_heads, a.num_tokens, a.value_dim, dtype);
  a.out = out.data;
  a.out_head_stride = out.strides[0];
  a.out_token_stride = out.strides[1];
  return out;
}

}  // namespace specc::operators
