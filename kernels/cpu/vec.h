// One SIMD register of floats, on GCC's vector extensions: the compiler maps it to AVX-512, AVX2,
// SSE or NEON. Only products that are added need intrinsics, and have a fallback without them.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

namespace specc::vec {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Float __attribute__((vector_size(4 * kWidth)));
typedef int32_t Int __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UInt __attribute__((vector_size(4 * kWidth)));
typedef uint16_t UShort __attribute__((vector_size(2 * kWidth)));

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline void from_float(float x, float* y) { *y = x; }
// rounds to nearest, ties to even; NaN stays NaN
inline void from_float(float x, BFloat16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  y->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline Float load(const float* p) {
  Float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Float load(const BFloat16* p) {
  UShort x;
  std::memcpy(&x, p, sizeof x);
  return reinterpret_cast<Float>(__builtin_convertvector(x, UInt) << 16);
}
inline void store(float* p, Float x) { std::memcpy(p, &x, sizeof x); }
inline Float splat(float x) { return x - Float{}; }
// Rounds once wherever the machine can. The compiler must not choose: tuned for a processor with
// slow chains of such instructions, it takes two for some blocks of rows and one for others, and a
// row's bits depend on the rows beside it.
inline void multiply_add(Float& sum, Float a, Float b) {
#if defined(__AVX512F__)
  sum = (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
  sum = (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__FMA__)
  sum = (Float)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)sum);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
  sum = (Float)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  sum += a * b;
#endif
}

// Two neighboring bfloat16 of a row; a multiply_add of pairs adds both products.
struct Pair {
  uint32_t bits;
};
#ifdef __AVX512BF16__
constexpr bool kHasPairs = true;
inline __m512bh load(const Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh splat(Pair x) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(x.bits)); }
inline void multiply_add(Float& sum, __m512bh a, __m512bh b) {
  sum = (Float)_mm512_dpbf16_ps((__m512)sum, a, b);
}
#else
constexpr bool kHasPairs = false;
#endif

// Keeps a loaded value in a register: the compiler would load it again for each of its uses.
template <class V>
inline void keep(V& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#else
  (void)value;
#endif
}

inline Float max(Float a, Float b) {
#if defined(__AVX512F__)
  return (Float)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

template <int... I>
inline Float shuffle(Float a, Float b, std::integer_sequence<int, I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Int{I...});
#endif
}

// Lane i of the result is lane i ^ step of x.
template <int Step, int... I>
inline Float swap_lanes(Float x, std::integer_sequence<int, I...>) {
  return shuffle(x, x, std::integer_sequence<int, (I ^ Step)...>());
}
using Lanes = std::make_integer_sequence<int, kWidth>;

template <int Step = kWidth / 2>
inline float max(Float x) {
  x = max(x, swap_lanes<Step>(x, Lanes()));
  if constexpr (Step > 1) return max<Step / 2>(x);
  return x[0];
}

template <int Step = kWidth / 2>
inline float sum(Float x) {
  x += swap_lanes<Step>(x, Lanes());
  if constexpr (Step > 1) return sum<Step / 2>(x);
  return x[0];
}

// Lane i of x where bit i is set, else of y.
template <int... I>
inline Float select(uint64_t bits, Float x, Float y, std::integer_sequence<int, I...>) {
  const Int lane = {(1 << I)...};
  return (((Int{} + static_cast<int32_t>(bits & 0xffff)) & lane) != 0) ? x : y;
}
inline Float select(uint64_t bits, Float x, Float y) { return select(bits, x, y, Lanes()); }

// 2^x for x <= 0 to 1e-7, exactly 0 below -127; NaN stays NaN.
inline Float exp2_of_nonpositive(Float x) {
  x = max(splat(-127.0f), x);
  const Int n = __builtin_convertvector(x - 0.5f, Int);
  const Float f = x - __builtin_convertvector(n, Float);
  // Chebyshev fit of degree 6 on [-0.5, 0.5]
  Float y = splat(0.0001546973198f);
  y = y * f + 0.001340043217f;
  y = y * f + 0.009618025603f;
  y = y * f + 0.05550327214f;
  y = y * f + 0.2402265121f;
  y = y * f + 0.6931472067f;
  y = y * f + 1.0f;
  return y * reinterpret_cast<Float>((n + 127) << 23);
}

// The steps of a transpose; each is one instruction of AVX-512. `High` takes the upper lanes.
// In each quarter of 4 lanes, lanes of a and b in turn.
template <int High, int... I>
inline Float unpack(Float a, Float b, std::integer_sequence<int, I...>) {
  constexpr int kFirst = 2 * High;
  return shuffle(
      a, b, std::integer_sequence<int, (kFirst + I / 4 * 4 + I % 4 / 2 + I % 2 * kWidth)...>());
}
// In each quarter, two lanes of a, then two of b.
template <int High, int... I>
inline Float unpack_twos(Float a, Float b, std::integer_sequence<int, I...>) {
  constexpr int kFirst = 2 * High;
  return shuffle(
      a, b, std::integer_sequence<int, (kFirst + I / 4 * 4 + I % 2 + I % 4 / 2 * kWidth)...>());
}
// Every other quarter of a, then of b.
template <int High, int... I>
inline Float quarters(Float a, Float b, std::integer_sequence<int, I...>) {
  return shuffle(a, b, std::integer_sequence<int, (I / 4 * 8 + 4 * High + I % 4)...>());
}

// Transposes a square.
inline void transpose(Float (&x)[kWidth]) {
  constexpr Lanes lanes;
#pragma GCC unroll 4
  for (int i = 0; i < kWidth; i += 4) {
    const Float a = unpack<0>(x[i], x[i + 1], lanes), b = unpack<0>(x[i + 2], x[i + 3], lanes);
    const Float c = unpack<1>(x[i], x[i + 1], lanes), d = unpack<1>(x[i + 2], x[i + 3], lanes);
    x[i] = unpack_twos<0>(a, b, lanes);
    x[i + 1] = unpack_twos<1>(a, b, lanes);
    x[i + 2] = unpack_twos<0>(c, d, lanes);
    x[i + 3] = unpack_twos<1>(c, d, lanes);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (kWidth == 16) {
      const Float a = quarters<0>(x[i], x[i + 4], lanes);
      const Float b = quarters<0>(x[i + 8], x[i + 12], lanes);
      const Float c = quarters<1>(x[i], x[i + 4], lanes);
      const Float d = quarters<1>(x[i + 8], x[i + 12], lanes);
      x[i] = quarters<0>(a, b, lanes);
      x[i + 4] = quarters<0>(c, d, lanes);
      x[i + 8] = quarters<1>(a, b, lanes);
      x[i + 12] = quarters<1>(c, d, lanes);
    } else if constexpr (kWidth == 8) {
      const Float a = x[i], b = x[i + 4];
      x[i] = quarters<0>(a, b, lanes);
      x[i + 4] = quarters<1>(a, b, lanes);
    }
  }
}

}  // namespace specc::vec
