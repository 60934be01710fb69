// Sixteen floats that are computed in step, in as many registers as the machine needs for them. So
// sums of a row have the same sixteen parts, and the same bits, with any instruction set. What
// includes this is compiled as it is written (kernels/native.py).
#pragma once

#include <cstdint>
#include <cstring>

#include "exact_math.h"
#include "vec.h"

namespace specc::vec {

constexpr int kLanes = 16;
using Sixteen = Many<kLanes / kWidth>;

inline Sixteen splat16(float x) {
  Sixteen made;
  for (Float& part : made.at) part = splat(x);
  return made;
}
template <class T>
inline Sixteen load16(const T* p) {
  Sixteen made;
  for (int j = 0; j < kLanes / kWidth; ++j) made.at[j] = load(p + j * kWidth);
  return made;
}
// The first `count` of sixteen; zeros for the others.
template <class T>
inline Sixteen load16(const T* p, int64_t count) {
  T part[kLanes] = {};
  std::memcpy(part, p, count * sizeof(T));
  return load16(part);
}

// rounds to nearest, ties to even, as from_float does
inline void store(BFloat16* p, Float x) {
  const UInt bits = reinterpret_cast<UInt>(x);
  const UInt rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const UInt kept = (x == x) ? rounded : UInt{} + 0x7fc0;
  const UShort narrow = __builtin_convertvector(kept, UShort);
  std::memcpy(p, &narrow, sizeof narrow);
}
template <class T>
inline void store16(T* p, const Sixteen& x) {
  for (int j = 0; j < kLanes / kWidth; ++j) store(p + j * kWidth, x.at[j]);
}
template <class T>
inline void store16(T* p, const Sixteen& x, int64_t count) {
  T part[kLanes];
  store16(part, x);
  std::memcpy(p, part, count * sizeof(T));
}

// Sums and maxima of sixteen, in one order.
inline float sum(const Sixteen& x) {
  if constexpr (kWidth == 4)
    return sum((x.at[0] + x.at[2]) + (x.at[1] + x.at[3]));
  else if constexpr (kWidth == 8)
    return sum(x.at[0] + x.at[1]);
  else
    return sum(x.at[0]);
}
inline float max(const Sixteen& x) {
  Float most = x.at[0];
  for (int j = 1; j < kLanes / kWidth; ++j) most = max(most, x.at[j]);
  return max(most);
}

// each(i, count) for every sixteen of n elements: count is 16 but for the last ones.
template <class Each>
inline void by_sixteen(int64_t n, const Each& each) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) each(i, std::integral_constant<int64_t, kLanes>());
  if (i < n) each(i, n - i);
}
template <class T>
inline Sixteen load16(const T* p, std::integral_constant<int64_t, kLanes>) {
  return load16(p);
}
template <class T>
inline void store16(T* p, const Sixteen& x, std::integral_constant<int64_t, kLanes>) {
  store16(p, x);
}

// Sum of term(i, count) over n elements, lanes beyond `count` zero. Four sums of sixteen lanes, so
// that additions need not wait for each other; their order is that of the elements alone.
template <class Term>
inline float sum_of(int64_t n, const Term& term) {
  constexpr int kSums = 4;
  constexpr std::integral_constant<int64_t, kLanes> kAll;
  Sixteen sums[kSums];
  for (Sixteen& part : sums) part = splat16(0);
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) sums[s] = sums[s] + term(i + s * kLanes, kAll);
  int which = 0;
  for (; i + kLanes <= n; i += kLanes, ++which) sums[which] = sums[which] + term(i, kAll);
  if (i < n) {
    float last[kLanes] = {};
    store16(last, term(i, n - i), n - i);
    sums[which] = sums[which] + load16(last);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace specc::vec
