// Norms of rows: root mean square, with a residual addition before it or without, and layer norm.
#include <cmath>
#include <vector>

#include "fused.h"
#include "lanes.h"

namespace specc {
namespace {

using vec::BFloat16;
using vec::by_sixteen;
using vec::load16;
using vec::Sixteen;
using vec::splat16;
using vec::store16;

// What a row's numbers are multiplied by (or what is added to them), as floats.
template <class T>
void widen(const void* from, int64_t n, float offset, std::vector<float>& to) {
  to.resize(n);
  const T* values = static_cast<const T*>(from);
  by_sixteen(n, [&](int64_t i, auto count) {
    store16(to.data() + i, load16(values + i, count) + offset, count);
  });
}
const float* widened(const void* from, DType dtype, int64_t n, bool unit_offset,
                     std::vector<float>& memory) {
  if (from == nullptr) return nullptr;
  if (dtype == DType::kFloat32 && !unit_offset) return static_cast<const float*>(from);
  const float offset = unit_offset ? 1.0f : 0.0f;
  if (dtype == DType::kFloat32)
    widen<float>(from, n, offset, memory);
  else
    widen<BFloat16>(from, n, offset, memory);
  return memory.data();
}

template <class T>
void add(const T* x, const T* y, int64_t n, T* to) {
  by_sixteen(n, [&](int64_t i, auto count) {
    store16(to + i, load16(x + i, count) + load16(y + i, count), count);
  });
}

// x · scale · weight + bias; either may be absent.
template <class T>
void scaled(const T* x, int64_t n, float center, float scale, const float* weight,
            const float* bias, T* to) {
  by_sixteen(n, [&](int64_t i, auto count) {
    Sixteen y = (load16(x + i, count) + -center) * scale;
    if (weight != nullptr) y = y * load16(weight + i, count);
    if (bias != nullptr) y = y + load16(bias + i, count);
    store16(to + i, y, count);
  });
}

template <class T>
void rms_row(const T* x, const Norm& a, const float* weight, T* out) {
  const float sum = vec::sum_of(a.n, [&](int64_t i, auto count) {
    const Sixteen value = load16(x + i, count);
    return value * value;
  });
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(a.n) + a.eps);
  scaled(x, a.n, 0, scale, weight, nullptr, out);
}

template <class T>
void layer_row(const T* x, const Norm& a, const float* weight, const float* bias, T* out) {
  const auto n = static_cast<float>(a.n);
  const float mean = vec::sum_of(a.n, [&](int64_t i, auto count) { return load16(x + i, count); }) / n;
  const float sum = vec::sum_of(a.n, [&](int64_t i, auto count) {
    const Sixteen value = load16(x + i, count) + -mean;
    return value * value;
  });
  scaled(x, a.n, mean, 1.0f / std::sqrt(sum / n + a.eps), weight, bias, out);
}

template <class T, class Row>
void norm_rows(const Norm& a, int num_threads, const Row& row) {
  const T* x = static_cast<const T*>(a.x);
  const T* residual = static_cast<const T*>(a.residual);
  T *out = static_cast<T*>(a.out), *total = static_cast<T*>(a.total);
  share_rows(a.rows.count, a.n, num_threads, [&](int64_t first, int64_t last) {
    RowCursor at(a.rows, first), beside(a.residual_rows, residual == nullptr ? 0 : first);
    for (int64_t r = first; r < last; ++r, at.next()) {
      const T* from = x + at.offset();
      if (residual != nullptr) {
        add(from, residual + beside.offset(), a.n, total + r * a.n);
        from = total + r * a.n;
        beside.next();
      }
      row(from, out + r * a.n);
    }
  });
}

template <class T>
void norm(const Norm& a, int num_threads, bool is_layer) {
  static thread_local std::vector<float> of_weight, of_bias;
  const float* weight = widened(a.weight, a.weight_dtype, a.n, a.unit_offset, of_weight);
  const float* bias = widened(a.bias, a.weight_dtype, a.n, false, of_bias);
  if (is_layer)
    norm_rows<T>(a, num_threads,
                 [&](const T* x, T* out) { layer_row(x, a, weight, bias, out); });
  else
    norm_rows<T>(a, num_threads, [&](const T* x, T* out) { rms_row(x, a, weight, out); });
}

void norm_of_dtype(const Norm& a, int num_threads, bool is_layer) {
  if (a.dtype == DType::kFloat32)
    norm<float>(a, num_threads, is_layer);
  else
    norm<BFloat16>(a, num_threads, is_layer);
}

}  // namespace

void rms_norm(const Norm& a, int num_threads) { norm_of_dtype(a, num_threads, false); }
void layer_norm(const Norm& a, int num_threads) { norm_of_dtype(a, num_threads, true); }

}  // namespace specc
