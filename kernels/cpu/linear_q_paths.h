// Products of integers with different instructions, for linear_q.cpp: each path has the same sums,
// of which kernels/reference/quantized.py says what they are. The widest that the compiler may use
// is `Path`.
//
// A path multiplies quads: 4 neighboring columns of kLanes outputs, a byte each, with the 4 integers
// of a row. Rows of 8 and 16 bits have one sum of them, `high`. A 24-bit integer is 256 · high +
// low, low = -128 ... 127, and has two. Sums wrap around; what they end at fits 32 bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace specc::quantized {

// high and low parts of the 4 integers of a quad
template <int bits>
struct Parts {
  int32_t high[4], low[4];

  explicit Parts(const int32_t* x) {
    for (int i = 0; i < 4; ++i) {
      low[i] = bits == 24 ? ((x[i] + 128) & 255) - 128 : 0;
      high[i] = bits == 24 ? (x[i] - low[i]) >> 8 : x[i];
    }
  }
};

// 12 + 2 v of the codes of e2m1, which are no less than 0
alignas(16) constexpr uint8_t kTwiceE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                12, 11, 10, 9,  8,  6,  4,  0};

// 127 + v of the codes of iq4_nl and iq4_xs
alignas(16) constexpr uint8_t kIq4Levels[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                128, 140, 152, 165, 180, 196, 216, 240};

inline int32_t bytes_of(const int32_t* x) {
  uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) packed |= (static_cast<uint32_t>(x[i]) & 255) << (8 * i);
  return static_cast<int32_t>(packed);
}

inline int32_t words_of(int32_t first, int32_t second) {
  return static_cast<int32_t>((static_cast<uint32_t>(first) & 0xffff) |
                              static_cast<uint32_t>(second) << 16);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// vpdpbusd: 4 unsigned bytes of the weight by 4 signed ones of a row. high is one or two of its own
// bytes.
template <int bits>
struct VnniPath {
  static constexpr int kLanes = 16;
  static constexpr int kAtOnce = 2;                     // registers of outputs
  // measured: with more, sums are spilled
  static constexpr int kTileRows = bits == 8 ? 6 : bits == 16 ? 4 : 2;
  static constexpr int kInts = bits / 8;                // of a row's quad
  using Int = __m512i;
  using Float = __m512;
  using Columns = __m512i;

  struct Sums {
    Int part[kInts];
  };

  static void write(const int32_t* x, int32_t* out) {
    const Parts<bits> parts(x);
    if constexpr (bits == 8) {
      out[0] = bytes_of(parts.high);
      return;
    }
    int32_t first[4], second[4];
    for (int i = 0; i < 4; ++i) {
      second[i] = ((parts.high[i] + 128) & 255) - 128;
      first[i] = (parts.high[i] - second[i]) >> 8;
    }
    out[0] = bytes_of(first);
    out[1] = bytes_of(second);
    if constexpr (bits == 24) out[2] = bytes_of(parts.low);
  }

  static void start(Sums& sums, Int high, Int low) {
    if constexpr (bits > 8) sums.part[0] = _mm512_setzero_si512();
    sums.part[bits > 8] = high;
    if constexpr (bits == 24) sums.part[2] = low;
  }
  static Int load(const uint8_t* w) { return _mm512_loadu_si512(w); }
  static Columns columns(Int bytes) { return bytes; }
  static Int low_nibbles(Int bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static Int high_nibbles(Int bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }
  static Int look_up(const uint8_t* levels, Int codes) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(levels));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
  }
  static void multiply(Sums& sums, Columns w, const int32_t* x) {
    for (int p = 0; p < kInts; ++p)
      sums.part[p] = _mm512_dpbusd_epi32(sums.part[p], w, _mm512_set1_epi32(x[p]));
  }
  static Int high(const Sums& sums) {
    if constexpr (bits == 8) return sums.part[0];
    return _mm512_add_epi32(_mm512_slli_epi32(sums.part[0], 8), sums.part[1]);
  }
  static Int low(const Sums& sums) { return sums.part[kInts - 1]; }

  static Int splat(int32_t x) { return _mm512_set1_epi32(x); }
  static Int multiply(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static Int load_zeros(const uint8_t* p) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Float load_exponents(const uint8_t* p) {
    const Int bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bytes, 23));
  }
  // of codes without sign, whose bits half precision has, 8 powers of two below
  static Float load_e4m3(const uint8_t* p) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(words, 7)), splat(256.0f));
  }
  static Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  static Float splat(float x) { return _mm512_set1_ps(x); }
  static Float load_floats(const void* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
};
template <int bits>
using Path = VnniPath<bits>;

#elif defined(__AVX2__)

// vpmaddwd: words of columns 0 and 2, then of 1 and 3, by those of a row. Words of 16 bits need no
// bytes, so that high is one sum; vpmaddubsw would saturate at 255 · 127 · 2.
template <int bits>
struct WordsPath {
  static constexpr int kLanes = 8;
  static constexpr int kAtOnce = 1;
  static constexpr int kTileRows = bits == 24 ? 4 : 6;
  static constexpr int kSums = bits == 24 ? 2 : 1;
  static constexpr int kInts = 2 * kSums;
  using Int = __m256i;
  using Float = __m256;

  struct Columns {
    Int even, odd;
  };
  struct Sums {
    Int part[kSums];
  };

  static void write(const int32_t* x, int32_t* out) {
    const Parts<bits> parts(x);
    out[0] = words_of(parts.high[0], parts.high[2]);
    out[1] = words_of(parts.high[1], parts.high[3]);
    if constexpr (bits == 24) {
      out[2] = words_of(parts.low[0], parts.low[2]);
      out[3] = words_of(parts.low[1], parts.low[3]);
    }
  }

  static void start(Sums& sums, Int high, Int low) {
    sums.part[0] = high;
    if constexpr (bits == 24) sums.part[1] = low;
  }
  static Int load(const uint8_t* w) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  }
  static Columns columns(Int bytes) {
    return {_mm256_and_si256(bytes, _mm256_set1_epi16(255)), _mm256_srli_epi16(bytes, 8)};
  }
  static Int low_nibbles(Int bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static Int high_nibbles(Int bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }
  static Int look_up(const uint8_t* levels, Int codes) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(levels));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
  }
  static void multiply(Sums& sums, Columns w, const int32_t* x) {
    for (int p = 0; p < kSums; ++p) {
      const Int even = _mm256_madd_epi16(w.even, _mm256_set1_epi32(x[2 * p]));
      const Int odd = _mm256_madd_epi16(w.odd, _mm256_set1_epi32(x[2 * p + 1]));
      sums.part[p] = _mm256_add_epi32(sums.part[p], _mm256_add_epi32(even, odd));
    }
  }
  static Int high(const Sums& sums) { return sums.part[0]; }
  static Int low(const Sums& sums) { return sums.part[kSums - 1]; }

  static Int splat(int32_t x) { return _mm256_set1_epi32(x); }
  static Int multiply(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
  static Int load_zeros(const uint8_t* p) {
    return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Float load_exponents(const uint8_t* p) {
    const Int bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bytes, 23));
  }
  // of codes without sign; the first 8 are subnormal
  static Float load_e4m3(const uint8_t* p) {
    const Int codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const Int normal = _mm256_add_epi32(_mm256_slli_epi32(codes, 20), splat(120 << 23));
    const Float small = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), splat(0x1p-9f));
    const Int is_small = _mm256_cmpgt_epi32(splat(8), codes);
    return _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(is_small));
  }
  static Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
  static Float splat(float x) { return _mm256_set1_ps(x); }
  static Float load_floats(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
};
template <int bits>
using Path = WordsPath<bits>;

#else

// What every compiler makes of vectors: columns are widened to 32 bits.
template <int bits>
struct PortablePath {
  static constexpr int kLanes = vec::kWidth;
  static constexpr int kAtOnce = 1;
  static constexpr int kTileRows = 2;
  static constexpr int kSums = bits == 24 ? 2 : 1;
  static constexpr int kInts = 4 * kSums;
  using Int = vec::UInt;  // signed sums would be undefined where they wrap around
  using Float = vec::Float;

  struct Columns {
    Int column[4];
  };
  struct Sums {
    Int part[kSums];
  };

  static void write(const int32_t* x, int32_t* out) {
    const Parts<bits> parts(x);
    for (int i = 0; i < 4; ++i) {
      out[i] = parts.high[i];
      if constexpr (bits == 24) out[4 + i] = parts.low[i];
    }
  }

  static void start(Sums& sums, Int high, Int low) {
    sums.part[0] = high;
    if constexpr (bits == 24) sums.part[1] = low;
  }
  static Int load(const uint8_t* w) {
    Int bytes;
    std::memcpy(&bytes, w, sizeof bytes);
    return bytes;
  }
  static Columns columns(Int bytes) {
    return {{bytes & 255, bytes >> 8 & 255, bytes >> 16 & 255, bytes >> 24}};
  }
  static Int low_nibbles(Int bytes) { return bytes & 0x0f0f0f0f; }
  static Int high_nibbles(Int bytes) { return bytes >> 4 & 0x0f0f0f0f; }
  static Int look_up(const uint8_t* levels, Int codes) {
    uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof codes);
    for (uint8_t& byte : bytes) byte = levels[byte];
    std::memcpy(&codes, bytes, sizeof codes);
    return codes;
  }
  static void multiply(Sums& sums, const Columns& w, const int32_t* x) {
    for (int p = 0; p < kSums; ++p)
      for (int i = 0; i < 4; ++i) sums.part[p] += w.column[i] * static_cast<uint32_t>(x[4 * p + i]);
  }
  static Int high(const Sums& sums) { return sums.part[0]; }
  static Int low(const Sums& sums) { return sums.part[kSums - 1]; }

  static Int splat(int32_t x) { return Int{} + static_cast<uint32_t>(x); }
  static Int multiply(Int a, Int b) { return a * b; }
  static Int load_zeros(const uint8_t* p) {
    Int zeros;
    for (int i = 0; i < kLanes; ++i) {
      int16_t zero;
      std::memcpy(&zero, p + 2 * i, sizeof zero);
      zeros[i] = static_cast<uint32_t>(int32_t{zero});
    }
    return zeros;
  }
  static Float load_exponents(const uint8_t* p) {
    Int exponents;
    for (int i = 0; i < kLanes; ++i) exponents[i] = static_cast<uint32_t>(p[i]) << 23;
    return reinterpret_cast<Float>(exponents);
  }
  // of codes without sign; the first 8 are subnormal
  static Float load_e4m3(const uint8_t* p) {
    Int codes;
    for (int i = 0; i < kLanes; ++i) codes[i] = p[i];
    const Float small = to_float(codes) * 0x1p-9f;
    return codes < 8 ? small : reinterpret_cast<Float>((codes << 20) + (120u << 23));
  }
  static Float to_float(Int x) {
    return __builtin_convertvector(reinterpret_cast<vec::Int>(x), Float);
  }
  static Float splat(float x) { return vec::splat(x); }
  static Float load_floats(const void* p) { return vec::load(static_cast<const float*>(p)); }
  static void store(float* p, Float x) { vec::store(p, x); }
};
template <int bits>
using Path = PortablePath<bits>;

#endif

}  // namespace specc::quantized
