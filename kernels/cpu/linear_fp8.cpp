// y = x @ w.T + bias of a weight in e4m3, for the 1 to about 32 rows of a decoding or verification
// step, where the time is that of reading w once.
//
// As integers, values of e4m3 have 18 bits: two instructions of words for each of two parts of a
// row, and sums beyond 32 bits. Floats take one. So the order of sums is fixed instead, that of the
// columns (kernels/reference/quantized.py), with one rounding a step: fused multiply-adds, which
// round alike everywhere. A token's projection has the same bits alone or among others, on any
// number of threads, on any processor.
//
// The lanes of a register are outputs. v / 256 is what conversions from half precision make of the
// bits of e4m3, subnormal ones too: half precision has one more bit of exponent, and 8 more of bias.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"
#include "linear_q_blocks.h"
#include "vec.h"

#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace specc {
namespace {

using namespace quantized;

constexpr int64_t kUnitBytes = 2 * kBlock;  // two columns of 32 outputs

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct Path {
  static constexpr int kLanes = 16;
  static constexpr int kAtOnce = 2;    // registers of outputs
  static constexpr int kTileRows = 8;  // 16 sums and 4 registers of weights
  using Float = __m512;

  // of kLanes outputs columns 0 and 1 of a unit
  static void load_pair(const uint8_t* w, Float* even, Float* odd) {
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    *even = to_float(_mm256_slli_epi16(pair, 8));
    *odd = to_float(pair);
  }
  static Float splat(float x) { return _mm512_set1_ps(x); }
  static Float load(const void* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static void multiply_add(Float& sum, float x, Float w) {
    sum = _mm512_fmadd_ps(_mm512_set1_ps(x), w, sum);
  }

 private:
  // of the high byte of each word
  static Float to_float(__m256i words) {
    const __m256i kept = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(words, 1), kept));
  }
};

#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)

struct Path {
  static constexpr int kLanes = 8;
  static constexpr int kAtOnce = 2;
  static constexpr int kTileRows = 4;
  using Float = __m256;

  static void load_pair(const uint8_t* w, Float* even, Float* odd) {
    const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
    *even = to_float(_mm_slli_epi16(pair, 8));
    *odd = to_float(pair);
  }
  static Float splat(float x) { return _mm256_set1_ps(x); }
  static Float load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static void multiply_add(Float& sum, float x, Float w) {
    sum = _mm256_fmadd_ps(_mm256_set1_ps(x), w, sum);
  }

 private:
  static Float to_float(__m128i words) {
    const __m128i kept = _mm_set1_epi16(static_cast<int16_t>(0xbf80));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(words, 1), kept));
  }
};

#else

// v / 256 of each byte
struct Table {
  float value[256];

  Table() {
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, fraction = i & 7;
      const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -17)
                                       : std::ldexp(static_cast<float>(8 + fraction), exponent - 18);
      value[i] = i >> 7 ? -size : size;
    }
  }
};
const Table kTable;

// Without instructions for it, fmaf computes what they do.
struct Path {
  static constexpr int kLanes = vec::kWidth;
  static constexpr int kAtOnce = 1;
  static constexpr int kTileRows = 2;
  using Float = vec::Float;

  static void load_pair(const uint8_t* w, Float* even, Float* odd) {
    for (int i = 0; i < kLanes; ++i) {
      (*even)[i] = kTable.value[w[2 * i]];
      (*odd)[i] = kTable.value[w[2 * i + 1]];
    }
  }
  static Float splat(float x) { return vec::splat(x); }
  static Float load(const void* p) { return vec::load(static_cast<const float*>(p)); }
  static void store(float* p, Float x) { vec::store(p, x); }
  static void multiply_add(Float& sum, float x, Float w) {
    for (int i = 0; i < kLanes; ++i) sum[i] = std::fma(x, w[i], sum[i]);
  }
};

#endif

// sums[m][0..32) += x[m, group] . w[group] for `rows` rows of x.
template <bool ahead, int rows>
void multiply_group(const uint8_t* w, const uint8_t* scales, int64_t units, const float* x,
                    float* sums) {
  using P = Path;
  for (int first = 0; first < kBlock / P::kLanes; first += P::kAtOnce) {
    typename P::Float acc[rows][P::kAtOnce];
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < P::kAtOnce; ++v) acc[m][v] = P::splat(0.0f);
    const uint8_t* unit = w + first * P::kLanes * 2;
    const float* pair = x;
    for (int64_t i = 0; i < units; ++i, unit += kUnitBytes, pair += 2) {
      if constexpr (ahead)
        if (first == 0) __builtin_prefetch(unit + kAheadBytes);
      typename P::Float even[P::kAtOnce], odd[P::kAtOnce];
#pragma GCC unroll 2
      for (int v = 0; v < P::kAtOnce; ++v)
        P::load_pair(unit + v * P::kLanes * 2, &even[v], &odd[v]);
#pragma GCC unroll 8
      for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < P::kAtOnce; ++v) {
          P::multiply_add(acc[m][v], pair[m * kChunk], even[v]);
          P::multiply_add(acc[m][v], pair[m * kChunk + 1], odd[v]);
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < P::kAtOnce; ++v) {
      const auto scale = P::load(scales + (first + v) * P::kLanes * 4) * P::splat(256.0f);
#pragma GCC unroll 8
      for (int m = 0; m < rows; ++m) {
        float* sum = sums + m * kBlock + (first + v) * P::kLanes;
        P::store(sum, P::load(sum) + acc[m][v] * scale);
      }
    }
  }
}

using MultiplyGroup = void (*)(const uint8_t*, const uint8_t*, int64_t, const float*, float*);

template <bool ahead, int... less_one>
MultiplyGroup select(int64_t rows, std::integer_sequence<int, less_one...>) {
  static constexpr MultiplyGroup kOfRows[] = {multiply_group<ahead, less_one + 1>...};
  return kOfRows[rows - 1];
}

// A part of x's rows that is multiplied with a chunk at once; the first one reads ahead.
struct RowTile {
  int64_t row;
  MultiplyGroup multiply;
};

template <class E>
class Rows {
 public:
  Rows(const LinearQ& a, int64_t begin, int64_t count)
      : a_(a), layout_(a), begin_(begin), count_(count), chunks_(parts_of(a.k, kChunk)) {
    constexpr auto heights = std::make_integer_sequence<int, Path::kTileRows>();
    num_tiles_ = parts_of(count, Path::kTileRows);
    for (int64_t i = 0; i < num_tiles_; ++i) {
      const int64_t row = count * i / num_tiles_, rows = count * (i + 1) / num_tiles_ - row;
      tiles_[i] = {row, i == 0 ? select<true>(rows, heights) : select<false>(rows, heights)};
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
        const uint8_t* const start = w;
        for (int64_t t = 0; t < num_tiles_; ++t) {
          const RowTile& tile = tiles_[t];
          const float* x = packed_ + (chunk * count_ + tile.row) * kChunk;
          w = start;
          for (int64_t column = chunk * kChunk; column < std::min(a_.k, (chunk + 1) * kChunk);
               column += layout_.group, x += layout_.group) {
            const int64_t columns = std::min(layout_.group, a_.k - column);
            const int64_t units = parts_of(columns, layout_.columns_of_unit);
            if (layout_.group_header > 0) scales = w;
            w += layout_.group_header;
            tile.multiply(w, scales, units, x, sums + tile.row * kBlock);
            w += units * kUnitBytes;
          }
        }
      }
      store(block * kBlock, sums);
    }
  }

 private:
  // Copies x as float32 in the order [chunk][row][column]; beyond K, where a unit of the weight has
  // a column, too, values are 0.
  void pack() {
    thread_local std::vector<float> buffer;
    const size_t size = static_cast<size_t>(chunks_ * count_ * kChunk);
    buffer.resize(std::max(buffer.size(), size));
    float* packed = buffer.data();
    packed_ = packed;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk)
      for (int64_t m = 0; m < count_; ++m, packed += kChunk) {
        const int64_t first = chunk * kChunk, columns = std::min(kChunk, a_.k - first);
        const E* x = static_cast<const E*>(a_.x) + (begin_ + m) * a_.x_stride + first;
        for (int64_t i = 0; i < columns; ++i) packed[i] = vec::to_float(x[i]);
        std::fill(packed + columns, packed + kChunk, 0.0f);
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

  const LinearQ& a_;
  Layout layout_;
  int64_t begin_, count_, chunks_, num_tiles_;
  RowTile tiles_[kMaxRows];
  const float* packed_ = nullptr;
};

}  // namespace

void linear_fp8(const LinearQ* products, int64_t count, int num_threads) {
  if (products->dtype == DType::kFloat32)
    quantized::run<Rows<float>>(products, count, num_threads);
  else
    quantized::run<Rows<vec::BFloat16>>(products, count, num_threads);
}

}  // namespace specc
