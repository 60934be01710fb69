// specc::act_and_mul and softmax: rows in, rows out, one exponential for each number.
#include <limits>

#include "activations.h"
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

// an exponential takes as long as so many cheap operations
constexpr int64_t kActivationCost = 8;

template <class T, class Act>
void gate_rows(const ActAndMul& a, int num_threads, const Act& act) {
  share_rows(a.rows.count, a.n * kActivationCost, num_threads, [&](int64_t first, int64_t last) {
    RowCursor at(a.rows, first);
    for (int64_t r = first; r < last; ++r, at.next()) {
      const T *gate = static_cast<const T*>(a.gate_up) + at.offset(), *up = gate + a.n;
      T* out = static_cast<T*>(a.out) + r * a.n;
      by_sixteen(a.n, [&](int64_t i, auto count) {
        store16(out + i, act(load16(gate + i, count)) * load16(up + i, count), count);
      });
    }
  });
}

template <class T>
void gate(const ActAndMul& a, int num_threads) {
  switch (a.activation) {
    case Activation::kSilu:
      return gate_rows<T>(a, num_threads, [](const Sixteen& x) { return vec::silu(x); });
    case Activation::kGelu:
      return gate_rows<T>(a, num_threads, [](const Sixteen& x) { return vec::gelu(x); });
    case Activation::kGeluTanh:
      return gate_rows<T>(a, num_threads, [](const Sixteen& x) { return vec::gelu_tanh(x); });
    case Activation::kRelu:
      return gate_rows<T>(a, num_threads, [](const Sixteen& x) { return vec::relu(x); });
  }
}

template <class T>
float largest(const T* x, int64_t n) {
  const float least = -std::numeric_limits<float>::infinity();
  Sixteen most = splat16(least);
  by_sixteen(n, [&](int64_t i, auto count) {
    Sixteen value = load16(x + i, count);
    if (count < vec::kLanes) {
      float part[vec::kLanes];
      for (float& lane : part) lane = least;
      store16(part, value, static_cast<int64_t>(count));
      value = load16(part);
    }
    most = each(most, value, [](vec::Float a, vec::Float b) { return a > b ? a : b; });
  });
  return vec::max(most);
}

template <class T, class O>
void softmax_row(const Softmax& a, const T* x, O* out) {
  const float most = largest(x, a.n);
  // of a row of infinities or NaN there is no distribution, and torch says so, too
  const auto below = [&](int64_t i, auto count) {
    return each(load16(x + i, count), [&](vec::Float v) {
      const vec::Float d = v - most;
      return d > 0.0f ? vec::Float{} : d;  // beside NaN, which no maximum sees
    });
  };
  const float sum = vec::sum_of(
      a.n, [&](int64_t i, auto count) { return vec::exp_of_nonpositive(below(i, count)); });
  if (a.is_log) {
    // 1 or more, or NaN
    const float log_sum = sum == sum ? vec::log_of_probability(vec::splat(sum))[0] : sum;
    by_sixteen(a.n, [&](int64_t i, auto count) {
      store16(out + i, below(i, count) + -log_sum, count);
    });
    return;
  }
  by_sixteen(a.n, [&](int64_t i, auto count) {
    const Sixteen e = vec::exp_of_nonpositive(below(i, count));
    store16(out + i, each(e, [&](vec::Float v) { return v / sum; }), count);
  });
}

template <class T, class O>
void softmax_rows(const Softmax& a, int num_threads) {
  share_rows(a.rows.count, a.n * kActivationCost, num_threads, [&](int64_t first, int64_t last) {
    RowCursor at(a.rows, first);
    for (int64_t r = first; r < last; ++r, at.next())
      softmax_row(a, static_cast<const T*>(a.x) + at.offset(), static_cast<O*>(a.out) + r * a.n);
  });
}

}  // namespace

void act_and_mul(const ActAndMul& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    gate<float>(a, num_threads);
  else
    gate<BFloat16>(a, num_threads);
}

void softmax(const Softmax& a, int num_threads) {
  const bool is_wide = a.out_dtype == DType::kFloat32;
  if (a.dtype == DType::kFloat32)
    return is_wide ? softmax_rows<float, float>(a, num_threads)
                   : softmax_rows<float, BFloat16>(a, num_threads);
  return is_wide ? softmax_rows<BFloat16, float>(a, num_threads)
                 : softmax_rows<BFloat16, BFloat16>(a, num_threads);
}

}  // namespace specc
