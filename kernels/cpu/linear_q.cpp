// y = x @ w.T + bias of a quantized weight, for the 1 to about 32 rows of a decoding or
// verification step, where the time is that of reading w once.
//
// Rows of x become integers, so that sums are exact: they are the same in any order and with any
// instructions (linear_q_paths.h). What is rounded, the sum of each group of columns and the sums
// over groups, is rounded as kernels/reference/quantized.py says, and compiled without contraction:
// a token's projection has the same bits alone or among others, on any number of threads, on any
// processor.
//
// The lanes of a register are outputs. A chunk of 128 columns of a block, 2 to 4 KB, is multiplied
// with one tile of rows after the other while it is in the first-level cache.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ahead.h"
#include "kernels.h"
#include "linear_q_blocks.h"
#include "linear_q_paths.h"

namespace specc {
namespace {

using namespace quantized;

constexpr int64_t kChunkQuads = kChunk / 4;
constexpr int64_t kUnitBytes = 4 * kBlock;
constexpr int64_t kFewRows = 2;  // reading takes longer than computing
constexpr int64_t kMostColumns = int64_t{1} << 40;
constexpr int kLeastExponent = -64;  // of 2: less than half of it counts as zero

// What levels are: integers, or values of e2m1 times 2, with their exponents of e8m0.
enum Kind { kInt8, kInt4, kMxfp4 };
constexpr int kMiddles[] = {128, 8, 12};

struct alignas(64) Line {
  char bytes[64];
};

// What a row has in a group beside its integers.
struct GroupOfRow {
  float factor;       // of its integers; NaN where the row has one, or an infinity
  int32_t high, low;  // minus the sums of the integers' parts, by the weights' common zero point
};

float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Writes a group of a row as integers; `values` has room for whole quads. What one is worth is the
// result.
template <int bits, class E>
float to_integers(const E* x, int64_t count, int32_t* values) {
  constexpr uint32_t kMost = bits == 8 ? 127 : bits == 16 ? 32639 : 8355711;
  constexpr int kWidth = bits - 1;  // bits of kMost
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = vec::to_float(x[i]);
    uint32_t image;
    std::memcpy(&image, &value, sizeof image);
    largest = std::max(largest, image & 0x7fffffff);
  }
  if (largest >= 0x7f800000) {  // infinity or NaN
    std::fill_n(values, count, 0);
    return std::nanf("");
  }
  float factor, inverse;
  if constexpr (bits == 8) {
    float most;
    std::memcpy(&most, &largest, sizeof most);
    const bool is_zero = most < power_of_two(kLeastExponent);
    factor = is_zero ? 0.0f : most / kMost;
    inverse = is_zero ? 0.0f : kMost / most;
  } else {
    // of 1.fraction · 2^exponent, 24 bits as an integer
    const uint32_t significand = 1u << 23 | (largest & 0x7fffff);
    const bool is_over = significand > (kMost << (24 - kWidth));
    const int exponent = std::max(
        static_cast<int>(largest >> 23) - 127 + 1 - kWidth + is_over, kLeastExponent);
    factor = power_of_two(exponent);
    inverse = power_of_two(-exponent);
  }
  for (int64_t i = 0; i < count; ++i)
    values[i] = static_cast<int32_t>(__builtin_rintf(vec::to_float(x[i]) * inverse));
  return factor;
}

template <class P, Kind kind>
typename P::Float load_scales(const uint8_t* scales, int output) {
  if constexpr (kind == kMxfp4)
    return P::load_exponents(scales + output) * P::splat(0.5f);
  else
    return P::load_floats(scales + output * 4);
}

// A chunk of a block, and what its columns have in common.
struct ChunkOfBlock {
  const uint8_t* w;
  const uint8_t* scales;  // of the chunk's first group, where they do not lie before each group
  int64_t columns;
};

// sums[m][0..32) += x[m, chunk] . w[chunk] for `rows` rows of x, group after group.
template <class P, int bits, Kind kind, bool has_zeros, Ahead ahead, int rows>
void multiply_chunk(const Layout& layout, const ChunkOfBlock& chunk, const int32_t* x,
                    const GroupOfRow* of_row, float* sums) {
  constexpr int64_t kRowInts = kChunkQuads * P::kInts;
  constexpr int kQuads = kind == kInt8 ? 1 : 2;
  constexpr int kRegisters = kBlock / P::kLanes;
  // sums in registers from group to group: measured, elsewhere it takes longer
  constexpr bool kKeeps = rows == 1 || (bits < 24 && kind != kInt8);
  for (int first = 0; first < kRegisters; first += P::kAtOnce) {
    typename P::Float total[rows][P::kAtOnce];
    if constexpr (kKeeps) {
#pragma GCC unroll 6
      for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < P::kAtOnce; ++v)
          total[m][v] = P::load_floats(sums + m * kBlock + (first + v) * P::kLanes);
    }
    const uint8_t* w = chunk.w;
    const uint8_t* scales = chunk.scales;
    const int32_t* of_group = x;
    const GroupOfRow* group = of_row;
    for (int64_t column = 0; column < chunk.columns; column += layout.group, ++group) {
      if (layout.group_header > 0) scales = w;
      typename P::Sums acc[rows][P::kAtOnce];
#pragma GCC unroll 2
      for (int v = 0; v < P::kAtOnce; ++v) {
        if constexpr (has_zeros) {
          const auto zeros = P::load_zeros(scales + kScalesBytes + (first + v) * P::kLanes * 2);
#pragma GCC unroll 6
          for (int m = 0; m < rows; ++m)
            P::start(acc[m][v], P::multiply(zeros, P::splat(group[m * kMostGroups].high)),
                     P::multiply(zeros, P::splat(group[m * kMostGroups].low)));
        } else {
#pragma GCC unroll 6
          for (int m = 0; m < rows; ++m)
            P::start(acc[m][v], P::splat(group[m * kMostGroups].high),
                     P::splat(group[m * kMostGroups].low));
        }
      }
      const int64_t columns = std::min(layout.group, chunk.columns - column);
      const int64_t units = parts_of(columns, layout.columns_of_unit);
      const uint8_t* unit = w + layout.group_header + first * P::kLanes * 4;
      const int32_t* of_unit = of_group;
      for (int64_t i = 0; i < units; ++i, unit += kUnitBytes) {
        if (first == 0)
          prefetch<ahead, kUnitBytes, kind == kInt8 ? kInt8AheadBytes : kAheadBytes>(unit);
        typename P::Columns columns_of[P::kAtOnce][kQuads];
#pragma GCC unroll 2
        for (int v = 0; v < P::kAtOnce; ++v) {
          const auto bytes = P::load(unit + v * P::kLanes * 4);
          if constexpr (kind == kInt8) {
            columns_of[v][0] = P::columns(bytes);
          } else if constexpr (kind == kInt4) {
            columns_of[v][0] = P::columns(P::low_nibbles(bytes));
            columns_of[v][1] = P::columns(P::high_nibbles(bytes));
          } else {
            columns_of[v][0] = P::columns(P::twice_e2m1(P::low_nibbles(bytes)));
            columns_of[v][1] = P::columns(P::twice_e2m1(P::high_nibbles(bytes)));
          }
        }
#pragma GCC unroll 2
        for (int q = 0; q < kQuads; ++q, of_unit += P::kInts)
#pragma GCC unroll 6
          for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
            for (int v = 0; v < P::kAtOnce; ++v)
              P::multiply(acc[m][v], columns_of[v][q], of_unit + m * kRowInts);
      }
#pragma GCC unroll 2
      for (int v = 0; v < P::kAtOnce; ++v) {
        const auto scale = load_scales<P, kind>(scales, (first + v) * P::kLanes);
#pragma GCC unroll 6
        for (int m = 0; m < rows; ++m) {
          auto sum = P::to_float(P::high(acc[m][v]));
          if constexpr (bits == 24) sum = sum * P::splat(256.0f) + P::to_float(P::low(acc[m][v]));
          const auto factor = scale * P::splat(group[m * kMostGroups].factor);
          if constexpr (kKeeps) {
            total[m][v] = total[m][v] + sum * factor;
          } else {
            float* of_row = sums + m * kBlock + (first + v) * P::kLanes;
            P::store(of_row, P::load_floats(of_row) + sum * factor);
          }
        }
      }
      w += layout.group_header + units * kUnitBytes;
      if (layout.chunk_header > 0) scales += kBlock;
      of_group += layout.group / 4 * P::kInts;
    }
    if constexpr (kKeeps) {
#pragma GCC unroll 6
      for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < P::kAtOnce; ++v)
          P::store(sums + m * kBlock + (first + v) * P::kLanes, total[m][v]);
    }
  }
}

using MultiplyChunk = void (*)(const Layout&, const ChunkOfBlock&, const int32_t*,
                               const GroupOfRow*, float*);

template <class P, int bits, Kind kind, bool has_zeros, Ahead ahead, int... less_one>
MultiplyChunk select(int64_t rows, std::integer_sequence<int, less_one...>) {
  static constexpr MultiplyChunk kOfRows[] = {
      multiply_chunk<P, bits, kind, has_zeros, ahead, less_one + 1>...};
  return kOfRows[rows - 1];
}

template <class P, int bits, Ahead ahead>
MultiplyChunk select(const LinearQ& a, int64_t rows) {
  constexpr auto heights = std::make_integer_sequence<int, P::kTileRows>();
  // measured: with groups the second level is slower at any number of rows
  constexpr Ahead of_4 = ahead == Ahead::kSecondLevel ? Ahead::kFirstLevel : ahead;
  if (a.is_float) return select<P, bits, kMxfp4, false, of_4>(rows, heights);
  if (a.bits == 8 && a.has_zeros) return select<P, bits, kInt8, true, ahead>(rows, heights);
  if (a.bits == 8) return select<P, bits, kInt8, false, ahead>(rows, heights);
  if (a.has_zeros) return select<P, bits, kInt4, true, of_4>(rows, heights);
  return select<P, bits, kInt4, false, of_4>(rows, heights);
}

// A part of x's rows that is multiplied with a chunk at once; the first one reads ahead.
struct RowTile {
  int64_t row;
  MultiplyChunk multiply;
};

template <class E, int bits>
class Rows {
 public:
  Rows(const LinearQ& a, int64_t begin, int64_t count)
      : a_(a),
        layout_(a),
        zero_(a.has_zeros ? 1 : kMiddles[a.bits == 8 ? kInt8 : a.is_float ? kMxfp4 : kInt4]),
        begin_(begin),
        count_(count),
        chunks_(parts_of(a.k, kChunk)) {
    num_tiles_ = parts_of(count, P::kTileRows);
    for (int64_t i = 0; i < num_tiles_; ++i) {
      const int64_t row = count * i / num_tiles_, rows = count * (i + 1) / num_tiles_ - row;
      tiles_[i] = {row, i > 0 ? select<P, bits, Ahead::kNowhere>(a, rows)
                        : a.group == 0 && count > kFewRows
                            ? select<P, bits, Ahead::kSecondLevel>(a, rows)
                            : select<P, bits, Ahead::kFirstLevel>(a, rows)};
    }
    pack();
  }

  // y of these rows, outputs of the blocks begin..end
  void multiply(int64_t begin, int64_t end) const {
    const int64_t bytes = block_bytes(a_);
    for (int64_t block = begin; block < end; ++block) {
      alignas(64) float sums[kMaxRows * kBlock];
      std::fill_n(sums, count_ * kBlock, 0.0f);
      const uint8_t* w = a_.w + block * bytes;
      const uint8_t* scales = w;
      w += layout_.block_header;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        if (layout_.chunk_header > 0) scales = w;
        w += layout_.chunk_header;
        const ChunkOfBlock of_block{w, scales, std::min(kChunk, a_.k - chunk * kChunk)};
        for (int64_t t = 0; t < num_tiles_; ++t) {
          const RowTile& tile = tiles_[t];
          const int64_t place = chunk * count_ + tile.row;
          tile.multiply(layout_, of_block, packed_ + place * kRowInts,
                        groups_ + place * kMostGroups, sums + tile.row * kBlock);
        }
        w += layout_.bytes_of(of_block.columns);
      }
      store(block * kBlock, sums);
    }
  }

 private:
  using P = quantized::Path<bits>;
  static constexpr int64_t kRowInts = kChunkQuads * P::kInts;

  // Writes x as integers in the order [chunk][row][quad], and its groups as [chunk][row][group].
  void pack() {
    thread_local std::vector<Line> buffer;
    const size_t ints = static_cast<size_t>(chunks_ * count_ * kRowInts);
    const size_t groups = static_cast<size_t>(chunks_ * count_ * kMostGroups);
    const size_t bytes = ints * sizeof(int32_t) + groups * sizeof(GroupOfRow);
    buffer.resize(std::max(buffer.size(), bytes / sizeof(Line) + 1));
    auto* packed = reinterpret_cast<int32_t*>(buffer.data());
    auto* group = reinterpret_cast<GroupOfRow*>(packed + ints);
    packed_ = packed;
    groups_ = group;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk)
      for (int64_t m = 0; m < count_; ++m, packed += kRowInts, group += kMostGroups)
        pack_chunk(chunk * kChunk, static_cast<const E*>(a_.x) + (begin_ + m) * a_.x_stride,
                   packed, group);
  }

  void pack_chunk(int64_t first, const E* x, int32_t* packed, GroupOfRow* group) {
    const int64_t end = std::min(a_.k, first + kChunk);
    // beyond K, where a unit of the weight has columns, too, integers are 0
    alignas(64) int32_t values[kChunk] = {};
    for (int64_t i = first; i < end; i += layout_.group, ++group) {
      int32_t* own = values + (i - first);
      const int64_t count = std::min(layout_.group, end - i);
      group->factor = to_integers<bits>(x + i, count, own);
      int32_t high = 0, low = 0;
      for (int64_t quad = 0; quad < count; quad += 4) {
        const quantized::Parts<bits> parts(own + quad);
        for (int j = 0; j < 4; ++j) high += parts.high[j], low += parts.low[j];
      }
      group->high = -high * zero_;
      group->low = -low * zero_;
    }
    for (int64_t quad = 0; quad < kChunkQuads; ++quad)
      P::write(values + 4 * quad, packed + quad * P::kInts);
  }

  void store(int64_t n, const float* sums) const {
    const E* bias = static_cast<const E*>(a_.bias);
    const int64_t columns = std::min<int64_t>(kBlock, a_.n - n);
    for (int64_t m = 0; m < count_; ++m) {
      E* y = static_cast<E*>(a_.y) + (begin_ + m) * a_.y_stride + n;
      const float* sum = sums + m * kBlock;
      for (int64_t i = 0; i < columns; ++i)
        vec::from_float(bias == nullptr ? sum[i] : sum[i] + vec::to_float(bias[n + i]), y + i);
    }
  }

  const LinearQ& a_;
  Layout layout_;
  int32_t zero_;  // 1 where groups have their own
  int64_t begin_, count_, chunks_, num_tiles_;
  RowTile tiles_[kMaxRows];
  const int32_t* packed_ = nullptr;
  const GroupOfRow* groups_ = nullptr;
};

}  // namespace

int64_t block_bytes(const LinearQ& a) {
  const bool is_group = a.group == 32 || a.group == 64 || a.group == 128;
  const bool is_8 = a.bits == 8 && (a.group == 0 || is_group);
  const bool is_4 = a.bits == 4 && (a.is_float ? a.group == 32 : is_group);
  if (!(is_8 || is_4) || (a.is_float && a.has_zeros))
    throw std::runtime_error("specc: no kernel for weights of this many bits and columns a group");
  if (a.k > kMostColumns) throw std::runtime_error("specc: x has too many columns");
  const Layout layout(a);
  return layout.block_header + parts_of(a.k, layout.group) * layout.group_header +
         parts_of(a.k, kChunk) * layout.chunk_header +
         parts_of(a.k, layout.columns_of_unit) * layout.unit_bytes;
}

void linear_q(const LinearQ* products, int64_t count, int num_threads) {
  if (count == 0) return;
  const bool is_float32 = products->dtype == DType::kFloat32;
  if (is_fp8(*products))
    linear_fp8(products, count, num_threads);
  else if (products->row_bits == 8)
    is_float32 ? quantized::run<Rows<float, 8>>(products, count, num_threads)
               : quantized::run<Rows<vec::BFloat16, 8>>(products, count, num_threads);
  else if (products->row_bits == 16)
    is_float32 ? quantized::run<Rows<float, 16>>(products, count, num_threads)
               : quantized::run<Rows<vec::BFloat16, 16>>(products, count, num_threads);
  else
    quantized::run<Rows<float, 24>>(products, count, num_threads);
}

}  // namespace specc
