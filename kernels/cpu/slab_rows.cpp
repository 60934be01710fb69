// specc::write_rows and specc::take_rows: rows of any width in a slab that is paged as K and V are.
// Bytes are moved, whatever they mean.
#include <algorithm>
#include <cstring>

#include "tensors.h"
#include "threads.h"

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

namespace specc::operators {
namespace {

// What the arguments say of slab, tokens and tables, without the rows themselves.
SlabRows rows_of(const Tensor& slab, const Tensor& slot, int64_t per_token,
                        const Tensor& q_start, const Tensor& block_table) {
  check(slab.dim == 3 && slab.is_dense_row(), "slab is [blocks, block_size, W], rows contiguous");
  check(slab.sizes[1] >= 1, "a block has 1 row or more");
  check_index(q_start, 1, kInt32, "q_start is [B + 1] int32");
  check_index(block_table, 2, kInt32, "block_table is [B, n] int32");
  check(q_start.sizes[0] == block_table.sizes[0] + 1, "q_start and block_table agree");
  SlabRows a{};
  a.item_bytes = to_dtype(slab) == DType::kFloat32 ? 4 : 2;
  a.num_tokens = slot.sizes[0];
  a.per_token = per_token;
  a.width = slab.sizes[2];
  a.slab = slab.data;
  a.block_stride = slab.strides[0];
  a.row_stride = slab.strides[1];
  a.num_blocks = slab.sizes[0];
  a.block_size = slab.sizes[1];
  a.q_start = q_start.as<int32_t>();
  a.slot = slot.as<int32_t>();
  a.batch = block_table.sizes[0];
  a.block_table = block_table.as<int32_t>();
  a.blocks_per_sequence = block_table.sizes[1];
  check_bounds(a);
  return a;
}

void write_rows(const Tensor& x, const Tensor& slab, const Tensor& q_start, const Tensor& slot,
                const Tensor& block_table) {
  check(x.dim == 2 && x.is_dense_row(), "x is [Nt, W], rows contiguous");
  check_index(slot, 1, kInt32, "slot is [Nt] int32");
  check(slab.dim == 3 && x.dtype == slab.dtype && x.sizes[1] == slab.sizes[2] &&
            x.sizes[0] == slot.sizes[0],
        "x, slab and slot agree");
  check_apart(slab, {&q_start, &slot, &block_table});
  SlabRows a = rows_of(slab, slot, 1, q_start, block_table);
  a.rows = x.data;
  a.rows_stride = x.strides[0];
  specc::write_rows(a, kernel_threads());
}

Tensor take_rows(const Tensor& slab, const Tensor& slots, const Tensor& q_start,
                 const Tensor& block_table) {
  check_index(slots, 2, kInt32, "slots is [Nt, K] int32");
  SlabRows a = rows_of(slab, slots, slots.sizes[1], q_start, block_table);
  const Tensor out = empty({a.num_tokens, a.per_token, a.width}, slab.dtype);
  a.rows = out.data;
  a.rows_stride = a.width;
  specc::take_rows(a, kernel_threads());
  return out;
}

}  // namespace

SPECC_OPERATOR("specc::write_rows", write_rows);
SPECC_OPERATOR("specc::take_rows", take_rows);

}  // namespace specc::operators
