// Logarithms and exponentials in additions and multiplications, one register at a time. What
// includes this is compiled as it is written (kernels/native.py): nothing is fused or reordered, so
// that every machine rounds like the oracle.
#pragma once

#include <cstdint>
#include <limits>

#include "vec.h"

namespace specc::vec {

// bits of sqrt(1/2), and how far they lie below those of 1
constexpr int32_t kSqrtHalf = 0x3F3504F3;
constexpr int32_t kSqrtHalfToOne = 0x3F800000 - kSqrtHalf;
// log(2) in two parts, the first with few bits: its multiples are exact
constexpr float kLogTwoHigh = 0.693359375f, kLogTwoLow = -2.12194440e-4f;

// Registers that are computed in step: the next operation of one hides the latency of the others.
template <int N>
struct Many {
  Float at[N];
};

template <int N, class F>
inline Many<N> each(const Many<N>& x, const Many<N>& y, F&& function) {
  Many<N> result;
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) result.at[j] = function(x.at[j], y.at[j]);
  return result;
}
template <int N, class F>
inline Many<N> each(const Many<N>& x, F&& function) {
  return each(x, x, [&](Float a, Float) { return function(a); });
}
template <int N>
inline Many<N> operator+(const Many<N>& x, const Many<N>& y) {
  return each(x, y, [](Float a, Float b) { return a + b; });
}
template <int N>
inline Many<N> operator-(const Many<N>& x, const Many<N>& y) {
  return each(x, y, [](Float a, Float b) { return a - b; });
}
template <int N>
inline Many<N> operator*(const Many<N>& x, const Many<N>& y) {
  return each(x, y, [](Float a, Float b) { return a * b; });
}
template <int N>
inline Many<N> operator-(const Many<N>& x) {
  return each(x, [](Float a) { return -a; });
}
template <int N>
inline Many<N> operator+(const Many<N>& x, float y) {
  return each(x, [y](Float a) { return a + y; });
}
template <int N>
inline Many<N> operator*(const Many<N>& x, float y) {
  return each(x, [y](Float a) { return a * y; });
}

// x = (1 + fraction) * 2^exponent with sqrt(1/2) <= 1 + fraction < sqrt(2); x is a normal number.
template <int N>
inline void split(const Many<N>& x, Many<N>& fraction, Many<N>& exponent) {
  // of NaN, whose bits are the highest, there is a sum, too: whatever it is
  auto shifted = [](Float a) {
    return reinterpret_cast<Int>(reinterpret_cast<UInt>(a) + uint32_t{kSqrtHalfToOne});
  };
  fraction = each(x, [&](Float a) {
    return reinterpret_cast<Float>((shifted(a) & 0x7FFFFF) + kSqrtHalf) - 1.0f;
  });
  exponent = each(
      x, [&](Float a) { return __builtin_convertvector((shifted(a) >> 23) - 127, Float); });
}

// Source: logf of Cephes, as in kernels/reference/sampling.py.
template <int N>
inline Many<N> log_of_split(const Many<N>& fraction, const Many<N>& exponent) {
  Many<N> value = fraction * 7.0376836292e-2f + -1.1514610310e-1f;
  value = value * fraction + 1.1676998740e-1f;
  value = value * fraction + -1.2420140846e-1f;
  value = value * fraction + 1.4249322787e-1f;
  value = value * fraction + -1.6668057665e-1f;
  value = value * fraction + 2.0000714765e-1f;
  value = value * fraction + -2.4999993993e-1f;
  value = value * fraction + 3.3333331174e-1f;
  const Many<N> square = fraction * fraction;
  value = value * fraction * square + exponent * kLogTwoLow - square * 0.5f;
  return fraction + value + exponent * kLogTwoHigh;
}

// -inf for 0 and for subnormal numbers.
inline Float log_of_probability(Float x) {
  Many<1> fraction, exponent;
  split(Many<1>{{x}}, fraction, exponent);
  const Float value = log_of_split(fraction, exponent).at[0];
  return x < std::numeric_limits<float>::min() ? splat(-std::numeric_limits<float>::infinity())
                                               : value;
}

// below it, exp is 0
constexpr float kLeastExponent = -104.0f;

// e^x for x <= 0 to one unit in the last place, subnormal results included; NaN stays NaN.
// Source: expf of Cephes.
template <int N>
inline Many<N> exp_of_nonpositive(const Many<N>& x) {
  const Many<N> bounded =
      each(x, [](Float a) { return a < kLeastExponent ? splat(kLeastExponent) : a; });
  // rounded to integers
  const Many<N> n = each(bounded, [](Float a) {
    return __builtin_convertvector(
        __builtin_convertvector(a * 1.44269504088896341f - 0.5f, Int), Float);
  });
  const Many<N> f = bounded - n * kLogTwoHigh - n * kLogTwoLow;
  Many<N> y = f * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * (f * f) + f + 1.0f;
  // in two steps, so that only the last one rounds where the result is subnormal
  y = each(y, n, [](Float a, Float b) {
    const Int whole = __builtin_convertvector(b, Int), half = whole >> 1;
    a = a * reinterpret_cast<Float>((half + 127) << 23);
    return a * reinterpret_cast<Float>((whole - half + 127) << 23);
  });
  return each(x, y, [](Float a, Float b) { return a < kLeastExponent ? Float{} : b; });
}
inline Float exp_of_nonpositive(Float x) { return exp_of_nonpositive(Many<1>{{x}}).at[0]; }

}  // namespace specc::vec
