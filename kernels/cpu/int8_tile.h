// The products of a tile whose rows lie in the cache as int8, with integer dot products of
// AVX-512 VNNI: a lane multiplies four bytes of one operand with four of the other.
//
// Queries and weights become fixed-point numbers of two digits, a byte each, relative to the
// largest of a query's row, and of the weights of a row in this tile: 15 and 16 bits, where codes
// have 8. Sums of products of digits and codes are exact, so a row's bits cannot depend on an order,
// on the rows beside it, or on a register's width; one rounding each makes floats of them.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SPECC_HAS_BYTE_PRODUCTS 1

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kv_rows.h"
#include "tree_attention_ahead.h"
#include "tree_attention_tile.h"
#include "vec.h"

namespace specc::attention {

class ByteTile {
 public:
  using Stored = int8_t;
  static constexpr int kRows = 6, kCols = 4;  // 29 of 32 registers
  static constexpr int64_t kUnit = 64;        // columns of values in a register of bytes
  // as kSquareWork: of four rows of values, and of the weights of a row
  static constexpr int64_t kQuadWork = 16, kDigitsWork = 60;

  explicit ByteTile(const TileSizes& sizes)
      : dim_(sizes.head_dim),
        value_dim_(sizes.value_dim),
        depth_((dim_ + 3) / 4),
        units_(width(value_dim_) / kUnit) {
    parts_[0] = depth_ * kTile;                                         // panel of keys
    parts_[1] = round_up(sizes.max_unit_rows * depth_ * 2, 16);         // digits of queries
    parts_[2] = round_up(sizes.max_unit_rows, 16);                      // scales of queries
    parts_[3] = parts_[2];                                              // sums of queries
    parts_[4] = units_ * kTile * (kUnit / 4);                           // panel of values
    parts_[5] = sizes.max_rows * 2 * (kTile / 4);                       // digits of weights
    parts_[6] = round_up(sizes.max_rows, 16);                           // scales of weights
  }
  static int64_t row_size(int64_t dim) { return dim + kScaleBytes; }
  static int64_t width(int64_t value_dim) { return round_up(value_dim, kUnit); }
  int64_t scratch() const {
    int64_t total = 0;
    for (int64_t part : parts_) total += part;
    return total;
  }
  void bind(float* p) {
    keys_ = reinterpret_cast<int32_t*>(p), p += parts_[0];
    queries_ = reinterpret_cast<int32_t*>(p), p += parts_[1];
    query_scales_ = p, p += parts_[2];
    query_sums_ = reinterpret_cast<int32_t*>(p), p += parts_[3];
    values_ = reinterpret_cast<int32_t*>(p), p += parts_[4];
    weights_ = reinterpret_cast<int32_t*>(p), p += parts_[5];
    weight_scales_ = p;
  }

  // As digits, in blocks of rows as score_block takes them: queries_[block][digit][d][row].
  template <class Q>
  void load_queries(int64_t first, const Q* const* queries, int64_t rows) {
    const int64_t blocks = num_blocks(rows, kRows);
    int32_t* to = queries_ + first * depth_ * 2;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block_start(rows, blocks, block);
      const int64_t count = block_start(rows, blocks, block + 1) - begin;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = first + begin + i;
        load_query(queries[begin + i], to + i, count, query_scales_ + row, query_sums_ + row);
      }
      to += count * depth_ * 2;
    }
  }

  // What score and add tell Ahead of in all, and the weights between them.
  int64_t work(int64_t rows, int64_t count) const {
    const int64_t registers = round_up(count, vec::kWidth) / vec::kWidth;
    const int64_t quads = (count + 3) / 4, of_weights = kSoftmaxWork + kDigitsWork;
    return registers * (depth_ / vec::kWidth * kSquareWork + 2 * depth_ * rows) +
           rows * of_weights + units_ * quads * (kQuadWork + 2 * rows * kCols);
  }

  void score(int64_t first_row, int64_t rows, const int8_t* const* keys, int64_t count,
             float* scores, Ahead& ahead) {
    const int64_t columns = round_up(count, vec::kWidth);
    transpose_bytes(keys, columns, ahead);
    alignas(64) float scales[kTile];
    for (int64_t i = 0; i < columns; ++i) scales[i] = scale_of(keys[i], dim_);
    const int64_t blocks = num_blocks(rows, kRows);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block_start(rows, blocks, block);
      const int64_t height = block_start(rows, blocks, block + 1) - first;
      ahead.spend(2 * depth_ * height * columns / vec::kWidth);
      with_constant<kRows>(height, [&](auto h) {
        with_constant<kCols>(columns / vec::kWidth, [&](auto cols) {
          score_block<decltype(h)::value, decltype(cols)::value>(first_row + first, scales,
                                                                 scores + first * kTile);
        });
      });
    }
  }

  void add(const Weighted<int8_t>& keys, int64_t rows, float* sums, Ahead& ahead) {
    load_scales(keys);
    for (int64_t r = 0; r < rows; ++r) {
      ahead.spend(kDigitsWork);
      load_weights(keys.weights + r * kTile, r, largest(keys.weights + r * kTile));
    }
    multiply(keys, rows, sums, {}, ahead);
  }
  // The same of all parts of a tile, with the bits that it would have in one: weights are rounded
  // relative to the largest of all, and made floats when integers are whole.
  void add_parts(const Weighted<int8_t>* parts, int64_t count, int64_t rows, float* sums,
                 Ahead& ahead) {
    largest_.assign(rows, {});
    carry_.assign(rows * width(value_dim_), 0);
    for (int64_t p = 0; p < count; ++p) {
      load_scales(parts[p]);
      for (int64_t r = 0; r < rows; ++r)
        largest_[r] = largest_[r].with(largest(parts[p].weights + r * kTile));
    }
    for (int64_t p = 0; p < count; ++p) {
      load_scales(parts[p]);
      for (int64_t r = 0; r < rows; ++r)
        load_weights(parts[p].weights + r * kTile, r, largest_[r]);
      multiply(parts[p], rows, sums, {carry_.data(), p + 1 == count}, ahead);
    }
  }

  // interleave leaves four columns of each quarter of a register beside each other.
  int64_t place(int64_t d) const {
    return d / kUnit * kUnit + d % 16 / 4 * 16 + d % kUnit / 16 * 4 + d % 4;
  }

 private:
  static constexpr int kDigit = 7;               // bits of the lower digit of a query
  static constexpr float kMostQuery = 127 << 7;  // both digits fit into signed bytes
  static constexpr float kMostWeight = 65535;    // and those of weights into unsigned ones

  // x = scale * (128 * high + low), high and low in -127 … 127, relative to the row's largest.
  template <class Q>
  void load_query(const Q* q, int32_t* to, int64_t stride, float* scale, int32_t* sum) {
    float most = 0, poison = 0;
    for (int64_t d = 0; d < dim_; ++d) {
      const float x = vec::to_float(q[d]);
      most = std::max(most, std::fabs(x));
      poison += x * 0;  // NaN of NaN and infinity
    }
    const bool is_good = poison == 0 && most > 1e-30f;
    const float factor = is_good ? kMostQuery / most : 0;
    *scale = is_good ? most / kMostQuery : poison;
    *sum = 0;
    for (int64_t d = 0; d < depth_; ++d) {
      uint32_t high = 0, low = 0;
      for (int64_t i = 4 * d; is_good && i < std::min(4 * d + 4, dim_); ++i) {
        const int32_t x = static_cast<int32_t>(std::nearbyint(vec::to_float(q[i]) * factor));
        const int32_t upper = (x + 64) >> kDigit, lower = x - (upper << kDigit);
        high |= static_cast<uint32_t>(upper & 0xff) << 8 * (i % 4);
        low |= static_cast<uint32_t>(lower & 0xff) << 8 * (i % 4);
        *sum += x;
      }
      to[d * stride] = static_cast<int32_t>(high);
      to[(depth_ + d) * stride] = static_cast<int32_t>(low);
    }
  }

  // keys_[d][i] = bytes 4d … 4d + 3 of key i, plus 128: the instruction wants one unsigned operand.
  void transpose_bytes(const int8_t* const* keys, int64_t count, Ahead& ahead) {
    using namespace vec;
    const int64_t whole = dim_ / 4 / kWidth * kWidth;
    const UInt flip = UInt{} + 0x80808080u;
    for (int64_t i = 0; i < count; i += kWidth) {
      for (int64_t d = 0; d < whole; d += kWidth) {
        ahead.spend(kSquareWork);
        Float square[kWidth];
#pragma GCC unroll 16
        for (int r = 0; r < kWidth; ++r) std::memcpy(&square[r], keys[i + r] + 4 * d, 64);
        transpose(square);
#pragma GCC unroll 16
        for (int r = 0; r < kWidth; ++r) {
          const UInt column = reinterpret_cast<UInt>(square[r]) ^ flip;
          std::memcpy(keys_ + (d + r) * kTile + i, &column, sizeof column);
        }
      }
      for (int64_t d = whole; d < depth_; ++d)
        for (int r = 0; r < kWidth; ++r) {
          uint32_t bytes = 0;
          std::memcpy(&bytes, keys[i + r] + 4 * d, std::min<int64_t>(4, dim_ - 4 * d));
          keys_[d * kTile + i + r] = static_cast<int32_t>(bytes ^ 0x80808080u);
        }
    }
  }

  template <int R, int C>
  void score_block(int64_t first, const float* scales, float* scores) {
    using namespace vec;
    __m512i sums[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = _mm512_setzero_si512();
    const int32_t* digits = queries_ + first * depth_ * 2;
    for (int digit = 0; digit < 2; ++digit) {
      if (digit) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[r][c] = _mm512_slli_epi32(sums[r][c], kDigit);
      }
      const int32_t* panel = keys_;
      for (int64_t d = 0; d < depth_; ++d, digits += R, panel += kTile) {
        __m512i columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) keep(columns[c] = _mm512_loadu_si512(panel + c * kWidth));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const __m512i x = _mm512_set1_epi32(digits[r]);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], columns[c], x);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      // 128 was added to each byte of a key; sums that overflow on the way do not in the end
      const __m512i extra = _mm512_set1_epi32(static_cast<int32_t>(
          static_cast<uint32_t>(query_sums_[first + r]) << 7));
      const Float scale = splat(query_scales_[first + r]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const Float dot = (Float)_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][c], extra));
        store(scores + r * kTile + c * kWidth, dot * scale * load(scales + c * kWidth));
      }
    }
  }

  // values_[unit][quad][register]: lanes of four bytes, of one column of four keys.
  void interleave(const int8_t* const* values, int64_t quads, Ahead& ahead) {
    for (int64_t quad = 0; quad < quads; ++quad) {
      ahead.spend(units_ * kQuadWork);
      const int8_t* const* rows = values + 4 * quad;
      for (int64_t unit = 0; unit < units_; ++unit) {
        const int64_t columns = std::min(value_dim_ - unit * kUnit, kUnit);
        const __mmask64 mask = ~uint64_t{0} >> (kUnit - columns);
        __m512i row[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r)
          row[r] = _mm512_maskz_loadu_epi8(mask, rows[r] + unit * kUnit);
        const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]);
        const __m512i b = _mm512_unpackhi_epi8(row[0], row[1]);
        const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]);
        const __m512i d = _mm512_unpackhi_epi8(row[2], row[3]);
        int32_t* to = values_ + (unit * (kTile / 4) + quad) * kUnit;
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, c));
        _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(a, c));
        _mm512_storeu_si512(to + 32, _mm512_unpacklo_epi16(b, d));
        _mm512_storeu_si512(to + 48, _mm512_unpackhi_epi16(b, d));
      }
    }
  }

  // Of a row's weights, times the scales of what they multiply.
  struct Largest {
    float most = 0, poison = 0;  // NaN of NaN and infinity
    Largest with(const Largest& other) const {
      return {std::max(most, other.most), poison + other.poison};
    }
  };
  // Integers of the parts of a tile so far; a tile of one part has none.
  struct Carry {
    int32_t* sums = nullptr;  // [rows, width]
    bool is_last = true;
  };

  void load_scales(const Weighted<int8_t>& keys) {
    for (int64_t i = 0; i < kTile; ++i)
      scales_[i] = i < keys.count ? scale_of(keys.values[i], value_dim_) : 0;
  }
  Largest largest(const float* weights) const {
    using namespace vec;
    Float best = splat(0), total = splat(0);
#pragma GCC unroll 4
    for (int j = 0; j < kTile; j += kWidth) {
      const Float x = load(weights + j) * load(scales_ + j);
      best = vec::max(x, best);
      total += x;
    }
    return {vec::max(best), vec::sum(total) * 0};
  }
  void multiply(const Weighted<int8_t>& keys, int64_t rows, float* sums, Carry carry,
                Ahead& ahead) {
    const int64_t quads = (keys.count + 3) / 4;
    interleave(keys.values, quads, ahead);
    const int64_t blocks = num_blocks(rows, kRows);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block_start(rows, blocks, block);
      const int64_t height = block_start(rows, blocks, block + 1) - first;
      with_constant<kRows>(height, [&](auto h) {
        for (int64_t unit = 0; unit < units_; ++unit) {
          ahead.spend(2 * quads * height * kCols);
          value_block<decltype(h)::value>(first, unit, quads, sums, carry);
        }
      });
    }
  }

  // weight * scale of its row = weight_scale * (256 * high + low), relative to the row's largest.
  void load_weights(const float* weights, int64_t r, const Largest& of_row) {
    using namespace vec;
    const bool is_good = of_row.poison == 0 && of_row.most > 1e-30f;
    const Float factor = splat(is_good ? kMostWeight / of_row.most : 0);
    weight_scales_[r] = is_good ? of_row.most / kMostWeight : of_row.poison;
    int8_t* to = reinterpret_cast<int8_t*>(weights_ + r * 2 * (kTile / 4));
#pragma GCC unroll 4
    for (int j = 0; j < kTile / kWidth; ++j) {
      const Float x = load(weights + j * kWidth) * load(scales_ + j * kWidth);
      const __m512i whole = _mm512_cvtps_epi32((__m512)(is_good ? x * factor : splat(0)));
      const __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8));
      const __m128i low = _mm512_cvtepi32_epi8(whole);
      std::memcpy(to + j * kWidth, &high, sizeof high);
      std::memcpy(to + kTile + j * kWidth, &low, sizeof low);
    }
  }

  template <int R>
  void value_block(int64_t first, int64_t unit, int64_t quads, float* sums, Carry carry) {
    using namespace vec;
    __m512i total[R][kCols];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) total[r][c] = _mm512_setzero_si512();
    const int32_t* digits = weights_ + first * 2 * (kTile / 4);
    for (int digit = 0; digit < 2; ++digit, digits += kTile / 4) {
      if (digit) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int c = 0; c < kCols; ++c) total[r][c] = _mm512_slli_epi32(total[r][c], 8);
      }
      const int32_t* panel = values_ + unit * (kTile / 4) * kUnit;
      for (int64_t quad = 0; quad < quads; ++quad, panel += kUnit) {
        __m512i columns[kCols];
#pragma GCC unroll 4
        for (int c = 0; c < kCols; ++c) keep(columns[c] = _mm512_loadu_si512(panel + c * kWidth));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const __m512i x = _mm512_set1_epi32(digits[r * 2 * (kTile / 4) + quad]);
#pragma GCC unroll 4
          for (int c = 0; c < kCols; ++c)
            total[r][c] = _mm512_dpbusd_epi32(total[r][c], x, columns[c]);
        }
      }
    }
    const int64_t width = units_ * kUnit;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const int64_t place = (first + r) * width + unit * kUnit;
      if (carry.sums) {
        int32_t* so_far = carry.sums + place;
#pragma GCC unroll 4
        for (int c = 0; c < kCols; ++c) {
          total[r][c] = _mm512_add_epi32(total[r][c], _mm512_loadu_si512(so_far + c * kWidth));
          if (!carry.is_last) _mm512_storeu_si512(so_far + c * kWidth, total[r][c]);
        }
        if (!carry.is_last) continue;
      }
      float* to = sums + place;
      const Float scale = splat(weight_scales_[first + r]);
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) {
        const Float sum = (Float)_mm512_cvtepi32_ps(total[r][c]) * scale;
        store(to + c * kWidth, load(to + c * kWidth) + sum);
      }
    }
  }

  const int64_t dim_, value_dim_, depth_, units_;
  int64_t parts_[7];
  int32_t *keys_, *queries_, *query_sums_, *values_, *weights_;
  float *query_scales_, *weight_scales_;
  alignas(64) float scales_[kTile];  // of the values of a tile's part
  std::vector<Largest> largest_;     // of each row, where a tile has several parts
  std::vector<int32_t> carry_;       // as Carry has them
};

}  // namespace specc::attention

#endif
