// What operators of attention read of their tensors.
#pragma once

#include "kernels.h"
#include "kv_rows.h"
#include "tensors.h"

namespace specc::tensors {

// Columns of a head in a cache; -1 where it holds int8 and they are too many for it.
inline int64_t columns_of(const View& cache) {
  if (cache.dtype != aoti_torch_dtype_int8()) return cache.sizes[3];
  const int64_t columns = cache.sizes[3] - specc::kScaleBytes;
  return columns <= specc::kMostInt8Columns ? columns : -1;
}

// What says which tokens of a pass are whose, and where they stand.
inline void set_tokens(specc::TreeAttention& a, const View& q_start, const View& position,
                       const View& slot, const View& cache_len, AtenTensorHandle ancestors_handle,
                       const View& block_table) {
  const int32_t i32 = aoti_torch_dtype_int32(), i64 = aoti_torch_dtype_int64();
  check_index(cache_len, 1, i32, "cache_len is [B] int32");
  const int64_t tokens = a.num_tokens, batch = cache_len.sizes[0];
  check_index(q_start, 1, i32, "q_start is [B + 1] int32");
  check_index(position, 1, i64, "position is [Nt] int64");
  check_index(slot, 1, i32, "slot is [Nt] int32");
  check_index(block_table, 2, i32, "block_table is [B, n] int32");
  check(q_start.sizes[0] == batch + 1 && block_table.sizes[0] == batch &&
            position.sizes[0] == tokens && slot.sizes[0] == tokens,
        "the metadata fits the tokens");
  a.batch = batch;
  a.q_start = q_start.as<int32_t>();
  a.position = position.as<int64_t>();
  a.slot = slot.as<int32_t>();
  a.cache_len = cache_len.as<int32_t>();
  if (ancestors_handle != nullptr) {
    // no words at all: causal, so that one compiled program serves prefill and trees
    const View ancestors(ancestors_handle);
    check_index(ancestors, 2, i64, "ancestors is [Nt, W] int64");
    check(ancestors.sizes[0] == tokens, "ancestors has a row for each token");
    a.num_words = ancestors.sizes[1];
    a.ancestors = a.num_words > 0 ? ancestors.as<int64_t>() : nullptr;
  }
  a.block_table = block_table.as<int32_t>();
  a.blocks_per_sequence = block_table.sizes[1];
}

}  // namespace specc::tensors
