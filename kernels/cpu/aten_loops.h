// Loops over tensors of any strides, with torch's rules: sizes are broadcast, types promoted, and a
// result lies in memory as its operands do (ATen's TensorIterator), so that a view of it is one
// here, too, wherever it was one when a model was traced.
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "operands.h"

namespace specc::aten {

// A form of an operator that no kernel here takes, though torch does.
struct NotNative : std::runtime_error {
  explicit NotNative(const char* what) : std::runtime_error(std::string("specc: ") + what) {}
};
inline void require(bool holds, const char* what) {
  if (!holds) throw NotNative(what);
}

inline bool is_real(Element x) {
  return x == Element::kFloat32 || x == Element::kBFloat16 || x == Element::kFloat16 ||
         x == Element::kFloat64;
}
inline bool is_float_here(Element x) { return x == Element::kFloat32 || x == Element::kBFloat16; }
// integers and truth values
inline bool is_whole(Element x) {
  return x == Element::kBool || x == Element::kUInt8 || x == Element::kInt8 ||
         x == Element::kInt16 || x == Element::kInt32 || x == Element::kInt64;
}

// torch.promote_types
inline Element promoted(Element a, Element b) {
  if (a == b) return a;
  if (is_real(a) != is_real(b)) return is_real(a) ? a : b;
  if (is_real(a)) {
    if (a == Element::kFloat64 || b == Element::kFloat64) return Element::kFloat64;
    return Element::kFloat32;  // of two that differ, halves of two kinds among them
  }
  if (a == Element::kBool) return b;
  if (b == Element::kBool) return a;
  const auto rank = [](Element x) { return static_cast<int>(x); };
  const Element wide = rank(a) > rank(b) ? a : b, other = wide == a ? b : a;
  // int8 beside uint8
  if (other == Element::kUInt8 && wide == Element::kInt8) return Element::kInt16;
  return wide;
}

// torch.result_type: dimensions count more than none, and those more than numbers, within a
// category (truth values, integers, reals).
class ResultType {
 public:
  ResultType& add(const Tensor& x) {
    require(is_real(x.dtype) || is_whole(x.dtype), "operators of reals and integers");
    join(x.dim > 0 ? dims_ : zeros_, x.dtype);
    return *this;
  }
  ResultType& add(const Number& x) {
    join(numbers_, x.is_real ? Element::kFloat32 : x.is_bool ? Element::kBool : Element::kInt64);
    return *this;
  }
  Element get() const { return combined(dims_, combined(zeros_, numbers_)).second; }

 private:
  using Maybe = std::pair<bool, Element>;
  static void join(Maybe& to, Element x) { to = {true, to.first ? promoted(to.second, x) : x}; }
  static Maybe combined(Maybe higher, Maybe lower) {
    if (!higher.first) return lower;
    if (!lower.first || is_real(higher.second)) return higher;
    if (higher.second == Element::kBool || is_real(lower.second))
      return {true, promoted(higher.second, lower.second)};
    return higher;
  }
  Maybe dims_{}, zeros_{}, numbers_{};
};

constexpr int kMostOperands = 4;  // the result, and up to three

// Dimensions in the order in which they are gone over, the fastest first; strides count bytes.
struct Loop {
  int num = 0;  // operands, 0 is the result
  int dim = 0;
  int64_t sizes[kMostDims] = {};
  int64_t strides[kMostDims][kMostOperands] = {};
  char* data[kMostOperands] = {};
  Element types[kMostOperands] = {};
  int64_t count = 1;

  int64_t inner() const { return dim == 0 ? 1 : sizes[0]; }
};

// What operands have together; throws where they cannot be broadcast.
std::vector<int64_t> broadcast_sizes(std::initializer_list<const Tensor*> operands);

// The loop of a result that is made for it, of these operands: in memory as they are, or in one
// piece.
Loop loop_of(Tensor& out, Element dtype, std::initializer_list<const Tensor*> operands,
             bool contiguous = false);

// elements that are computed at a time
constexpr int64_t kChunk = 512;
// what an element costs, of cheap ones
constexpr int64_t kCheap = 1, kExponential = 8, kScalarMath = 32;

// Of n ≤ kChunk elements along the fastest dimension: pointers and strides in bytes of operands.
// A reference, so that one loop serves all operators.
class RunBody {
 public:
  template <class Body>
  RunBody(const Body& body)
      : body_(&body), call_([](const void* with, char* const* at, const int64_t* strides, int64_t n) {
          (*static_cast<const Body*>(with))(at, strides, n);
        }) {}
  void operator()(char* const* at, const int64_t* strides, int64_t n) const {
    call_(body_, at, strides, n);
  }

 private:
  const void* body_;
  void (*call_)(const void*, char* const*, const int64_t*, int64_t);
};

// The body for all runs, on threads that share them; an element is so much cheap work. The result's
// elements lie side by side.
void for_each_run(const Loop& loop, int64_t cost, RunBody body);

// n numbers as floats, or integers: where they lie, or in `memory`.
const float* as_floats(const char* from, int64_t stride, Element dtype, int64_t n, float* memory);
const int64_t* as_integers(const char* from, int64_t stride, Element dtype, int64_t n,
                           int64_t* memory);
// Results, side by side: floats rounded to their type, integers cut to theirs.
void put_floats(const float* values, int64_t n, Element dtype, char* to);
void put_integers(const int64_t* values, int64_t n, Element dtype, char* to);

// A number as an operand without dimensions, in the type in which it is computed with.
class Constant {
 public:
  Constant(const Number& x, Element dtype) {
    tensor_.data = this;
    if (is_real(dtype)) {
      tensor_.dtype = Element::kFloat32;
      real_ = static_cast<float>(x.real);
    } else {
      tensor_.dtype = Element::kInt64;
      integer_ = x.is_real ? static_cast<int64_t>(x.real) : x.integer;
    }
  }
  Constant(const Constant&) = delete;
  const Tensor* get() const { return &tensor_; }

 private:
  union {
    float real_;
    int64_t integer_ = 0;
  };
  Tensor tensor_;
};

}  // namespace specc::aten
