// The products of a tile of specc::tree_attention: scores and sums of values, as
// tree_attention_keys.h says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tree_attention_ahead.h"
#include "tree_attention_keys.h"
#include "tree_attention_bits.h"
#include "vec.h"

namespace specc::attention {

// C registers of a row of values from `row` on. Of bfloat16, two registers are 2 * kWidth elements:
// first those at even places, then those at odd ones, each of which takes one instruction.
template <int C>
inline void load_values(const float* row, vec::Float (&columns)[C]) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) vec::keep(columns[c] = vec::load(row + c * vec::kWidth));
}
template <int C>
inline void load_values(const vec::BFloat16* row, vec::Float (&columns)[C]) {
  static_assert(C % 2 == 0);
#pragma GCC unroll 8
  for (int c = 0; c < C; c += 2) {
    vec::UInt pairs;
    std::memcpy(&pairs, row + c * vec::kWidth, sizeof pairs);
    vec::keep(columns[c] = reinterpret_cast<vec::Float>(pairs << 16));
    vec::keep(columns[c + 1] = reinterpret_cast<vec::Float>(pairs & 0xffff0000u));
  }
}

// sums[r][c] += sum_i weights[r][i] * rows[i][column + c] for R rows and C registers of columns.
template <int R, int C, class T>
void value_block(const float* weights, const T* const* rows, int64_t column, int64_t count,
                 float* sums, int64_t stride, Ahead& ahead) {
  using namespace vec;
  Float total[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = load(sums + r * stride + c * kWidth);
  // blocks of many rows take longer than memory does
  constexpr int kSteps = R < 6 ? 16 : kTile;
  for (int64_t i = 0; i < count; ++i) {
    if (i % kSteps == 0) ahead.spend(kSteps * R * C);
    Float columns[C];
    load_values(rows[i] + column, columns);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Float x = splat(weights[r * kTile + i]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) multiply_add(total[r][c], x, columns[c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sums + r * stride + c * kWidth, total[r][c]);
}

// As value_block, of any number of rows and of `width` columns, a multiple of kWidth (of bfloat16,
// of two).
template <class T>
void add_values(const float* weights, int64_t num_rows, const T* const* rows, int64_t count,
                float* sums, int64_t width, Ahead& ahead) {
  using vec::kWidth;
  const int64_t blocks = num_blocks(num_rows, kValueRows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block_start(num_rows, blocks, block);
    with_constant<kValueRows>(block_start(num_rows, blocks, block + 1) - first, [&](auto height) {
      const auto add = [&](int64_t column, auto cols) {
        constexpr int kRows = decltype(height)::value, kCols = decltype(cols)::value;
        value_block<kRows, kCols>(weights + first * kTile, rows, column, count,
                                  sums + first * width + column, width, ahead);
      };
      int64_t column = 0;
      for (; column + kValueCols * kWidth <= width; column += kValueCols * kWidth)
        add(column, std::integral_constant<int, kValueCols>());
      if constexpr (kValueCols > 2)
        for (; column + 2 * kWidth <= width; column += 2 * kWidth)
          add(column, std::integral_constant<int, 2>());
      if constexpr (std::is_same_v<T, float>)
        for (; column < width; column += kWidth) add(column, std::integral_constant<int, 1>());
    });
  }
}

// Sizes of a call that a tile's scratch memory depends on.
struct TileSizes {
  int64_t head_dim, value_dim;
  int64_t max_rows, max_unit_rows;  // query rows of one KV head, and of a unit
};

// Rows of values of a tile, and their weights [rows, kTile].
template <class S>
struct Weighted {
  const float* weights;
  const S* const* values;
  int64_t count;
};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The products of a tile whose rows lie in the cache as floats or bfloat16. A worker knows of it
// that rows are elements `Stored`, and how it orders columns of values.
template <class S>
class FloatTile {
 public:
  using Stored = S;
  using Key = KeyOf<S>;
  static constexpr bool kPairs = std::is_same_v<Key, vec::Pair>;
  // elements of values that load_values takes at once; other numbers are converted to float
  static constexpr int kValueUnit = std::is_same_v<S, float> ? vec::kWidth : 2 * vec::kWidth;

  explicit FloatTile(const TileSizes& sizes)
      : dim_(sizes.head_dim),
        value_dim_(sizes.value_dim),
        depth_(key_depth<S>(dim_)),
        width_(width(value_dim_)),
        convert_(value_dim_ % kValueUnit != 0) {
    parts_[0] = kPanel * depth_;
    parts_[1] = round_up(sizes.max_unit_rows * depth_, 16);
    parts_[2] = convert_ ? kTile * width_ : 0;
  }
  // Elements of a cache's row.
  static int64_t row_size(int64_t dim) { return dim; }
  // Columns of sums for values of this many.
  static int64_t width(int64_t value_dim) { return round_up(value_dim, vec::kWidth); }
  // Floats of scratch memory, which begins at a multiple of 64 bytes.
  int64_t scratch() const { return parts_[0] + parts_[1] + parts_[2]; }
  void bind(float* p) {
    panel_ = reinterpret_cast<Key*>(p);
    queries_ = reinterpret_cast<Key*>(p + parts_[0]);
    floats_ = p + parts_[0] + parts_[1];
  }

  // Take the query rows of a head of a unit, the rows before which are those of `first` others.
  // In blocks of rows as score_block takes them: queries_[block][d][row].
  template <class Q>
  void load_queries(int64_t first, const Q* const* queries, int64_t rows) {
    const int64_t blocks = num_blocks(rows, kScoreRows);
    Key* to = queries_ + first * depth_;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block_start(rows, blocks, block);
      const int64_t count = block_start(rows, blocks, block + 1) - begin;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < depth_; ++d)
          to[d * count + i] = lane_at<Key>(queries[begin + i], d, dim_);
      to += count * depth_;
    }
  }

  // What score and add tell Ahead of in all, and the weights between them.
  int64_t work(int64_t rows, int64_t count) const {
    const int64_t registers = round_up(count, vec::kWidth) / vec::kWidth;
    const int64_t of_keys =
        registers * (whole_depth<S>(dim_) / vec::kWidth * kSquareWork + depth_ * rows);
    return of_keys + rows * kSoftmaxWork + count * rows * (width_ / vec::kWidth);
  }

  // scores[r][i] of a head's rows with `count` keys, up to a whole register; all kTile pointers are
  // rows.
  void score(int64_t first_row, int64_t rows, const S* const* keys, int64_t count, float* scores,
             Ahead& ahead) {
    const int64_t blocks = num_blocks(rows, kScoreRows);
    const Key* queries = queries_ + first_row * depth_;
    if (blocks == 1 && rows >= kSquareRows) {
      with_constant<kScoreRows>(rows, [&](auto height) {
        for (int64_t column = 0; column < count; column += vec::kWidth)
          score_squares<decltype(height)::value, S>(queries, keys + column, dim_,
                                                    scores + column, kTile, ahead);
      });
      return;
    }
    for (int64_t column = 0; column < count; column += kPanel) {
      const int64_t columns = std::min<int64_t>(round_up(count - column, vec::kWidth), kPanel);
      transpose_keys(keys + column, columns, dim_, panel_, ahead);
      with_constant<kScoreCols>(columns / vec::kWidth, [&](auto cols) {
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t first = block_start(rows, blocks, block);
          const int64_t height = block_start(rows, blocks, block + 1) - first;
          ahead.spend(depth_ * height * columns / vec::kWidth);
          with_constant<kScoreRows>(height, [&](auto h) {
            score_block<decltype(h)::value, decltype(cols)::value>(
                queries + first * depth_, panel_, kPanel, depth_, scores + first * kTile + column,
                kTile);
          });
        }
      });
    }
  }

  // sums[r] += sum_i weights[r][i] * values[i]; weights after the last key are 0.
  void add(const Weighted<S>& keys, int64_t rows, float* sums, Ahead& ahead) {
    if (!convert_) {
      add_values(keys.weights, rows, keys.values, keys.count, sums, width_, ahead);
      return;
    }
    const float* floats[kTile];
    for (int64_t i = 0; i < keys.count; ++i) {
      float* row = floats_ + i * width_;
      for (int64_t j = 0; j < value_dim_; ++j) row[j] = vec::to_float(keys.values[i][j]);
      for (int64_t j = value_dim_; j < width_; ++j) row[j] = 0;
      floats[i] = row;
    }
    add_values(keys.weights, rows, floats, keys.count, sums, width_, ahead);
  }
  // The same of all parts of a tile, with the bits that it would have in one.
  void add_parts(const Weighted<S>* parts, int64_t count, int64_t rows, float* sums,
                 Ahead& ahead) {
    for (int64_t p = 0; p < count; ++p) add(parts[p], rows, sums, ahead);
  }

  // Where column d of the values is among the sums: as load_values orders them.
  int64_t place(int64_t d) const {
    if (std::is_same_v<S, float> || convert_) return d;
    return d / kValueUnit * kValueUnit + d % 2 * vec::kWidth + d % kValueUnit / 2;
  }

 private:
  const int64_t dim_, value_dim_, depth_, width_;
  const bool convert_;  // values to float; `floats_` holds a tile of them
  int64_t parts_[3];
  Key *panel_, *queries_;
  float* floats_;
};

}  // namespace specc::attention
