// A tensor as operators and the runner see it: a description of memory, which somebody else owns.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace specc {

[[noreturn]] inline void fail(const std::string& what) {
  throw std::runtime_error("specc: " + what);
}

inline void check(bool holds, const char* what) {
  if (!holds) fail(what);
}

// Elements, with the numbers of torch's ScalarType.
enum class Element : int32_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBool = 11,
  kBFloat16 = 15,
};

// Bytes of an element; throws for one that no kernel knows.
inline int64_t bytes_of(Element element) {
  switch (element) {
    case Element::kUInt8:
    case Element::kInt8:
    case Element::kBool:
      return 1;
    case Element::kInt16:
    case Element::kFloat16:
    case Element::kBFloat16:
      return 2;
    case Element::kInt32:
    case Element::kFloat32:
      return 4;
    case Element::kInt64:
    case Element::kFloat64:
      return 8;
  }
  fail("a tensor of dtype " + std::to_string(static_cast<int32_t>(element)));
}

constexpr int kMostDims = 8;

// `SpeccTensor` of specc.h, which ctypes passes. Strides count elements; sizes and strides beyond
// `dim` are not read.
struct Tensor {
  void* data = nullptr;
  Element dtype = Element::kFloat32;
  int32_t dim = 0;
  int64_t sizes[kMostDims] = {};
  int64_t strides[kMostDims] = {};

  int64_t count() const {
    int64_t product = 1;
    for (int32_t i = 0; i < dim; ++i) product *= sizes[i];
    return product;
  }
  bool is_contiguous() const {
    // beside a size of 0 the others may have any product
    uint64_t expected = 1;
    bool is_packed = true;
    for (int32_t i = dim - 1; i >= 0; --i) {
      if (sizes[i] == 0) return true;
      if (sizes[i] != 1 && static_cast<uint64_t>(strides[i]) != expected) is_packed = false;
      expected *= static_cast<uint64_t>(sizes[i]);
    }
    return is_packed;
  }
  // the last dimension lies in one piece
  bool is_dense_row() const { return dim > 0 && (sizes[dim - 1] <= 1 || strides[dim - 1] == 1); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Where results of operators lie: the arena of a runner, or memory of a caller.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // At least so many bytes, aligned to 64; throws where there are none.
  virtual void* allocate(int64_t bytes) = 0;
};

// Of the operator that this thread runs.
inline thread_local Allocator* allocator_of_call = nullptr;

// A tensor whose memory is yet to come: contiguous, without data. Throws where its size in bytes is
// no int64.
inline Tensor shaped(std::span<const int64_t> sizes, Element dtype) {
  check(sizes.size() <= kMostDims, "a result has 8 dimensions or fewer");
  Tensor made;
  made.dtype = dtype;
  made.dim = static_cast<int32_t>(sizes.size());
  int64_t step = 1;
  for (int32_t i = made.dim - 1; i >= 0; --i) {
    check(sizes[i] >= 0, "a size of a result is 0 or more");
    made.sizes[i] = sizes[i];
    made.strides[i] = step;
    check(!__builtin_mul_overflow(step, sizes[i], &step), "a result has no such size");
  }
  int64_t bytes = 0;
  check(!__builtin_mul_overflow(step, bytes_of(dtype), &bytes), "a result has no such size");
  return made;
}

// A result, contiguous; what is in it is not defined.
inline Tensor empty(std::span<const int64_t> sizes, Element dtype) {
  Tensor made = shaped(sizes, dtype);
  check(allocator_of_call != nullptr, "an operator is called by a runner");
  made.data = allocator_of_call->allocate(made.count() * bytes_of(dtype));
  return made;
}

inline Tensor empty(std::initializer_list<int64_t> sizes, Element dtype) {
  return empty(std::span<const int64_t>(sizes.begin(), sizes.size()), dtype);
}

}  // namespace specc
