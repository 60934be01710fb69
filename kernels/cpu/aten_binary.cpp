// aten's operators of two or three numbers at a time, computed in float32 and rounded once, as torch
// does, or in int64.
#include <cmath>
#include <optional>

#include "aten_loops.h"
#include "lanes.h"

namespace specc::aten {
namespace {

using vec::Float;
using vec::load16;
using vec::Sixteen;
using vec::store16;

// a tensor, or a number of the model
struct Side {
  const Tensor* tensor = nullptr;
  Number number;
};

}  // namespace
}  // namespace specc::aten

namespace specc::boxing {
template <>
struct Unbox<aten::Side> {
  static aten::Side get(const Value& value) {
    if (value.kind == Value::Kind::kTensor) return {&value.tensor, {}};
    return {nullptr, Unbox<Number>::get(value)};
  }
};
}  // namespace specc::boxing

namespace specc::aten {
namespace {

Element result_type(const Side& a, const Side& b) {
  ResultType found;
  for (const Side* side : {&a, &b})
    side->tensor != nullptr ? found.add(*side->tensor) : found.add(side->number);
  return found.get();
}

Number rounded_to_bfloat16(const Number& x) {
  vec::BFloat16 narrow;
  vec::from_float(static_cast<float>(x.real), &narrow);
  return {true, false, 0, vec::to_float(narrow)};
}
// Beside bfloat16 torch rounds a first operand without dimensions to that; a second one only in sums.
Side rounded(const Side& side, Element dtype) {
  if (dtype != Element::kBFloat16) return side;
  if (side.tensor == nullptr) return {nullptr, rounded_to_bfloat16(side.number)};
  if (side.tensor->dim > 0 || side.tensor->dtype == dtype) return side;
  float value;
  const float* read = as_floats(static_cast<const char*>(side.tensor->data), 0, side.tensor->dtype,
                                1, &value);
  return {nullptr, rounded_to_bfloat16({true, false, 0, *read})};
}

// The operand of a loop: numbers as floats or integers of full width.
class Operand {
 public:
  Operand(const Side& side, Element computed)
      : number_(side.number, computed), tensor_(side.tensor ? side.tensor : number_.get()) {}
  const Tensor* get() const { return tensor_; }

 private:
  Constant number_;
  const Tensor* tensor_;
};

template <class Op>
Tensor of_two_floats(const Side& a, const Side& b, Element dtype, int64_t cost, const Op& op) {
  require(is_float_here(dtype), "operators of float32 and bfloat16");
  const Operand one(rounded(a, dtype), dtype), other(b, dtype);
  Tensor out;
  const Loop loop = loop_of(out, dtype, {one.get(), other.get()});
  for_each_run(loop, cost, [&](char* const* at, const int64_t* strides, int64_t n) {
    float first[kChunk], second[kChunk], made[kChunk];
    const float* x = as_floats(at[1], strides[1], loop.types[1], n, first);
    const float* y = as_floats(at[2], strides[2], loop.types[2], n, second);
    float* to = dtype == Element::kFloat32 ? reinterpret_cast<float*>(at[0]) : made;
    vec::by_sixteen(n, [&](int64_t i, auto count) {
      store16(to + i, op(load16(x + i, count), load16(y + i, count)), count);
    });
    put_floats(to, n, dtype, at[0]);
  });
  return out;
}
template <class Op>
Tensor of_two_integers(const Side& a, const Side& b, Element dtype, const Op& op) {
  const Operand one(a, dtype), other(b, dtype);
  Tensor out;
  const Loop loop = loop_of(out, dtype, {one.get(), other.get()});
  for_each_run(loop, kCheap, [&](char* const* at, const int64_t* strides, int64_t n) {
    int64_t first[kChunk], second[kChunk], made[kChunk];
    const int64_t* x = as_integers(at[1], strides[1], loop.types[1], n, first);
    const int64_t* y = as_integers(at[2], strides[2], loop.types[2], n, second);
    for (int64_t i = 0; i < n; ++i) made[i] = op(x[i], y[i]);
    put_integers(made, n, dtype, at[0]);
  });
  return out;
}
template <class Op, class Whole>
Tensor of_two(const Side& a, const Side& b, const Op& op, const Whole& whole) {
  const Element dtype = result_type(a, b);
  if (is_real(dtype)) return of_two_floats(a, b, dtype, kCheap, op);
  return of_two_integers(a, b, dtype, whole);
}
template <class Op>
auto by_lane(const Op& op) {
  return [op](const Sixteen& a, const Sixteen& b) { return each(a, b, op); };
}
// wraps around, as torch's integers do
int64_t times(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
int64_t plus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
int64_t minus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// a + alpha · b
Tensor sum(Side a, Side b, const Number& alpha, float sign) {
  const float factor = sign * static_cast<float>(alpha.real);
  check(!alpha.is_real || is_real(result_type(a, b)), "alpha of integers is an integer");
  const int64_t whole = alpha.integer;
  b = rounded(b, result_type(a, b));
  if (factor == 1.0f || factor == -1.0f)
    return of_two(a, b,
                  [=](const Sixteen& x, const Sixteen& y) { return factor < 0 ? x - y : x + y; },
                  [=](int64_t x, int64_t y) { return factor < 0 ? minus(x, y) : plus(x, y); });
  return of_two(a, b,
                [=](const Sixteen& x, const Sixteen& y) { return x + y * factor; },
                [=](int64_t x, int64_t y) {
                  return sign < 0 ? minus(x, times(whole, y)) : plus(x, times(whole, y));
                });
}
Tensor add(Side a, Side b, Number alpha) { return sum(a, b, alpha, 1); }
Tensor sub(Side a, Side b, Number alpha) { return sum(a, b, alpha, -1); }
Tensor rsub(Side a, Side b, Number alpha) { return sum(b, a, alpha, -1); }
Tensor mul(Side a, Side b) {
  return of_two(a, b, [](const Sixteen& x, const Sixteen& y) { return x * y; }, times);
}

Tensor quotient(Side a, Side b) {
  Element dtype = result_type(a, b);
  if (is_whole(dtype)) dtype = Element::kFloat32;
  return of_two_floats(a, b, dtype, kCheap, by_lane([](Float x, Float y) { return x / y; }));
}
int64_t floor_of(int64_t a, int64_t b) {
  check(b != 0, "a division of integers by zero");
  if (b == -1) return minus(0, a);
  const int64_t whole = a / b;
  return whole - (a % b != 0 && (a < 0) != (b < 0));
}
int64_t remainder_of(int64_t a, int64_t b) {
  check(b != 0, "a division of integers by zero");
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
// as Python's divmod
float floor_of(float a, float b) {
  if (b == 0) return a / b;
  const float rest = std::fmod(a, b);
  float whole = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) whole -= 1;
  if (whole == 0) return std::copysign(0.0f, a / b);
  const float lower = std::floor(whole);
  return whole - lower > 0.5f ? lower + 1 : lower;
}
template <class Op>
auto by_number(const Op& op) {
  return [op](const Sixteen& a, const Sixteen& b) {
    float x[vec::kLanes], y[vec::kLanes];
    store16(x, a);
    store16(y, b);
    for (int i = 0; i < vec::kLanes; ++i) x[i] = op(x[i], y[i]);
    return load16(x);
  };
}
Tensor floor_divide(Side a, Side b) {
  return of_two(a, b, by_number([](float x, float y) { return floor_of(x, y); }),
                [](int64_t x, int64_t y) { return floor_of(x, y); });
}
Tensor div_mode(Side a, Side b, std::optional<std::string_view> mode) {
  if (!mode.has_value()) return quotient(a, b);
  if (*mode == "floor") return floor_divide(a, b);
  check(*mode == "trunc", "a quotient is rounded by floor or trunc");
  return of_two(a, b, by_number([](float x, float y) { return std::trunc(x / y); }),
                [](int64_t x, int64_t y) {
                  check(y != 0, "a division of integers by zero");
                  return y == -1 ? minus(0, x) : x / y;
                });
}
Tensor remainder(Side a, Side b) {
  return of_two(a, b, by_number([](float x, float y) {
                  const float rest = std::fmod(x, y);
                  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
                }),
                remainder_of);
}
// NaN wins, as in torch
Tensor maximum(Side a, Side b) {
  return of_two(a, b, by_lane([](Float x, Float y) { return x != x ? x : y != y ? y : x > y ? x : y; }),
                [](int64_t x, int64_t y) { return std::max(x, y); });
}
Tensor minimum(Side a, Side b) {
  return of_two(a, b, by_lane([](Float x, Float y) { return x != x ? x : y != y ? y : x < y ? x : y; }),
                [](int64_t x, int64_t y) { return std::min(x, y); });
}

// Squares and cubes are products, in each of which torch rounds to the type of x.
Tensor pow(const Tensor& x, Number exponent) {
  const double by = exponent.real;
  const Side side{&x, {}};
  if (by == 2) return mul(side, side);
  if (by == 3) {
    const Tensor two = mul(side, side);
    return mul({&two, {}}, side);
  }
  require(is_real(x.dtype), "powers of floats");
  // the exponent has the type of x
  const float rounded = static_cast<float>(
      x.dtype == Element::kBFloat16 ? rounded_to_bfloat16(exponent).real : by);
  return of_two_floats(side, {nullptr, exponent}, x.dtype, kScalarMath,
                       by_number([rounded](float a, float) {
                         if (rounded == 0.5f) return std::sqrt(a);
                         if (rounded == -0.5f) return 1.0f / std::sqrt(a);
                         if (rounded == -1.0f) return 1.0f / a;
                         return std::pow(a, rounded);
                       }));
}
Tensor pow_of_number(Number base, const Tensor& x) {
  require(base.is_real || is_real(x.dtype), "powers of floats");
  const Side number{nullptr, base}, side{&x, {}};
  return of_two_floats(number, side, result_type(number, side), kScalarMath,
                       by_number([](float a, float b) { return std::pow(a, b); }));
}

// ---- comparisons

enum class Order { kEqual, kUnequal, kLess, kLessEqual, kGreater, kGreaterEqual };
template <Order kOrder, class T>
bool holds(T a, T b) {
  switch (kOrder) {
    case Order::kEqual: return a == b;
    case Order::kUnequal: return a != b;
    case Order::kLess: return a < b;
    case Order::kLessEqual: return a <= b;
    case Order::kGreater: return a > b;
    case Order::kGreaterEqual: return a >= b;
  }
}
template <Order kOrder>
Tensor compare(Side a, Side b) {
  const Element dtype = result_type(a, b);
  require(is_whole(dtype) || is_float_here(dtype), "comparisons of float32 and bfloat16");
  // torch compares in the type of both: a number beside bfloat16 is rounded to that
  for (Side* side : {&a, &b})
    if (side->tensor == nullptr && dtype == Element::kBFloat16)
      side->number = rounded_to_bfloat16(side->number);
  const Operand one(a, dtype), other(b, dtype);
  Tensor out;
  const Loop loop = loop_of(out, Element::kBool, {one.get(), other.get()});
  for_each_run(loop, kCheap, [&](char* const* at, const int64_t* strides, int64_t n) {
    if (is_real(dtype)) {
      float first[kChunk], second[kChunk];
      const float* x = as_floats(at[1], strides[1], loop.types[1], n, first);
      const float* y = as_floats(at[2], strides[2], loop.types[2], n, second);
      for (int64_t i = 0; i < n; ++i) at[0][i] = holds<kOrder>(x[i], y[i]);
    } else {
      int64_t first[kChunk], second[kChunk];
      const int64_t* x = as_integers(at[1], strides[1], loop.types[1], n, first);
      const int64_t* y = as_integers(at[2], strides[2], loop.types[2], n, second);
      for (int64_t i = 0; i < n; ++i) at[0][i] = holds<kOrder>(x[i], y[i]);
    }
  });
  return out;
}
template <bool kIsAnd>
Tensor bitwise(Side a, Side b) {
  const Element dtype = result_type(a, b);
  require(is_whole(dtype), "bits of whole numbers");
  return of_two_integers(a, b, dtype,
                         [](int64_t x, int64_t y) { return kIsAnd ? x & y : x | y; });
}
template <bool kIsAnd>
Tensor logical(const Tensor& a, const Tensor& b) {
  require(a.dtype == Element::kBool && b.dtype == Element::kBool, "logic of truth values");
  return bitwise<kIsAnd>({&a, {}}, {&b, {}});
}
// ---- three operands

// Where a truth value holds `yes`, elsewhere `no`; numbers of a loop's operands.
struct Choice {
  int condition, yes, no;
};
void choose(const Loop& loop, Element dtype, const Choice& which) {
  for_each_run(loop, kCheap, [&](char* const* at, const int64_t* strides, int64_t n) {
    const auto holds = [&](int64_t i) {
      return at[which.condition][i * strides[which.condition]] != 0;
    };
    if (is_real(dtype)) {
      float first[kChunk], second[kChunk], made[kChunk];
      const float* x = as_floats(at[which.yes], strides[which.yes], loop.types[which.yes], n, first);
      const float* y = as_floats(at[which.no], strides[which.no], loop.types[which.no], n, second);
      for (int64_t i = 0; i < n; ++i) made[i] = holds(i) ? x[i] : y[i];
      put_floats(made, n, dtype, at[0]);
    } else {
      int64_t first[kChunk], second[kChunk], made[kChunk];
      const int64_t* x =
          as_integers(at[which.yes], strides[which.yes], loop.types[which.yes], n, first);
      const int64_t* y = as_integers(at[which.no], strides[which.no], loop.types[which.no], n, second);
      for (int64_t i = 0; i < n; ++i) made[i] = holds(i) ? x[i] : y[i];
      put_integers(made, n, dtype, at[0]);
    }
  });
}
void check_choice(const Tensor& condition, Element dtype) {
  require(condition.dtype == Element::kBool, "a condition is a truth value");
  require(is_whole(dtype) || is_float_here(dtype), "choices of float32 and bfloat16");
}
Tensor where(const Tensor& condition, Side a, Side b) {
  const Element dtype = result_type(a, b);
  check_choice(condition, dtype);
  const Operand one(a, dtype), other(b, dtype);
  Tensor out;
  choose(loop_of(out, dtype, {&condition, one.get(), other.get()}), dtype, {1, 2, 3});
  return out;
}
Tensor masked_fill(const Tensor& x, const Tensor& mask, Side value) {
  check_choice(mask, x.dtype);
  const Operand number(value, x.dtype);
  Tensor out;
  const Loop loop = loop_of(out, x.dtype, {&x, &mask, number.get()}, /*contiguous=*/true);
  choose(loop, x.dtype, {2, 3, 1});
  return out;
}
Tensor clamped(const Tensor& x, std::optional<Side> least, std::optional<Side> most) {
  check(least.has_value() || most.has_value(), "clamp has a bound");
  const Side side{&x, {}};
  if (!least.has_value()) return minimum(side, *most);
  const Tensor bounded = maximum(side, *least);
  return most.has_value() ? minimum({&bounded, {}}, *most) : bounded;
}
Tensor clamp(const Tensor& x, std::optional<Side> least, std::optional<Side> most) {
  return clamped(x, least, most);
}
Tensor clamp_least(const Tensor& x, Side least) { return clamped(x, least, std::nullopt); }
Tensor clamp_most(const Tensor& x, Side most) { return clamped(x, std::nullopt, most); }

SPECC_OPERATOR("aten::add.Tensor", add);
SPECC_OPERATOR("aten::add.Scalar", add);
SPECC_OPERATOR("aten::sub.Tensor", sub);
SPECC_OPERATOR("aten::sub.Scalar", sub);
SPECC_OPERATOR("aten::rsub.Tensor", rsub);
SPECC_OPERATOR("aten::rsub.Scalar", rsub);
SPECC_OPERATOR("aten::mul.Tensor", mul);
SPECC_OPERATOR("aten::mul.Scalar", mul);
SPECC_OPERATOR("aten::div.Tensor", quotient);
SPECC_OPERATOR("aten::div.Scalar", quotient);
SPECC_OPERATOR("aten::div.Tensor_mode", div_mode);
SPECC_OPERATOR("aten::div.Scalar_mode", div_mode);
SPECC_OPERATOR("aten::floor_divide", floor_divide);
SPECC_OPERATOR("aten::floor_divide.Scalar", floor_divide);
SPECC_OPERATOR("aten::remainder.Tensor", remainder);
SPECC_OPERATOR("aten::remainder.Scalar", remainder);
SPECC_OPERATOR("aten::maximum", maximum);
SPECC_OPERATOR("aten::minimum", minimum);
SPECC_OPERATOR("aten::max.other", maximum);
SPECC_OPERATOR("aten::min.other", minimum);
SPECC_OPERATOR("aten::pow.Tensor_Scalar", pow);
SPECC_OPERATOR("aten::pow.Scalar", pow_of_number);
SPECC_OPERATOR("aten::eq.Tensor", compare<Order::kEqual>);
SPECC_OPERATOR("aten::eq.Scalar", compare<Order::kEqual>);
SPECC_OPERATOR("aten::ne.Tensor", compare<Order::kUnequal>);
SPECC_OPERATOR("aten::ne.Scalar", compare<Order::kUnequal>);
SPECC_OPERATOR("aten::lt.Tensor", compare<Order::kLess>);
SPECC_OPERATOR("aten::lt.Scalar", compare<Order::kLess>);
SPECC_OPERATOR("aten::le.Tensor", compare<Order::kLessEqual>);
SPECC_OPERATOR("aten::le.Scalar", compare<Order::kLessEqual>);
SPECC_OPERATOR("aten::gt.Tensor", compare<Order::kGreater>);
SPECC_OPERATOR("aten::gt.Scalar", compare<Order::kGreater>);
SPECC_OPERATOR("aten::ge.Tensor", compare<Order::kGreaterEqual>);
SPECC_OPERATOR("aten::ge.Scalar", compare<Order::kGreaterEqual>);
SPECC_OPERATOR("aten::bitwise_and.Tensor", bitwise<true>);
SPECC_OPERATOR("aten::bitwise_or.Tensor", bitwise<false>);
SPECC_OPERATOR("aten::logical_and", logical<true>);
SPECC_OPERATOR("aten::logical_or", logical<false>);
SPECC_OPERATOR("aten::where.self", where);
SPECC_OPERATOR("aten::where.ScalarOther", where);
SPECC_OPERATOR("aten::where.ScalarSelf", where);
SPECC_OPERATOR("aten::where.Scalar", where);
SPECC_OPERATOR("aten::masked_fill.Scalar", masked_fill);
SPECC_OPERATOR("aten::masked_fill.Tensor", masked_fill);
SPECC_OPERATOR("aten::clamp", clamp);
SPECC_OPERATOR("aten::clamp.Tensor", clamp);
SPECC_OPERATOR("aten::clamp_min", clamp_least);
SPECC_OPERATOR("aten::clamp_max", clamp_most);

}  // namespace
}  // namespace specc::aten
