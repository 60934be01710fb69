// Rows that a pass of specc::tree_attention writes before any token sees them.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "kv_rows.h"

namespace specc::attention {

template <class T, class S>
inline void write_row(const T* row, int64_t dim, S* to) {
  if constexpr (std::is_same_v<T, S>)
    std::memcpy(to, row, dim * sizeof(T));
  else
    store_row(row, dim, to);
}

template <class T>
void clear_output(const TreeAttention& a, int64_t token) {
  T* out = static_cast<T*>(a.out) + token * a.out_token_stride;
  for (int64_t h = 0; h < a.num_heads; ++h)
    std::memset(out + h * a.out_head_stride, 0, a.value_dim * sizeof(T));
}

// Write K and V of tokens [first, last) to the cache, and the output of dead tokens: T of a pass, S
// of the cache.
template <class T, class S>
void write_rows(const TreeAttention& a, int64_t first, int64_t last) {
  // tokens after those of the last sequence are nobody's
  for (int64_t t = std::max<int64_t>(first, a.q_start[a.batch]); t < last; ++t)
    clear_output<T>(a, t);
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t begin = std::max<int64_t>(first, a.q_start[b]);
    const int64_t end = std::min<int64_t>(last, a.q_start[b + 1]);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a.slot[t];
      if (slot < 0 || a.leaves_out(b)) clear_output<T>(a, t);
      if (slot < 0 || a.k == nullptr) continue;
      const int64_t block = a.block_table[b * a.blocks_per_sequence + slot / a.block_size];
      const int64_t row = slot % a.block_size;
      S* to_k = static_cast<S*>(a.k_cache) + block * a.k_block_stride + row * a.k_row_stride;
      S* to_v = static_cast<S*>(a.v_cache) + block * a.v_block_stride + row * a.v_row_stride;
      const T* k = static_cast<const T*>(a.k) + t * a.k_token_stride;
      const T* v = static_cast<const T*>(a.v) + t * a.v_token_stride;
      for (int64_t h = 0; h < a.num_kv_heads; ++h) {
        write_row<T, S>(k + h * a.k_head_stride, a.head_dim, to_k + h * a.k_cache_head_stride);
        write_row<T, S>(v + h * a.v_head_stride, a.value_dim, to_v + h * a.v_cache_head_stride);
      }
    }
  }
}

}  // namespace specc::attention
