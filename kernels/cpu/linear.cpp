// y = x @ w.T + bias for the 1 to about 32 rows of a decoding or verification step, where the time
// is that of reading w once.
//
// Every thread takes a range of w's rows and walks them in tiles of 4 rows by one chunk of columns.
// A tile is multiplied by all rows of x while it is in the first-level cache; meanwhile the tiles
// that come next are asked for, since the hardware prefetcher follows a stream only to the end of
// its 4 KB page. All tiles of a group of kGroup rows take one chunk before any takes the next, so
// that the chunk of x stays close; x is copied into the order in which the tiles read it.
//
// Order of summation: y[m, n] is summed in one vector accumulator along each chunk, the lanes of
// the accumulator in a fixed tree, the chunks from left to right. Neither the number of rows nor
// that of threads enters: a token's projection has the same bits whether it is decoded alone or
// verified among others.

// before any header: the compiler may reorder the sums of each instantiation below differently
#if defined(__clang__)
#pragma clang fp reassociate(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math")
#endif

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace specc {
namespace {

using vec::Float;
using vec::kWidth;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileM = 6;  // 4 x 6 accumulators and 5 operands of 32 registers
#else
constexpr int kTileM = 2;  // 4 x 2 accumulators and 5 operands of 16 registers
#endif
constexpr int kTileN = 4;
constexpr int64_t kGroup = 32;          // rows of w that share a chunk of x
constexpr int64_t kMaxRows = 32;        // rows of x for which w is read once
constexpr int64_t kChunkBytes = 2048;   // of a row of w: 16 rows of x take 32 KB
constexpr int64_t kAheadBytes = 12288;  // covers memory's latency at a thread's bandwidth
constexpr int64_t kSerialWork = 16384;  // products that cost less than waking a second thread

typedef float Quad __attribute__((vector_size(16)));

struct alignas(64) Line {
  char bytes[64];
};

// The inner loop takes kStep columns at a time, an Operand holds them.
template <class E>
struct Traits {
  using Unit = std::conditional_t<std::is_same_v<E, vec::BFloat16> && vec::kHasPairs, vec::Pair, E>;
  using Operand = decltype(vec::load(static_cast<const Unit*>(nullptr)));
  static constexpr int kStep = kWidth * sizeof(Unit) / sizeof(E);
  static Operand load(const E* p) { return vec::load(reinterpret_cast<const Unit*>(p)); }
};

// Keeps a loaded value in a register: the compiler would load it again for each of its uses, and
// loads are what the loop has fewest of.
template <class V>
inline void keep(V& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#else
  (void)value;
#endif
}

// The lanes of a, of b, of c and of d, each summed.
inline Quad sum_lanes(Float a, Float b, Float c, Float d) {
  constexpr vec::Lanes lanes;
  const Float ab = vec::unpack<0>(a, b, lanes) + vec::unpack<1>(a, b, lanes);
  const Float cd = vec::unpack<0>(c, d, lanes) + vec::unpack<1>(c, d, lanes);
  const Float all = vec::unpack_twos<0>(ab, cd, lanes) + vec::unpack_twos<1>(ab, cd, lanes);
  Quad part[kWidth / 4];
  std::memcpy(part, &all, sizeof part);
  for (int width = kWidth / 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}

template <class E>
struct Tile {
  const E* w[kTileN];  // rows of the tile, at its first column
  int64_t steps;       // whole ones
  bool has_tail;
  E tail[kTileN][Traits<E>::kStep];  // the columns behind the steps, then zeros
  const char* ahead[kTileN];         // rows of a later tile
};

// sums[m][n] += x[m, chunk] . w[n, chunk] of `rows` rows of x and the tile's rows of w; asks for
// `ahead` rows of the later tile, from row `first` on.
template <class E, int rows, int ahead>
void multiply_tile(const Tile<E>& tile, const typename Traits<E>::Operand* x, int first,
                   float* sums) {
  const E* w[kTileN];
  std::copy_n(tile.w, kTileN, w);
  const char* later[ahead + 1];
  std::copy_n(tile.ahead + first, ahead, later);

  Float acc[rows][kTileN] = {};
  const auto step = [&](const E* const* row, int64_t column) __attribute__((always_inline)) {
    typename Traits<E>::Operand wv[kTileN];
#pragma GCC unroll 4
    for (int n = 0; n < kTileN; ++n) {
      wv[n] = Traits<E>::load(row[n] + column);
      keep(wv[n]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
      typename Traits<E>::Operand xv = x[m];
      keep(xv);
#pragma GCC unroll 4
      for (int n = 0; n < kTileN; ++n) vec::multiply_add(acc[m][n], wv[n], xv);
    }
    x += rows;
  };
  for (int64_t i = 0; i < tile.steps; ++i) {
    const int64_t column = i * Traits<E>::kStep;
#pragma GCC unroll 4
    for (int n = 0; n < ahead; ++n) __builtin_prefetch(later[n] + column * sizeof(E));
    step(w, column);
  }
  if (tile.has_tail) {
    const E* const tail[kTileN] = {tile.tail[0], tile.tail[1], tile.tail[2], tile.tail[3]};
    step(tail, 0);
  }
#pragma GCC unroll 6
  for (int m = 0; m < rows; ++m) {
    float* sum = sums + m * kGroup;
    Quad total;
    std::memcpy(&total, sum, sizeof total);
    total += sum_lanes(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
    std::memcpy(sum, &total, sizeof total);
  }
}

template <class E>
using MultiplyTile = void (*)(const Tile<E>&, const typename Traits<E>::Operand*, int, float*);

template <class E, int ahead>
MultiplyTile<E> select(int64_t rows) {
  static constexpr MultiplyTile<E> kOfRows[] = {
      multiply_tile<E, 1, ahead>,
      multiply_tile<E, 2, ahead>,
#if defined(__AVX512F__) || defined(__aarch64__)
      multiply_tile<E, 3, ahead>,
      multiply_tile<E, 4, ahead>,
      multiply_tile<E, 5, ahead>,
      multiply_tile<E, 6, ahead>,
#endif
  };
  static_assert(sizeof kOfRows / sizeof kOfRows[0] == kTileM);
  return kOfRows[rows - 1];
}

// A part of x's rows that is multiplied by a tile at once.
template <class E>
struct RowTile {
  int64_t row, rows;
  int first_ahead;  // the tiles of a chunk share the prefetches
  MultiplyTile<E> multiply;
};

template <class E>
class Rows {
 public:
  Rows(const Linear& a, int64_t begin, int64_t count) : a_(a), begin_(begin), count_(count) {
    num_tiles_ = (count + kTileM - 1) / kTileM;
    const int ahead = num_tiles_ == 1 ? 4 : num_tiles_ <= 3 ? 2 : 1;
    for (int64_t i = 0; i < num_tiles_; ++i) {
      RowTile<E>& tile = tiles_[i];
      tile.row = count * i / num_tiles_;
      tile.rows = count * (i + 1) / num_tiles_ - tile.row;
      tile.first_ahead = static_cast<int>(i) * ahead;
      tile.multiply = tile.first_ahead >= kTileN ? select<E, 0>(tile.rows)
                      : ahead == 4               ? select<E, 4>(tile.rows)
                      : ahead == 2               ? select<E, 2>(tile.rows)
                                                 : select<E, 1>(tile.rows);
      tile.first_ahead = std::min(tile.first_ahead, kTileN);
    }
    pack();
  }

  // y[rows, n_begin..n_end)
  void multiply(int64_t n_begin, int64_t n_end) const {
    for (int64_t n = n_begin; n < n_end; n += kGroup) {
      alignas(64) float sums[kMaxRows * kGroup];
      const int64_t columns = std::min(kGroup, n_end - n);
      std::fill_n(sums, count_ * kGroup, 0.0f);
      for (int64_t k = 0; k < a_.k; k += kChunk)
        for (int64_t i = 0; i < columns; i += kTileN) multiply_chunk(n, i, columns, k, sums);
      store(n, columns, sums);
    }
  }

 private:
  using Operand = typename Traits<E>::Operand;
  static constexpr int kStep = Traits<E>::kStep;
  static constexpr int64_t kChunk = kChunkBytes / sizeof(E);

  // Copies x in the order [chunk][row tile][step][row], with zeros behind each row's end.
  void pack() {
    thread_local std::vector<Line> buffer;
    const int64_t steps = (a_.k + kStep - 1) / kStep;
    const size_t bytes = static_cast<size_t>(steps * count_) * sizeof(Operand);
    buffer.resize(std::max(buffer.size(), (bytes + sizeof(Line) - 1) / sizeof(Line)));
    auto* out = reinterpret_cast<Operand*>(buffer.data());
    packed_ = out;
    const E* x = static_cast<const E*>(a_.x) + begin_ * a_.x_stride;
    for (int64_t k = 0; k < a_.k; k += kChunk)
      for (int64_t i = 0; i < num_tiles_; ++i)
        for (int64_t j = k; j < std::min(k + kChunk, a_.k); j += kStep)
          for (int64_t m = tiles_[i].row; m < tiles_[i].row + tiles_[i].rows; ++m)
            *out++ = load_row(x + m * a_.x_stride, j);
  }

  Operand load_row(const E* row, int64_t column) const {
    if (column + kStep <= a_.k) return Traits<E>::load(row + column);
    E padded[kStep] = {};
    std::copy(row + column, row + a_.k, padded);
    return Traits<E>::load(padded);
  }

  // One chunk, from column k on, of the tile at row n + i; the group has `columns` rows of w.
  void multiply_chunk(int64_t n, int64_t i, int64_t columns, int64_t k, float* sums) const {
    const int64_t width = std::min(kChunk, a_.k - k);
    Tile<E> tile;
    tile.steps = width / kStep;
    const int64_t tail = width % kStep;
    tile.has_tail = tail > 0;

    const int64_t tile_bytes = std::min(kChunk, a_.k) * kTileN * int64_t{sizeof(E)};
    int64_t later_n = n + i + std::max<int64_t>(1, kAheadBytes / tile_bytes) * kTileN, later_k = k;
    if (later_n >= n + columns) {  // the next chunk of this group, or the next group
      later_k = k + kChunk < a_.k ? k + kChunk : 0;
      if (later_k > 0) later_n -= columns;
    }
    const E* w = static_cast<const E*>(a_.w);
    for (int r = 0; r < kTileN; ++r) {
      // behind the last row it is repeated; store() drops what that gives
      tile.w[r] = w + std::min(n + i + r, a_.n - 1) * a_.k + k;
      tile.ahead[r] =
          reinterpret_cast<const char*>(w + std::min(later_n + r, a_.n - 1) * a_.k + later_k);
      if (tail > 0) {
        std::fill_n(tile.tail[r], kStep, E{});
        std::copy_n(tile.w[r] + tile.steps * kStep, tail, tile.tail[r]);
      }
    }
    const int64_t steps = tile.steps + tile.has_tail;
    const Operand* x = packed_ + k / kStep * count_;
    for (int64_t t = 0; t < num_tiles_; ++t) {
      const RowTile<E>& rows = tiles_[t];
      rows.multiply(tile, x, rows.first_ahead, sums + rows.row * kGroup + i);
      x += steps * rows.rows;
    }
  }

  void store(int64_t n, int64_t columns, const float* sums) const {
    const E* bias = static_cast<const E*>(a_.bias);
    for (int64_t m = 0; m < count_; ++m) {
      E* y = static_cast<E*>(a_.y) + (begin_ + m) * a_.y_stride + n;
      const float* sum = sums + m * kGroup;
      for (int64_t i = 0; i < columns; ++i)
        vec::from_float(bias == nullptr ? sum[i] : sum[i] + vec::to_float(bias[n + i]), y + i);
    }
  }

  const Linear& a_;
  int64_t begin_, count_;
  int64_t num_tiles_;
  RowTile<E> tiles_[(kMaxRows + kTileM - 1) / kTileM];
  const Operand* packed_ = nullptr;
};

template <class E>
void run(const Linear& a, int num_threads) {
  const int64_t tiles = (a.n + kTileN - 1) / kTileN;
  const int64_t parts = (a.rows + kMaxRows - 1) / kMaxRows;
  const bool is_tiny = a.rows * a.n * a.k < kSerialWork;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && !is_tiny)
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = tiles * thread / threads * kTileN;
    const int64_t end = std::min(tiles * (thread + 1) / threads * kTileN, a.n);
    for (int64_t i = 0; i < parts && begin < end; ++i) {
      const int64_t row = a.rows * i / parts;
      Rows<E>(a, row, a.rows * (i + 1) / parts - row).multiply(begin, end);
    }
  }
}

}  // namespace

void linear(const Linear& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    run<float>(a, num_threads);
  else
    run<vec::BFloat16>(a, num_threads);
}

}  // namespace specc
