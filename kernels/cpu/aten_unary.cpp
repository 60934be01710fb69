// aten's operators of one number at a time. Each is computed in float32 and rounded once, as
// torch does; exponentials and what is made of them differ from torch's by some units in the last
// place.
#include <cmath>

#include "activations.h"
#include "aten_loops.h"
#include "lanes.h"

namespace specc::aten {
namespace {

using vec::Float;
using vec::load16;
using vec::Sixteen;
using vec::store16;

// of floats: op(Sixteen); what is whole becomes float32
template <class Op>
Tensor of_floats(const Tensor& x, int64_t cost, const Op& op) {
  const Element dtype = is_real(x.dtype) ? x.dtype : Element::kFloat32;
  require(is_float_here(dtype), "operators of float32 and bfloat16");
  Tensor out;
  const Loop loop = loop_of(out, dtype, {&x});
  for_each_run(loop, cost, [&](char* const* at, const int64_t* strides, int64_t n) {
    float in[kChunk], made[kChunk];
    const float* from = as_floats(at[1], strides[1], x.dtype, n, in);
    float* to = dtype == Element::kFloat32 ? reinterpret_cast<float*>(at[0]) : made;
    vec::by_sixteen(n, [&](int64_t i, auto count) {
      store16(to + i, op(load16(from + i, count)), count);
    });
    put_floats(to, n, dtype, at[0]);
  });
  return out;
}
// each number by itself: what the C library computes
template <class Op>
Tensor of_each(const Tensor& x, const Op& op) {
  return of_floats(x, kScalarMath, [&](const Sixteen& value) {
    float part[vec::kLanes];
    store16(part, value);
    for (float& lane : part) lane = op(lane);
    return load16(part);
  });
}
template <class Op>
Sixteen lanes(const Sixteen& x, const Op& op) {
  return each(x, op);
}
// also of whole numbers, which stay what they are
template <class Op, class Whole>
Tensor of_numbers(const Tensor& x, const Op& op, const Whole& whole) {
  if (is_real(x.dtype)) return of_floats(x, kCheap, op);
  require(x.dtype != Element::kBool, "an operator of numbers");
  Tensor out;
  const Loop loop = loop_of(out, x.dtype, {&x});
  for_each_run(loop, kCheap, [&](char* const* at, const int64_t* strides, int64_t n) {
    int64_t in[kChunk], made[kChunk];
    const int64_t* from = as_integers(at[1], strides[1], x.dtype, n, in);
    for (int64_t i = 0; i < n; ++i) made[i] = whole(from[i]);
    put_integers(made, n, x.dtype, at[0]);
  });
  return out;
}

// wraps around, as torch's integers do
int64_t negative(int64_t a) { return static_cast<int64_t>(-static_cast<uint64_t>(a)); }

Tensor neg(const Tensor& x) {
  return of_numbers(x, [](const Sixteen& a) { return -a; }, negative);
}
Tensor abs(const Tensor& x) {
  return of_numbers(
      x, [](const Sixteen& a) { return lanes(a, [](Float v) { return vec::absolute(v); }); },
      [](int64_t a) { return a < 0 ? negative(a) : a; });
}
Tensor square(const Tensor& x) {
  return of_numbers(x, [](const Sixteen& a) { return a * a; }, [](int64_t a) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(a));
  });
}
Tensor relu(const Tensor& x) {
  return of_numbers(x, [](const Sixteen& a) { return vec::relu(a); },
                    [](int64_t a) { return a < 0 ? 0 : a; });
}
Tensor reciprocal(const Tensor& x) {
  return of_floats(x, kCheap, [](const Sixteen& a) {
    return lanes(a, [](Float v) { return 1.0f / v; });
  });
}
Tensor sqrt(const Tensor& x) {
  return of_each(x, [](float a) { return std::sqrt(a); });
}
Tensor rsqrt(const Tensor& x) {
  return of_each(x, [](float a) { return 1.0f / std::sqrt(a); });
}
Tensor tanh(const Tensor& x) {
  return of_floats(x, kExponential, [](const Sixteen& a) { return vec::tanh(a); });
}
Tensor sigmoid(const Tensor& x) {
  return of_floats(x, kExponential, [](const Sixteen& a) { return vec::sigmoid(a); });
}
Tensor silu(const Tensor& x) {
  return of_floats(x, kExponential, [](const Sixteen& a) { return vec::silu(a); });
}
Tensor gelu(const Tensor& x, std::string_view approximate) {
  if (approximate == "tanh")
    return of_floats(x, kExponential, [](const Sixteen& a) { return vec::gelu_tanh(a); });
  check(approximate == "none", "gelu is computed as it is, or with tanh");
  return of_floats(x, kExponential, [](const Sixteen& a) { return vec::gelu(a); });
}
Tensor exp(const Tensor& x) {
  return of_each(x, [](float a) { return std::exp(a); });
}
Tensor expm1(const Tensor& x) {
  return of_each(x, [](float a) { return std::expm1(a); });
}
Tensor log(const Tensor& x) {
  return of_each(x, [](float a) { return std::log(a); });
}
Tensor log1p(const Tensor& x) {
  return of_each(x, [](float a) { return std::log1p(a); });
}
Tensor sin(const Tensor& x) {
  return of_each(x, [](float a) { return std::sin(a); });
}
Tensor cos(const Tensor& x) {
  return of_each(x, [](float a) { return std::cos(a); });
}
Tensor floor(const Tensor& x) {
  if (is_whole(x.dtype)) return of_numbers(x, [](const Sixteen& a) { return a; },
                                           [](int64_t a) { return a; });
  return of_each(x, [](float a) { return std::floor(a); });
}
Tensor softplus(const Tensor& x, Number beta, Number threshold) {
  const auto scale = static_cast<float>(beta.real), most = static_cast<float>(threshold.real);
  return of_each(x, [=](float a) {
    return a * scale > most ? a : std::log1p(std::exp(a * scale)) / scale;
  });
}
Tensor bitwise_not(const Tensor& x) {
  require(is_whole(x.dtype), "bits of whole numbers");
  const bool is_bool = x.dtype == Element::kBool;
  Tensor out;
  const Loop loop = loop_of(out, x.dtype, {&x});
  for_each_run(loop, kCheap, [&](char* const* at, const int64_t* strides, int64_t n) {
    int64_t in[kChunk], made[kChunk];
    const int64_t* from = as_integers(at[1], strides[1], x.dtype, n, in);
    for (int64_t i = 0; i < n; ++i) made[i] = is_bool ? from[i] == 0 : ~from[i];
    put_integers(made, n, x.dtype, at[0]);
  });
  return out;
}
Tensor logical_not(const Tensor& a) {
  require(a.dtype == Element::kBool, "logic of truth values");
  return bitwise_not(a);
}

SPECC_OPERATOR("aten::neg", neg);
SPECC_OPERATOR("aten::abs", abs);
SPECC_OPERATOR("aten::square", square);
SPECC_OPERATOR("aten::relu", relu);
SPECC_OPERATOR("aten::reciprocal", reciprocal);
SPECC_OPERATOR("aten::sqrt", sqrt);
SPECC_OPERATOR("aten::rsqrt", rsqrt);
SPECC_OPERATOR("aten::tanh", tanh);
SPECC_OPERATOR("aten::sigmoid", sigmoid);
SPECC_OPERATOR("aten::silu", silu);
SPECC_OPERATOR("aten::gelu", gelu);
SPECC_OPERATOR("aten::exp", exp);
SPECC_OPERATOR("aten::expm1", expm1);
SPECC_OPERATOR("aten::log", log);
SPECC_OPERATOR("aten::log1p", log1p);
SPECC_OPERATOR("aten::sin", sin);
SPECC_OPERATOR("aten::cos", cos);
SPECC_OPERATOR("aten::floor", floor);
SPECC_OPERATOR("aten::softplus", softplus);
SPECC_OPERATOR("aten::bitwise_not", bitwise_not);
SPECC_OPERATOR("aten::logical_not", logical_not);

}  // namespace
}  // namespace specc::aten
