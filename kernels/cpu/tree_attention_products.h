// The two products of a tile of specc::tree_attention: scores of keys, and weighted sums of values.
//
// Both hold a block of results in registers and take their operands in the order of the sum, so
// that the bits of a row do not depend on the rows beside it. Operands that several rows use are
// kept in a register: loads are what these loops have fewest of.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

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

// sums[r][c] += sum_i weights[r][i] * rows[i][column + c] for R rows and C registers of columns;
// ahead(i) asks for what is read after this tile.
template <int R, int C, int Stride, class T, class Ahead>
void value_block(const float* weights, const T* const* rows, int64_t column, int64_t count,
                 float* sums, int64_t stride, Ahead ahead) {
  using namespace vec;
  Float total[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = load(sums + r * stride + c * kWidth);
  for (int64_t i = 0; i < count; ++i) {
    ahead(i);
    Float columns[C];
    load_values(rows[i] + column, columns);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Float x = splat(weights[r * Stride + i]);
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
// of two); the first block asks for what comes next.
template <int Stride, class T, class Ahead>
void add_values(const float* weights, int64_t num_rows, const T* const* rows, int64_t count,
                float* sums, int64_t width, Ahead ahead) {
  constexpr int kLeast = std::is_same_v<T, float> ? 1 : 2;
  const auto nothing = [](int64_t) {};
  const int64_t blocks = num_blocks(num_rows, kValueRows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block_start(num_rows, blocks, block);
    with_constant<kValueRows>(block_start(num_rows, blocks, block + 1) - first, [&](auto height) {
      const auto columns_at = [&](int64_t column, auto cols) {
        constexpr int kRows = decltype(height)::value, kCols = decltype(cols)::value;
        const float* from = weights + first * Stride;
        float* to = sums + first * width + column;
        if (block == 0 && column == 0)
          value_block<kRows, kCols, Stride>(from, rows, column, count, to, width, ahead);
        else
          value_block<kRows, kCols, Stride>(from, rows, column, count, to, width, nothing);
      };
      int64_t column = 0;
      for (; column + kValueCols * vec::kWidth <= width; column += kValueCols * vec::kWidth)
        columns_at(column, std::integral_constant<int, kValueCols>());
      if constexpr (kValueCols > 2)
        for (; column + 2 * vec::kWidth <= width; column += 2 * vec::kWidth)
          columns_at(column, std::integral_constant<int, 2>());
      if constexpr (kLeast == 1)
        for (; column < width; column += vec::kWidth)
          columns_at(column, std::integral_constant<int, 1>());
    });
  }
}

}  // namespace specc::attention
