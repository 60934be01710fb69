// y = x @ w.T + bias for the 1 to about 32 rows of a decoding or verification step, where the time
// is that of reading w once.
//
// w lies in blocks of 32 outputs (specc/artifact/weight_layout.py), which a thread reads as one
// stream from its first block to its last. The lanes of a register are outputs; each value of x is
// multiplied with all outputs of the block. Where x has many rows, a chunk of the block is
// multiplied with one tile of rows after the other while it is in the first-level cache. What comes
// next is asked for (ahead.h).
//
// Order of summation: y[m, n] is summed from left to right along each chunk, and so are the chunks.
// Neither the number of rows nor that of threads enters: a token's projection has the same bits
// whether it is decoded alone or verified among others, and by an expert as by a weight of its own.

// before any header: the compiler may reorder the sums of each instantiation below differently
#if defined(__clang__)
#pragma clang fp reassociate(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math")
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "ahead.h"
#include "kernels.h"
#include "team.h"
#include "vec.h"

namespace specc {
namespace {

using vec::Float;
using vec::keep;
using vec::kWidth;

constexpr int kBlock = kLinearBlock;
constexpr int kVectors = kBlock / kWidth;  // registers of a column of a block
#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 12 x 2 accumulators, 2 columns and a value of x: 27 registers
#elif defined(__aarch64__)
constexpr int kTileRows = 2;  // 2 x 8 accumulators, 8 columns and a value of x: 25 of 32
#elif defined(__AVX__)
constexpr int kTileRows = 3;  // 3 x 4 accumulators and operands of 16 registers
#else
constexpr int kTileRows = 1;  // 8 accumulators and operands of 16 registers
#endif
constexpr int64_t kMaxRows = 32;        // rows of x for which w is read once
constexpr int64_t kChunk = 128;         // units of a block: 16 KB
constexpr int64_t kStride = kChunk + 16;  // of x's rows, which would share sets of the cache
constexpr int64_t kUnitBytes = 4 * kBlock;
constexpr int64_t kChunkBytes = kChunk * kUnitBytes;
constexpr int64_t kAheadBytes = 8192;   // covers memory's latency at a thread's bandwidth
constexpr int64_t kFewRows = 4;         // reading takes longer than computing
constexpr int64_t kSerialWork = 16384;  // products that cost less than waking a second thread

struct alignas(64) Line {
  char bytes[64];
};

// What is multiplied at once is a unit: a float, or two neighboring bfloat16 of a row. A Column
// holds kWidth outputs of it, Value is the unit of a row of x.
template <class E>
struct Unit;

template <>
struct Unit<float> {
  static constexpr int64_t kColumns = 1;
  using Column = Float;
  using Value = float;
  static Value of(const float* x, int64_t) { return *x; }
  static Column load(const char* w) { return vec::load(reinterpret_cast<const float*>(w)); }
  static void multiply_add(Float& sum, Column w, Value x) {
    vec::multiply_add(sum, w, vec::splat(x));
  }
};

#ifdef __AVX512BF16__
template <>
struct Unit<vec::BFloat16> {
  static constexpr int64_t kColumns = 2;
  using Column = __m512bh;
  using Value = vec::Pair;
  static Value of(const vec::BFloat16* x, int64_t count) {
    return {x[0].bits | (count > 1 ? uint32_t{x[1].bits} << 16 : 0)};
  }
  static Column load(const char* w) { return vec::load(reinterpret_cast<const vec::Pair*>(w)); }
  static void multiply_add(Float& sum, Column w, Value x) {
    vec::multiply_add(sum, w, vec::splat(x));
  }
};
#else
template <>
struct Unit<vec::BFloat16> {
  static constexpr int64_t kColumns = 2;
  using Column = vec::UInt;
  struct Value {
    float first, second;
  };
  static Value of(const vec::BFloat16* x, int64_t count) {
    return {vec::to_float(x[0]), count > 1 ? vec::to_float(x[1]) : 0.0f};
  }
  static Column load(const char* w) {
    Column bits;
    std::memcpy(&bits, w, sizeof bits);
    return bits;
  }
  static void multiply_add(Float& sum, Column w, Value x) {
    vec::multiply_add(sum, reinterpret_cast<Float>(w << 16), vec::splat(x.first));
    vec::multiply_add(sum, reinterpret_cast<Float>(w & 0xffff0000u), vec::splat(x.second));
  }
};
#endif

// sums[m][0..32) += x[m, chunk] . w[chunk] for `rows` rows of x, kStride apart. `later`: what a tile
// that shares the asking with another one asks for, half of the chunk that comes next.
template <class E, int rows, Ahead ahead>
void multiply_tile(const char* w, const typename Unit<E>::Value* x, int64_t units, float* sums,
                   const char* later) {
  Float acc[rows][kVectors] = {};
  for (int64_t i = 0; i < units; ++i, w += kUnitBytes) {
    if constexpr (ahead == Ahead::kShared)
      prefetch<Ahead::kSecondLevel, kUnitBytes / 2, 0>(later + i * (kUnitBytes / 2));
    else
      prefetch<ahead, kUnitBytes, kAheadBytes>(w);
    typename Unit<E>::Column columns[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = Unit<E>::load(w + v * kWidth * 4);
      keep(columns[v]);
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        Unit<E>::multiply_add(acc[m][v], columns[v], x[m * kStride + i]);
  }
#pragma GCC unroll 12
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* sum = sums + m * kBlock + v * kWidth;
      vec::store(sum, vec::load(sum) + acc[m][v]);
    }
}

template <class E>
using MultiplyTile = void (*)(const char*, const typename Unit<E>::Value*, int64_t, float*,
                              const char*);

template <class E, Ahead ahead, int... less_one>
MultiplyTile<E> select(int64_t rows, std::integer_sequence<int, less_one...>) {
  static constexpr MultiplyTile<E> kOfRows[] = {multiply_tile<E, less_one + 1, ahead>...};
  return kOfRows[rows - 1];
}

// A part of x's rows that is multiplied with a chunk at once. The first one asks for what comes
// next, or both of two share that: requests spread over all products wait for each other less.
template <class E>
struct RowTile {
  int64_t row;
  MultiplyTile<E> multiply;
};

template <class E>
class Rows {
 public:
  Rows(const Linear& a, int64_t begin, int64_t count)
      : a_(a), begin_(begin), count_(count), units_((a.k + kColumns - 1) / kColumns) {
    constexpr auto heights = std::make_integer_sequence<int, kTileRows>();
    num_tiles_ = (count + kTileRows - 1) / kTileRows;
    for (int64_t i = 0; i < num_tiles_; ++i) {
      const int64_t row = count * i / num_tiles_, rows = count * (i + 1) / num_tiles_ - row;
      tiles_[i] = {row, num_tiles_ == 2 && count > kFewRows ? select<E, Ahead::kShared>(rows, heights)
                        : i > 0            ? select<E, Ahead::kNowhere>(rows, heights)
                        : count > kFewRows ? select<E, Ahead::kSecondLevel>(rows, heights)
                                           : select<E, Ahead::kFirstLevel>(rows, heights)};
    }
    pack();
  }

  // y of these rows, outputs of the blocks begin..end
  void multiply(int64_t begin, int64_t end) const {
    const char* w = static_cast<const char*>(a_.w) + begin * units_ * kUnitBytes;
    for (int64_t block = begin; block < end; ++block) {
      alignas(64) float sums[kMaxRows * kBlock];
      std::fill_n(sums, count_ * kBlock, 0.0f);
      const Value* x = packed_;
      for (int64_t i = 0; i < units_; i += kChunk) {
        const int64_t units = std::min(kChunk, units_ - i);
        for (int64_t t = 0; t < num_tiles_; ++t) {
          const RowTile<E>& tile = tiles_[t];
          tile.multiply(w, x + tile.row * kStride, units, sums + tile.row * kBlock,
                        w + kChunkBytes + t * (kChunkBytes / 2));
        }
        w += units * kUnitBytes;
        x += count_ * kStride;
      }
      store(block * kBlock, sums);
    }
  }

 private:
  using Value = typename Unit<E>::Value;
  static constexpr int64_t kColumns = Unit<E>::kColumns;

  // Copies x in the order [chunk][row][unit].
  void pack() {
    thread_local std::vector<Line> buffer;
    const int64_t chunks = (units_ + kChunk - 1) / kChunk;
    const size_t bytes = static_cast<size_t>(chunks * count_ * kStride) * sizeof(Value);
    buffer.resize(std::max(buffer.size(), (bytes + sizeof(Line) - 1) / sizeof(Line)));
    auto* out = reinterpret_cast<Value*>(buffer.data());
    packed_ = out;
    const E* x = static_cast<const E*>(a_.x) + begin_ * a_.x_stride;
    const int64_t whole = a_.k / kColumns;  // the last unit may be a column short
    for (int64_t first = 0; first < units_; first += kChunk)
      for (int64_t m = 0; m < count_; ++m, out += kStride) {
        const E* row = x + m * a_.x_stride + first * kColumns;
        const int64_t units = std::min(kChunk, whole - first);
        for (int64_t i = 0; i < units; ++i) out[i] = Unit<E>::of(row + i * kColumns, kColumns);
        if (units < std::min(kChunk, units_ - first))
          out[units] = Unit<E>::of(row + units * kColumns, 1);
      }
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

  const Linear& a_;
  int64_t begin_, count_, units_, num_tiles_;
  RowTile<E> tiles_[(kMaxRows + kTileRows - 1) / kTileRows];
  const Value* packed_ = nullptr;
};

// What a block of a product costs beside others: of few rows, reading it.
int64_t cost_of_block(const Linear& a) { return std::max(a.rows, kFewRows); }

// y of all rows of each product; all have as many outputs and columns. A thread has blocks that
// follow each other, across products, of its part of what all cost, and takes kMaxRows rows at a
// time.
template <class E>
void run(const Linear* products, int64_t count, int num_threads) {
  if (count == 0) return;
  const int64_t blocks = (products->n + kBlock - 1) / kBlock;
  int64_t rows = 0, cost = 0;
  for (int64_t i = 0; i < count; ++i) {
    rows += products[i].rows;
    cost += blocks * cost_of_block(products[i]);
  }
  const bool is_tiny = rows * products->n * products->k < kSerialWork;
  const int threads = is_tiny ? 1 : num_threads;
  if (Team* team = team_of_pass;
      team != nullptr && threads > 1 && count == 1 && products->rows <= kMaxRows) {
    const Linear& a = *products;
    constexpr int64_t kColumns = Unit<E>::kColumns;
    const int64_t bytes = (a.k + kColumns - 1) / kColumns * kUnitBytes;
    team->share(threads, {static_cast<const char*>(a.w), blocks, bytes},
                [&](const auto& take) {
                  const Rows<E> rows(a, 0, a.rows);
                  for (int64_t begin, end; take(begin, end);) rows.multiply(begin, end);
                });
    return;
  }
  in_parallel(threads, [&](int64_t thread, int64_t of, const auto&) {
    // what is left of the cost until this thread begins, and until it ends
    int64_t first = cost * thread / of, last = cost * (thread + 1) / of;
    for (int64_t i = 0; i < count && last > 0; ++i) {
      const Linear& a = products[i];
      const int64_t each = cost_of_block(a);
      const auto block_at = [&](int64_t left) {
        return std::clamp<int64_t>((left + each - 1) / each, 0, blocks);
      };
      const int64_t begin = block_at(first), end = block_at(last);
      const int64_t parts = (a.rows + kMaxRows - 1) / kMaxRows;
      for (int64_t part = 0; part < parts && begin < end; ++part) {
        const int64_t row = a.rows * part / parts;
        Rows<E>(a, row, a.rows * (part + 1) / parts - row).multiply(begin, end);
      }
      first -= blocks * each;
      last -= blocks * each;
    }
  });
}

}  // namespace

void linear(const Linear* products, int64_t count, int num_threads) {
  if (count > 0 && products->dtype == DType::kFloat32)
    run<float>(products, count, num_threads);
  else
    run<vec::BFloat16>(products, count, num_threads);
}

}  // namespace specc
