// The first product of specc::tree_attention: keys become columns, and queries are multiplied with
// them.
//
// The products hold a block of results in registers and take their operands in the order of the
// sum, so that the bits of a row do not depend on the rows beside it. Operands that several rows
// use are kept in a register: loads are what these loops have fewest of.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tree_attention_ahead.h"
#include "vec.h"

namespace specc::attention {

// Registers of a block: rows x columns, its columns and one value of a row fit into the machine's.
#if defined(__AVX512F__)
constexpr int kScoreRows = 12, kScoreCols = 2;  // 27 of 32
constexpr int kValueRows = 6, kValueCols = 4;   // 29 of 32
#elif defined(__AVX__)
constexpr int kScoreRows = 4, kScoreCols = 2;  // 11 of 16
constexpr int kValueRows = 4, kValueCols = 2;
#else
constexpr int kScoreRows = 4, kScoreCols = 4;  // 21 of 32
constexpr int kValueRows = 4, kValueCols = 4;
#endif

// Of fewer rows, the sums of score_squares would wait for each other.
constexpr int kSquareRows = 3;

// Rows are cut into equal blocks of at most `most`: block i of them begins here.
inline int64_t num_blocks(int64_t rows, int64_t most) { return (rows + most - 1) / most; }
inline int64_t block_start(int64_t rows, int64_t blocks, int64_t i) { return rows * i / blocks; }

// Calls body(std::integral_constant<int, n>) for an n in 1 … Most.
template <int Most, class Body>
void with_constant(int64_t n, Body body) {
  if constexpr (Most > 1) {
    if (n < Most) return with_constant<Most - 1>(n, body);
  }
  body(std::integral_constant<int, Most>());
}

// What queries and keys are multiplied in: float, or pairs of bfloat16.
template <class T>
using KeyOf =
    std::conditional_t<std::is_same_v<T, vec::BFloat16> && vec::kHasPairs, vec::Pair, float>;
constexpr int kPanel = kScoreCols * vec::kWidth;  // keys whose scores are computed at once

// Work as Ahead is told of it, in products of a register: of a square that is transposed, and of a
// row of scores that become weights. Measured on a Zen 4.
constexpr int64_t kSquareWork = 5 * vec::kWidth, kSoftmaxWork = 80;

// Lane d of a row: what queries and keys are multiplied in.
template <class Key, class T>
inline Key lane_at(const T* row, int64_t d, int64_t dim) {
  if constexpr (std::is_same_v<Key, vec::Pair>) {
    const uint32_t high = 2 * d + 1 < dim ? row[2 * d + 1].bits : 0;
    return {row[2 * d].bits | high << 16};
  } else {
    return vec::to_float(row[d]);
  }
}

// Of a row of keys: lanes, and how many of them make whole squares.
template <class T>
inline int64_t key_depth(int64_t dim) {
  return std::is_same_v<KeyOf<T>, vec::Pair> ? (dim + 1) / 2 : dim;
}
template <class T>
inline int64_t whole_depth(int64_t dim) {
  const int64_t lanes = std::is_same_v<KeyOf<T>, vec::Pair> ? dim / 2 : dim;
  return lanes / vec::kWidth * vec::kWidth;
}

// square[i] = lane d + i of each of kWidth keys.
template <class T>
inline void load_square(const T* const* keys, int64_t d, vec::Float (&square)[vec::kWidth]) {
  // a pair moves as one lane
  using Lane = std::conditional_t<std::is_same_v<KeyOf<T>, vec::Pair>, float, T>;
#pragma GCC unroll 16
  for (int r = 0; r < vec::kWidth; ++r)
    square[r] = vec::load(reinterpret_cast<const Lane*>(keys[r]) + d);
  vec::transpose(square);
}

// panel[d][i] = keys[i][d] for `count` keys, a multiple of kWidth and at most kPanel.
template <class T>
void transpose_keys(const T* const* keys, int64_t count, int64_t dim, KeyOf<T>* panel,
                    Ahead& ahead) {
  using namespace vec;
  const int64_t depth = key_depth<T>(dim), whole = whole_depth<T>(dim);
  for (int64_t i = 0; i < count; i += kWidth) {
    for (int64_t d = 0; d < whole; d += kWidth) {
      ahead.spend(kSquareWork);
      Float square[kWidth];
      load_square(keys + i, d, square);
#pragma GCC unroll 16
      for (int r = 0; r < kWidth; ++r)
        store(reinterpret_cast<float*>(panel) + (d + r) * kPanel + i, square[r]);
    }
    for (int64_t d = whole; d < depth; ++d)
      for (int r = 0; r < kWidth; ++r)
        panel[d * kPanel + i + r] = lane_at<KeyOf<T>>(keys[i + r], d, dim);
  }
}

// scores[r][c] = sum_d queries[d][r] * panel[d][c] for R rows and C registers of keys.
template <int R, int C, class Key>
void score_block(const Key* queries, const Key* panel, int64_t panel_stride, int64_t depth,
                 float* scores, int64_t stride) {
  using namespace vec;
  Float sums[R][C] = {};
  for (int64_t d = 0; d < depth; ++d, queries += R, panel += panel_stride) {
    decltype(load(panel)) columns[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) keep(columns[c] = load(panel + c * kWidth));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const auto x = splat(queries[r]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) multiply_add(sums[r][c], x, columns[c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(scores + r * stride + c * kWidth, sums[r][c]);
}

// scores[r][i] of R rows and kWidth keys, whose panel stays in registers: the sums of score_block,
// in its order.
template <int R, class T>
void score_squares(const KeyOf<T>* queries, const T* const* keys, int64_t dim, float* scores,
                   int64_t stride, Ahead& ahead) {
  using namespace vec;
  using Column = decltype(load(queries));
  const int64_t depth = key_depth<T>(dim), whole = whole_depth<T>(dim);
  Float sums[R] = {};
  for (int64_t d = 0; d < whole; d += kWidth, queries += kWidth * R) {
    ahead.spend(kSquareWork + kWidth * R);
    Float square[kWidth];
    load_square(keys, d, square);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i)
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        multiply_add(sums[r], splat(queries[i * R + r]), (Column)square[i]);
  }
  for (int64_t d = whole; d < depth; ++d, queries += R) {
    alignas(64) KeyOf<T> column[kWidth];
    for (int i = 0; i < kWidth; ++i) column[i] = lane_at<KeyOf<T>>(keys[i], d, dim);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) multiply_add(sums[r], splat(queries[r]), load(column));
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) store(scores + r * stride, sums[r]);
}

}  // namespace specc::attention
