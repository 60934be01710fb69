// The best tokens of a row, in the order of torch's argmax: NaN ranks first and -inf last, and
// ties go to the lower token.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "vec.h"

#ifdef __SSE__
#include <immintrin.h>
#endif

namespace specc {

// Bit i is set where lane i of a comparison's result is.
inline uint32_t lanes_of(const vec::Int& mask) {
#if defined(__AVX512F__)
  // by hand: where registers run out, gcc 12 stores a widened mask in 2 bytes and reads 4
  const __mmask16 bits = _mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512());
  uint32_t lanes;
  __asm__("kmovw %1, %0" : "=r"(lanes) : "k"(bits));
  return lanes;
#elif defined(__AVX__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)mask));
#else
  uint32_t found = 0;
  for (int i = 0; i < vec::kWidth; ++i) found |= (mask[i] & 1u) << i;
  return found;
#endif
}

struct Best {
  float value;
  int64_t token;
};

inline bool is_better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The k best of a row, by descending value, then by ascending token.
template <typename T>
void best_of_row(const T* row, int64_t vocab, int64_t k, Best* best) {
  int64_t count = 0;
  auto offer = [&](int64_t token) {
    const float value = vec::to_float(row[token]);
    if (count == k && !is_better(value, best[k - 1].value)) return;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && is_better(value, best[at - 1].value); --at) best[at] = best[at - 1];
    best[at] = {value, token};
  };
  int64_t token = 0;
  for (; token < vocab && count < k; ++token) offer(token);
  // a block in which nothing beats the last of the best is passed over at once
  constexpr int kRegisters = 4;
  for (; token + kRegisters * vec::kWidth <= vocab; token += kRegisters * vec::kWidth) {
    const vec::Float bound = vec::splat(best[k - 1].value);
    vec::Int is_above[kRegisters], any{};
    for (int j = 0; j < kRegisters; ++j) {
      const vec::Float values = vec::load(row + token + j * vec::kWidth);
      any |= is_above[j] = (values > bound) | (values != values);
    }
    if (!lanes_of(any)) continue;
    for (int j = 0; j < kRegisters; ++j)
      for (uint32_t lanes = lanes_of(is_above[j]); lanes; lanes &= lanes - 1)
        offer(token + j * vec::kWidth + __builtin_ctz(lanes));
  }
  for (; token < vocab; ++token) offer(token);
}

inline void best_of_row(DType dtype, const void* row, int64_t vocab, int64_t k, Best* best) {
  dtype == DType::kFloat32
      ? best_of_row(static_cast<const float*>(row), vocab, k, best)
      : best_of_row(static_cast<const vec::BFloat16*>(row), vocab, k, best);
}

}  // namespace specc
