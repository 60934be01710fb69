// Operators by name. An operator is an ordinary function of tensors and numbers, in the order of its
// schema (kernels/ops.py), that returns a tensor, a tuple of them, or nothing; `SPECC_OPERATOR` at
// the end of its file makes it known. Nothing here or in an operator includes torch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "declared.h"
#include "tensor.h"

namespace specc {

// An argument or a result.
struct Value {
  enum class Kind : int32_t { kNone, kTensor, kInt, kReal, kBool, kText, kInts, kReals, kTensors };

  Kind kind = Kind::kNone;
  Tensor tensor;
  int64_t integer = 0;  // also of kBool
  double real = 0;
  std::string text;
  std::vector<int64_t> ints;
  std::vector<double> reals;
  std::vector<Tensor> tensors;
};

using Ints = std::span<const int64_t>;
using Tensors = std::span<const Tensor>;

// A number of a model's own type: what torch's schemas call Scalar.
struct Number {
  bool is_real = false, is_bool = false;
  int64_t integer = 0;
  double real = 0;  // of integers, too
};

constexpr size_t kMostResults = 4;

// One call: what an operator gets, and where it puts what it makes. Tensors among the arguments are
// checked when they are unboxed (check_tensor).
struct Call {
  std::span<const Value* const> arguments;
  std::array<Tensor, kMostResults> results;
  size_t num_results = 0;

  const Value& argument(size_t index) const {
    check(index < arguments.size(), "an argument is missing");
    return *arguments[index];
  }
};

struct Operator {
  std::string_view name;  // "specc::linear", "aten::add.Tensor"
  void (*run)(Call&);
  // results may lie in the memory of arguments
  bool is_view = false;
  int num_arguments = 0;
};

// What is registered under a name; null where nothing is.
const Operator* find_operator(std::string_view name);
// All names, for those who ask what a library has.
std::vector<std::string_view> operator_names();

class Registration {
 public:
  explicit Registration(const Operator& made);
};

namespace boxing {

template <class T>
struct Unbox;

template <>
struct Unbox<const Tensor&> {
  static const Tensor& get(const Value& value) {
    check(value.kind == Value::Kind::kTensor, "an argument is a tensor");
    check_tensor(value.tensor);
    return value.tensor;
  }
};
// one that may be absent: null
template <>
struct Unbox<const Tensor*> {
  static const Tensor* get(const Value& value) {
    if (value.kind == Value::Kind::kNone) return nullptr;
    return &Unbox<const Tensor&>::get(value);
  }
};
template <>
struct Unbox<int64_t> {
  static int64_t get(const Value& value) {
    check(value.kind == Value::Kind::kInt || value.kind == Value::Kind::kBool,
          "an argument is an integer");
    return value.integer;
  }
};
template <>
struct Unbox<bool> {
  static bool get(const Value& value) {
    check(value.kind == Value::Kind::kBool || value.kind == Value::Kind::kInt,
          "an argument is a truth value");
    return value.integer != 0;
  }
};
template <>
struct Unbox<double> {
  static double get(const Value& value) {
    if (value.kind == Value::Kind::kReal) return value.real;
    return static_cast<double>(Unbox<int64_t>::get(value));
  }
};
template <>
struct Unbox<Number> {
  static Number get(const Value& value) {
    if (value.kind == Value::Kind::kReal) return {true, false, 0, value.real};
    const int64_t integer = Unbox<int64_t>::get(value);
    return {false, value.kind == Value::Kind::kBool, integer, static_cast<double>(integer)};
  }
};
template <>
struct Unbox<std::string_view> {
  static std::string_view get(const Value& value) {
    check(value.kind == Value::Kind::kText, "an argument is a text");
    return value.text;
  }
};
// A list without items may come as one of any kind.
inline bool is_empty_list(const Value& value) {
  return value.kind >= Value::Kind::kInts && value.ints.empty() && value.reals.empty() &&
         value.tensors.empty();
}
template <>
struct Unbox<Ints> {
  static Ints get(const Value& value) {
    check(value.kind == Value::Kind::kInts || is_empty_list(value),
          "an argument is a list of integers");
    return value.ints;
  }
};
template <>
struct Unbox<Tensors> {
  static Tensors get(const Value& value) {
    check(value.kind == Value::Kind::kTensors || is_empty_list(value),
          "an argument is a list of tensors");
    for (const Tensor& each : value.tensors) check_tensor(each);
    return value.tensors;
  }
};
template <class T>
struct Unbox<std::optional<T>> {
  static std::optional<T> get(const Value& value) {
    if (value.kind == Value::Kind::kNone) return std::nullopt;
    return Unbox<T>::get(value);
  }
};

inline void put(Call& call, const Tensor& made) {
  call.results[0] = made;
  call.num_results = 1;
}
template <class... T>
void put(Call& call, const std::tuple<T...>& made) {
  static_assert(sizeof...(T) <= kMostResults);
  call.num_results = 0;
  std::apply([&](const auto&... each) { ((call.results[call.num_results++] = each), ...); }, made);
}

template <auto kFunction>
struct Boxed;
template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct Boxed<kFunction> {
  static constexpr int kNumArguments = sizeof...(Arguments);
  static void run(Call& call) { with(call, std::index_sequence_for<Arguments...>{}); }

 private:
  template <size_t... kIndex>
  static void with(Call& call, std::index_sequence<kIndex...>) {
    check(call.arguments.size() == sizeof...(Arguments), "an operator has another number of arguments");
    if constexpr (std::is_void_v<Result>) {
      kFunction(Unbox<Arguments>::get(call.argument(kIndex))...);
      call.num_results = 0;
    } else {
      put(call, kFunction(Unbox<Arguments>::get(call.argument(kIndex))...));
    }
  }
};

}  // namespace boxing

}  // namespace specc

#define SPECC_JOINED(a, b) a##b
#define SPECC_REGISTRATION(number) SPECC_JOINED(specc_registration_, number)
// SPECC_OPERATOR("specc::linear", linear): all arguments of the schema, in its order, defaults
// filled in by the caller. Of specc's own, kernels/operators says what these are (declared.h).
#define SPECC_OPERATOR(name, function)                                \
  static_assert(::specc::fits_schema<decltype(function)>(name),       \
                name " has other arguments than its schema");         \
  static const ::specc::Registration SPECC_REGISTRATION(__COUNTER__)( \
      {name, ::specc::boxing::Boxed<&function>::run, false, \
       ::specc::boxing::Boxed<&function>::kNumArguments})
// the same, of an operator whose results may lie in the memory of its arguments
#define SPECC_VIEW_OPERATOR(name, function)                           \
  static const ::specc::Registration SPECC_REGISTRATION(__COUNTER__)( \
      {name, ::specc::boxing::Boxed<&function>::run, true,                        \
       ::specc::boxing::Boxed<&function>::kNumArguments})
