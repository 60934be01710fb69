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
#include "linear_q_chunk.h"
#include "linear_q_formats.h"
#include "linear_q_paths.h"

namespace specc {
namespace {

using namespace quantized;

constexpr int64_t kFewRows = 2;  // reading takes longer than computing
constexpr int64_t kMostColumns = int64_t{1} << 40;
constexpr int kLeastExponent = -64;  // of 2: less than half of it counts as zero

struct alignas(64) Line {
  char bytes[64];
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
        layout_(layout_of(a)),
        zero_(zero_of(a)),
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
    Decoded decoded;
    for (int64_t block = begin; block < end; ++block) {
      alignas(64) float sums[kMaxRows * kBlock];
      std::fill_n(sums, count_ * kBlock, 0.0f);
      const uint8_t* w = a_.w + block * bytes;
      const uint8_t* scales = w;
      const auto* factors = reinterpret_cast<const float*>(w);
      w += layout_.block_header;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        ChunkOfBlock of_block{w, scales, factors, std::min(kChunk, a_.k - chunk * kChunk)};
        if (a_.format != nullptr) {
          const int64_t first = chunk * kChunk % kTogether;
          if (first == 0)
            w = decoded.read(*a_.format, w, std::min(kTogether, a_.k - chunk * kChunk));
          of_block = decoded.chunk(first, of_block.columns);
        } else {
          if (layout_.chunk_header > 0) of_block.scales = scales = w;
          of_block.w = w += layout_.chunk_header;
          w += layout_.bytes_of(of_block.columns);
        }
        for (int64_t t = 0; t < num_tiles_; ++t) {
          const RowTile& tile = tiles_[t];
          const int64_t place = chunk * count_ + tile.row;
          tile.multiply(layout_, of_block, packed_ + place * kRowInts,
                        groups_ + place * kMostGroups, sums + tile.row * kBlock);
        }
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
    const int64_t shared = std::max(layout_.group, kRowGroup);
    for (int64_t i = first; i < end; i += shared) {
      int32_t* own = values + (i - first);
      const int64_t count = std::min(shared, end - i);
      const float factor = to_integers<bits>(x + i, count, own);
      for (int64_t done = 0; done < count; done += layout_.group, ++group)
        pack_group(own + done, std::min(layout_.group, count - done), factor, group);
    }
    for (int64_t quad = 0; quad < kChunkQuads; ++quad)
      P::write(values + 4 * quad, packed + quad * P::kInts);
  }

  void pack_group(const int32_t* values, int64_t count, float factor, GroupOfRow* group) const {
    int32_t high = 0, low = 0;
    for (int64_t quad = 0; quad < count; quad += 4) {
      const quantized::Parts<bits> parts(values + quad);
      for (int j = 0; j < 4; ++j) high += parts.high[j], low += parts.low[j];
    }
    const int32_t sum = bits == 24 ? 256 * high + low : high;
    *group = {factor, -high * zero_, -low * zero_, static_cast<float>(sum) * factor};
  }

  static Layout layout_of(const LinearQ& a) {
    if (a.format == nullptr) return Layout(a);
    return Layout(a.format->bits == 4 ? 8 : 4, a.format->group);
  }
  static int32_t zero_of(const LinearQ& a) {
    if (a.format != nullptr) return a.format->middle;
    return a.has_zeros ? 1 : kMiddles[a.bits == 8 ? kInt8 : a.is_float ? kMxfp4 : kInt4];
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
  int32_t zero_;  // 1 where groups have their own, 0 where they have minima
  int64_t begin_, count_, chunks_, num_tiles_;
  RowTile tiles_[kMaxRows];
  const int32_t* packed_ = nullptr;
  const GroupOfRow* groups_ = nullptr;
};

}  // namespace

const BlockFormat* block_format(std::string_view name) {
  for (const BlockFormat& format : kFormats)
    if (name == format.name) return &format;
  return nullptr;
}

int64_t block_bytes(const LinearQ& a) {
  if (a.k > kMostColumns) throw std::runtime_error("specc: x has too many columns");
  if (const BlockFormat* format = a.format) {
    if (a.bits != format->bits || a.group != format->group || a.has_zeros || a.is_float)
      throw std::runtime_error("specc: no kernel for blocks of this many bits and columns a group");
    if (a.k % format->columns != 0)
      throw std::runtime_error("specc: the columns of x are those of whole blocks");
    return a.k / format->columns * (format->header + format->columns * format->bits / 8) * kBlock;
  }
  const bool is_group = a.group == 32 || a.group == 64 || a.group == 128;
  const bool is_8 = a.bits == 8 && (a.group == 0 || is_group);
  const bool is_4 = a.bits == 4 && (a.is_float ? a.group == 32 || is_nvfp4(a) : is_group);
  if (!(is_8 || is_4) || (a.is_float && a.has_zeros))
    throw std::runtime_error("specc: no kernel for weights of this many bits and columns a group");
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
