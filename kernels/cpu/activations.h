// Activations and what they are made of, to some units in the last place, with the same bits on
// every machine. What includes this is compiled as it is written (kernels/native.py).
#pragma once

#include "exact_math.h"
#include "vec.h"

namespace specc::vec {

inline Float absolute(Float x) {
  return reinterpret_cast<Float>(reinterpret_cast<UInt>(x) & 0x7fffffffu);
}
// |x| with the sign of another number
inline Float with_sign(Float x, Float sign) {
  const UInt bits = reinterpret_cast<UInt>(sign) & 0x80000000u;
  return reinterpret_cast<Float>((reinterpret_cast<UInt>(x) & 0x7fffffffu) | bits);
}

// 1 / (1 + e^-x), without an overflow; NaN stays NaN.
template <int N>
inline Many<N> sigmoid(const Many<N>& x) {
  const Many<N> e = exp_of_nonpositive(each(x, [](Float a) { return -absolute(a); }));
  return each(x, e, [](Float a, Float b) {
    const Float top = a < 0.0f ? b : splat(1.0f);
    return top / (b + 1.0f);
  });
}

template <int N>
inline Many<N> silu(const Many<N>& x) {
  return x * sigmoid(x);
}

// Of small numbers the odd polynomial of Cephes' tanhf, since 1 - e^-2x has few digits there.
template <int N>
inline Many<N> tanh(const Many<N>& x) {
  const Many<N> e = exp_of_nonpositive(each(x, [](Float a) { return absolute(a) * -2.0f; }));
  return each(x, e, [](Float a, Float b) {
    const Float large = with_sign((1.0f - b) / (1.0f + b), a), z = a * a;
    Float small = z * -5.70498872745e-3f + 2.06390887954e-2f;
    small = small * z + -5.37397155531e-2f;
    small = small * z + 1.33314422036e-1f;
    small = small * z + -3.33332819422e-1f;
    small = small * z * a + a;
    return absolute(a) < 0.625f ? small : large;
  });
}

// The approximation that models call gelu with `approximate="tanh"`: (1 + tanh u) / 2 is 1 / (1 +
// e^-2u), which has no difference of near numbers.
template <int N>
inline Many<N> gelu_tanh(const Many<N>& x) {
  const Many<N> u = each(x, [](Float a) {
    return (a + a * a * a * 0.044715f) * (2.0f * 0.79788456080286535588f);
  });
  return x * sigmoid(u);
}

// x · Φ(x). Source: erfc of Numerical Recipes §6.2, to 1.2e-7 of itself.
template <int N>
inline Many<N> gelu(const Many<N>& x) {
  const Many<N> z = each(x, [](Float a) { return absolute(a) * 0.70710678118654752440f; });
  const Many<N> t = each(z, [](Float a) { return 1.0f / (a * 0.5f + 1.0f); });
  Many<N> y = t * 0.17087277f + -0.82215223f;
  y = y * t + 1.48851587f;
  y = y * t + -1.13520398f;
  y = y * t + 0.27886807f;
  y = y * t + -0.18628806f;
  y = y * t + 0.09678418f;
  y = y * t + 0.37409196f;
  y = y * t + 1.00002368f;
  const Many<N> half = t * exp_of_nonpositive(y * t - z * z + -1.26551223f) * 0.5f;
  return each(x, half, [](Float a, Float b) { return a * (a < 0.0f ? b : 1.0f - b); });
}

// NaN stays NaN, as torch has it.
template <int N>
inline Many<N> relu(const Many<N>& x) {
  return each(x, [](Float a) { return a < 0.0f ? Float{} : a; });
}

}  // namespace specc::vec
