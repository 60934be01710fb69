// What specc::tree_attention computes of a tile: a panel of keys, scores, weights, sums of values.
//
// The products hold a block of results in registers and take their operands in the order of the
// sum, so that the bits of a row do not depend on the rows beside it. Operands that several rows
// use are kept in a register: loads are what these loops have fewest of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tree_attention_plan.h"
#include "vec.h"

namespace specc::attention {

// Asks for a row, into the second-level cache: the first one is too small for what comes next, and
// so are its miss buffers.
template <class T>
inline void prefetch(const T* row, int64_t size) {
  const char* p = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < size * sizeof(T); at += 64) __builtin_prefetch(p + at, 0, 2);
}

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

// What queries and keys are multiplied in: float, or pairs of bfloat16.
template <class T>
using KeyOf =
    std::conditional_t<std::is_same_v<T, vec::BFloat16> && vec::kHasPairs, vec::Pair, float>;
constexpr int kPanel = kScoreCols * vec::kWidth;  // keys whose scores are computed at once

// panel[d][i] = keys[i][d] for `count` keys, a multiple of kWidth and at most kPanel; ahead(i) asks
// for what is read in the place of key i after this tile.
template <class T, class Ahead>
void transpose_keys(const T* const* keys, int64_t count, int64_t dim, KeyOf<T>* panel,
                    Ahead ahead) {
  using namespace vec;
  constexpr bool kPairs = std::is_same_v<KeyOf<T>, Pair>;
  using Lane = std::conditional_t<kPairs, float, T>;  // a pair moves as one lane
  const int64_t depth = kPairs ? (dim + 1) / 2 : dim;
  const int64_t whole = (kPairs ? dim / 2 : dim) / kWidth * kWidth;
  for (int64_t i = 0; i < count; i += kWidth) {
    for (int64_t r = i; r < i + kWidth; ++r) ahead(r);
    for (int64_t d = 0; d < whole; d += kWidth) {
      Float square[kWidth];
#pragma GCC unroll 16
      for (int r = 0; r < kWidth; ++r)
        square[r] = load(reinterpret_cast<const Lane*>(keys[i + r]) + d);
      transpose(square);
#pragma GCC unroll 16
      for (int r = 0; r < kWidth; ++r)
        store(reinterpret_cast<float*>(panel) + (d + r) * kPanel + i, square[r]);
    }
    for (int64_t d = whole; d < depth; ++d)
      for (int r = 0; r < kWidth; ++r) {
        const T* row = keys[i + r];
        KeyOf<T>& to = panel[d * kPanel + i + r];
        if constexpr (kPairs) {
          const uint32_t high = 2 * d + 1 < dim ? row[2 * d + 1].bits : 0;
          to.bits = row[2 * d].bits | high << 16;
        } else {
          to = to_float(row[d]);
        }
      }
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

// No score comes near these; -inf would make NaN of a difference.
constexpr float kNothing = -1e30f;  // maximum of no scores
constexpr float kMasked = -3e38f;   // score of a key that is masked: 2^(kMasked - kNothing) is 0

// Replaces a row's kTile scores by weights 2^(score - max), 0 where its bit is not set, whatever the
// score; updates the row's maximum and its sum of weights by lane. True if the maximum grew, so
// that what was added before is to be multiplied by alpha.
inline bool softmax(float* scores, uint64_t bits, float factor, float* max, float* sum,
                    float* alpha) {
  using namespace vec;
  constexpr int kCount = kTile / kWidth;
  const Float scale = splat(factor * 1.44269504088896f);  // log2(e): weights are powers of two
  Float x[kCount], best = splat(kNothing);
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) {
    x[j] = select(bits >> (j * kWidth), load(scores + j * kWidth) * scale, splat(kMasked));
    best = vec::max(best, x[j]);
  }
  const float before = *max;
  const float now = std::max(before, vec::max(best));
  Float total = load(sum);
  if (now > before) {
    *max = now;
    const Float decay = exp2_of_nonpositive(splat(before - now));
    *alpha = decay[0];
    total *= decay;
  }
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) {
    x[j] = exp2_of_nonpositive(x[j] - now);
    total += x[j];
    store(scores + j * kWidth, x[j]);
  }
  store(sum, total);
  return now > before;
}

// Replaces a row's kTile scores by score * factor + slope * (key - token), of positions of keys.
inline void add_distances(float* scores, float factor, float slope, const float* keys,
                          float token) {
  using namespace vec;
  for (int j = 0; j < kTile; j += kWidth) {
    const Float distance = load(keys + j) - splat(token);
    store(scores + j, load(scores + j) * splat(factor) + splat(slope) * distance);
  }
}

inline vec::Float rounded_to_bfloat16(vec::Float x) {
  using namespace vec;
  const UInt bits = reinterpret_cast<UInt>(x);
  return reinterpret_cast<Float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// As add_distances, of positions and products that are rounded to bfloat16, and then scaled.
inline void add_rounded_distances(float* scores, float factor, float slope, float scale,
                                  const float* keys, float token) {
  using namespace vec;
  const Float own = rounded_to_bfloat16(splat(slope) * rounded_to_bfloat16(splat(token)));
  for (int j = 0; j < kTile; j += kWidth) {
    const Float place = rounded_to_bfloat16(load(keys + j));
    const Float of_key = rounded_to_bfloat16(splat(slope) * place);
    store(scores + j, load(scores + j) * splat(factor) + (of_key - own) * splat(scale));
  }
}

// Replaces a row's kTile scores by tanh(score * factor).
inline void squash(float* scores, float factor) {
  using namespace vec;
  constexpr float kTwoLog2E = 2.88539008177793f;  // of e^(-2|x|)
  for (int j = 0; j < kTile; j += kWidth) {
    const Float x = load(scores + j) * splat(factor);
    const Float size = vec::max(x, -x);
    const Float e = exp2_of_nonpositive(size * splat(-kTwoLog2E));
    const Float y = (1.0f - e) / (1.0f + e);
    store(scores + j, x < 0.0f ? -y : y);
  }
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
// ahead(i) as above.
template <int R, int C, class T, class Ahead>
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
// of two); the first block asks for what comes next.
template <class T, class Ahead>
void add_values(const float* weights, int64_t num_rows, const T* const* rows, int64_t count,
                float* sums, int64_t width, Ahead ahead) {
  using vec::kWidth;
  const int64_t blocks = num_blocks(num_rows, kValueRows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block_start(num_rows, blocks, block);
    with_constant<kValueRows>(block_start(num_rows, blocks, block + 1) - first, [&](auto height) {
      const auto add = [&](int64_t column, auto cols) {
        constexpr int kRows = decltype(height)::value, kCols = decltype(cols)::value;
        const float* from = weights + first * kTile;
        float* to = sums + first * width + column;
        if (block == 0 && column == 0)
          value_block<kRows, kCols>(from, rows, column, count, to, width, ahead);
        else
          value_block<kRows, kCols>(from, rows, column, count, to, width, [](int64_t) {});
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
        depth_(kPairs ? (dim_ + 1) / 2 : dim_),
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
      for (int64_t i = 0; i < count; ++i) {
        const Q* q = queries[begin + i];
        for (int64_t d = 0; d < depth_; ++d) {
          Key& key = to[d * count + i];
          if constexpr (kPairs) {
            const uint32_t high = 2 * d + 1 < dim_ ? q[2 * d + 1].bits : 0;
            key.bits = q[2 * d].bits | high << 16;
          } else {
            key = vec::to_float(q[d]);
          }
        }
      }
      to += count * depth_;
    }
  }

  // scores[r][i] of a head's rows with `count` keys, up to a whole register; all kTile pointers are
  // rows. ahead(i) asks for what is read in the place of key i after this tile.
  template <class Ahead>
  void score(int64_t first_row, int64_t rows, const S* const* keys, int64_t count, float* scores,
             Ahead ahead) {
    const int64_t blocks = num_blocks(rows, kScoreRows);
    const Key* queries = queries_ + first_row * depth_;
    for (int64_t column = 0; column < count; column += kPanel) {
      const int64_t columns = std::min<int64_t>(round_up(count - column, vec::kWidth), kPanel);
      transpose_keys(keys + column, columns, dim_, panel_, [&](int64_t i) { ahead(column + i); });
      with_constant<kScoreCols>(columns / vec::kWidth, [&](auto cols) {
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t first = block_start(rows, blocks, block);
          const int64_t height = block_start(rows, blocks, block + 1) - first;
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
  template <class Ahead>
  void add(const float* weights, int64_t rows, const S* const* values, int64_t count, float* sums,
           Ahead ahead) {
    if (!convert_) {
      add_values(weights, rows, values, count, sums, width_, ahead);
      return;
    }
    const float* floats[kTile];
    for (int64_t i = 0; i < count; ++i) {
      float* row = floats_ + i * width_;
      for (int64_t j = 0; j < value_dim_; ++j) row[j] = vec::to_float(values[i][j]);
      for (int64_t j = value_dim_; j < width_; ++j) row[j] = 0;
      floats[i] = row;
    }
    add_values(weights, rows, floats, count, sums, width_, ahead);
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
