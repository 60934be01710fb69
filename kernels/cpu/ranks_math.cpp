// What collectives compute. Rounded as it is written, and in the order of ranks: every rank has the
// same bits, whoever computes them (kernels/native.py, _EXACT_SOURCES).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ranks.h"
#include "vec.h"

namespace specc::ranks {
namespace {

using vec::BFloat16;
using vec::from_float;
using vec::to_float;

#ifdef __aarch64__
using Half = __fp16;  // the other name came to C++ with GCC 13 there
#else
using Half = _Float16;
#endif
float to_float(Half x) { return x; }
void from_float(float x, Half* y) { *y = static_cast<Half>(x); }

constexpr int64_t kBlock = 1024;  // floats: a sum stays in the first-level cache

template <typename T>
void sum(const void* const* parts, int num_parts, int64_t count, T* out) {
  float total[kBlock];
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    const T* part = static_cast<const T*>(parts[0]) + first;
    for (int64_t i = 0; i < size; ++i) total[i] = to_float(part[i]);
    for (int p = 1; p < num_parts; ++p) {
      part = static_cast<const T*>(parts[p]) + first;
      for (int64_t i = 0; i < size; ++i) total[i] += to_float(part[i]);
    }
    for (int64_t i = 0; i < size; ++i) from_float(total[i], out + first + i);
  }
}

// NaN ranks first, as in torch's argmax; -0 and 0 are equal.
bool is_better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

template <typename T>
T item(const char* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

}  // namespace

void sum_in_order(Element element, const void* const* parts, int num_parts, int64_t count,
                  void* out) {
  switch (element) {
    case Element::kFloat32: return sum(parts, num_parts, count, static_cast<float*>(out));
    case Element::kBFloat16: return sum(parts, num_parts, count, static_cast<BFloat16*>(out));
    case Element::kFloat16: return sum(parts, num_parts, count, static_cast<Half*>(out));
    case Element::kOther: break;
  }
  throw std::runtime_error("specc: sums are of float32, bfloat16 and float16");
}

void best_in_order(const char* const* parts, int num_parts, int64_t count, int64_t* tokens) {
  const int64_t first_token = count * static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    float best = item<float>(parts[0], i);
    tokens[i] = item<int64_t>(parts[0] + first_token, i);
    for (int p = 1; p < num_parts; ++p) {
      const float score = item<float>(parts[p], i);
      const int64_t token = item<int64_t>(parts[p] + first_token, i);
      if (is_better(score, best) || (!is_better(best, score) && token < tokens[i])) {
        best = score;
        tokens[i] = token;
      }
    }
  }
}

}  // namespace specc::ranks
