// How a quantized weight lies in its blocks, and how its products are shared among threads; for
// linear_q.cpp and linear_fp8.cpp. The layout is that of specc/artifact/quantized_layout.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "team.h"

namespace specc::quantized {

constexpr int kBlock = kLinearBlock;
constexpr int64_t kMaxRows = 32;  // rows of x for which w is read once
constexpr int64_t kChunk = 128;   // columns: one group of 128, four of 32
constexpr int64_t kMostGroups = kChunk / 16;
constexpr int64_t kRowGroup = 32;  // least columns of a row that share a factor
constexpr int64_t kScalesBytes = 4 * kBlock, kZerosBytes = 2 * kBlock;
constexpr int64_t kAheadBytes = 4096;   // covers memory's latency at a thread's bandwidth
constexpr int64_t kInt8AheadBytes = 8192;
constexpr int64_t kSerialWork = 65536;  // products that cost less than waking a second thread

inline int64_t parts_of(int64_t x, int64_t size) { return x / size + (x % size != 0); }

inline bool is_fp8(const LinearQ& a) { return a.is_float && a.bits == 8; }
// in e2m1: mxfp4, or nvfp4, whose outputs have factors besides
inline bool has_byte_scales(const LinearQ& a) { return a.is_float && a.bits == 4; }
inline bool is_nvfp4(const LinearQ& a) { return has_byte_scales(a) && a.group == 16; }

// Bytes of headers, and of units of columns. Of the headers of a block, of its chunks and of its
// groups only one kind is not empty, but in nvfp4, where that of a block has factors; those of
// ggml's formats are none of them (linear_q_formats.h).
struct Layout {
  int64_t columns_of_unit, unit_bytes, group, group_header, chunk_header, block_header;
  int64_t next_scales;  // bytes from those of a group to those of the next, where no levels are between

  // Of levels in units of int8 or int4, whose scales are floats that lie elsewhere.
  Layout(int64_t columns, int64_t columns_of_group)
      : columns_of_unit(columns),
        unit_bytes(4 * kBlock),
        group(columns_of_group),
        group_header(0),
        chunk_header(0),
        block_header(0),
        next_scales(kScalesBytes) {}

  explicit Layout(const LinearQ& a)
      : columns_of_unit(is_fp8(a) ? 2 : 32 / a.bits),
        unit_bytes(is_fp8(a) ? 2 * kBlock : 4 * kBlock),
        group(a.group == 0 ? kChunk : a.group),
        group_header(a.group == 0 || has_byte_scales(a) ? 0 : scales(a)),
        chunk_header(has_byte_scales(a) ? kChunk / a.group * kBlock : 0),
        block_header(a.group == 0 || is_nvfp4(a) ? scales(a) : 0),
        next_scales(has_byte_scales(a) ? kBlock : 0) {}

  // of so many columns from the beginning of a chunk on, without its header
  int64_t bytes_of(int64_t columns) const {
    return parts_of(columns, group) * group_header + parts_of(columns, columns_of_unit) * unit_bytes;
  }

 private:
  static int64_t scales(const LinearQ& a) { return kScalesBytes + (a.has_zeros ? kZerosBytes : 0); }
};

// A chunk of a block, and what its columns have in common.
struct ChunkOfBlock {
  const uint8_t* w;
  const uint8_t* scales;  // of the chunk's first group, where they do not lie before each group
  const float* floats;    // minima [groups, 32], or of nvfp4 factors [32]
  int64_t columns;
};

// y of all rows of each product; all have as many outputs. A thread has blocks of outputs that
// follow each other, across products, and takes kMaxRows rows at a time.
template <class Rows>
void run(const LinearQ* products, int64_t count, int num_threads) {
  const int64_t blocks = count > 0 ? parts_of(products[0].n, kBlock) : 0;
  int64_t work = 0;
  for (int64_t i = 0; i < count; ++i) work += products[i].rows * products[i].n * products[i].k;
  const bool is_tiny = work < kSerialWork;
  const int threads = is_tiny ? 1 : num_threads;
  if (Team* team = team_of_pass;
      team != nullptr && threads > 1 && count == 1 && products[0].rows <= kMaxRows) {
    const LinearQ& a = products[0];
    const auto* w = reinterpret_cast<const char*>(a.w);
    team->share(threads, {w, blocks, block_bytes(a)}, [&](const auto& take) {
      const Rows rows(a, 0, a.rows);
      for (int64_t begin, end; take(begin, end);) rows.multiply(begin, end);
    });
    return;
  }
  in_parallel(threads, [&](int64_t thread, int64_t of, const auto&) {
    const int64_t all = count * blocks;
    const int64_t first = all * thread / of, last = all * (thread + 1) / of;
    for (int64_t i = 0; i < count; ++i) {
      const LinearQ& a = products[i];
      const int64_t begin = std::max<int64_t>(first - i * blocks, 0);
      const int64_t end = std::min<int64_t>(last - i * blocks, blocks);
      const int64_t parts = parts_of(a.rows, kMaxRows);
      for (int64_t part = 0; part < parts && begin < end; ++part) {
        const int64_t row = a.rows * part / parts;
        Rows(a, row, a.rows * (part + 1) / parts - row).multiply(begin, end);
      }
    }
  });
}

}  // namespace specc::quantized
