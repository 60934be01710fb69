// specc::write_rows and specc::take_rows: rows of any width in a slab that is paged as K and V are.
// Bytes are moved, whatever they mean.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace specc {
namespace {

// below this many bytes a barrier costs more than a copy
constexpr int64_t kAlone = 1 << 18;

template <class Copy>
void for_each_row(const SlabRows& a, int num_threads, const Copy& copy) {
  const int64_t row_bytes = a.width * a.item_bytes;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int32_t* table = a.block_table + b * a.blocks_per_sequence;
    const int64_t first = a.q_start[b] * a.per_token, last = a.q_start[b + 1] * a.per_token;
    if (row_bytes == 0) continue;  // tensors without elements have no memory
    const bool is_long = (last - first) * row_bytes > kAlone;
#pragma omp parallel for num_threads(std::max(num_threads, 1)) if (is_long)
    for (int64_t i = first; i < last; ++i) {
      const int64_t slot = a.slot[i];
      if (slot < 0) continue;
      char* in_slab = static_cast<char*>(a.slab) +
                      (table[slot / a.block_size] * a.block_stride +
                       slot % a.block_size * a.row_stride) * a.item_bytes;
      copy(in_slab, static_cast<char*>(a.rows) + i * a.rows_stride * a.item_bytes, row_bytes);
    }
  }
}

}  // namespace

void write_rows(const SlabRows& a, int num_threads) {
  for_each_row(a, num_threads, [](char* in_slab, const char* row, int64_t bytes) {
    std::memcpy(in_slab, row, bytes);
  });
}

void take_rows(const SlabRows& a, int num_threads) {
  const int64_t bytes = a.num_tokens * a.per_token * a.width * a.item_bytes;
  if (bytes > 0) std::memset(a.rows, 0, bytes);  // tensors without elements have no memory
  for_each_row(a, num_threads, [](const char* in_slab, char* row, int64_t bytes) {
    std::memcpy(row, in_slab, bytes);
  });
}

}  // namespace specc
