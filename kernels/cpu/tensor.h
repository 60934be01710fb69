// A tensor as operators and the runner see it: a description of memory, which somebody else owns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

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
  kComplex64 = 9,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E4M3 = 24,
  kFloat8E8M0 = 44,
};

// Bytes of an element; throws for one that no kernel knows.
inline int64_t bytes_of(Element element) {
  switch (element) {
    case Element::kUInt8:
    case Element::kInt8:
    case Element::kBool:
    case Element::kFloat8E4M3:
    case Element::kFloat8E8M0:
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
    case Element::kComplex64:
      return 8;
  }
  fail("a tensor of dtype " + std::to_string(static_cast<int32_t>(element)));
}

constexpr int kMostDims = 8;

// `SpeccTensor` of specc.h, which ctypes passes. Strides count elements; sizes and strides beyond
// `dim` are not read.
//
// Sizes and strides may come from a file that somebody else made, and views are made by programs,
// too. A tensor therefore knows how much memory it may touch, and `check_tensor` compares the two;
// boxing (operator.h) does that for every argument of every operator, so an operator has to check
// only what it makes of a tensor's values, and of its sizes beside those of others.
struct Tensor {
  void* data = nullptr;
  Element dtype = Element::kFloat32;
  int32_t dim = 0;
  int64_t sizes[kMostDims] = {};
  int64_t strides[kMostDims] = {};
  int64_t bytes = 0;  // of its memory, from `data` on; a view has what is left of that

  // As unsigned numbers: beside a size of 0 the others may have any product.
  int64_t count() const {
    uint64_t product = 1;
    for (int32_t i = 0; i < dim; ++i) product *= static_cast<uint64_t>(sizes[i]);
    return static_cast<int64_t>(product);
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

// Bytes from `data` to the end of the last element; throws for what describes no tensor: sizes or
// strides below 0, or so large that no int64 counts elements, or the bytes up to the last one.
inline int64_t extent_of(const Tensor& x) {
  check(x.dim >= 0 && x.dim <= kMostDims, "a tensor has 0 … 8 dimensions");
  const int64_t item = bytes_of(x.dtype);
  bool is_empty = false, is_known = true;
  int64_t count = item, last = 0;
  for (int32_t i = 0; i < x.dim; ++i) {
    const int64_t size = x.sizes[i], stride = x.strides[i];
    check(size >= 0 && stride >= 0, "sizes and strides of a tensor are 0 or more");
    int64_t step = 0;
    is_empty |= size == 0;
    is_known &= !__builtin_mul_overflow(count, size, &count);
    is_known &= !__builtin_mul_overflow(size - 1, stride, &step);
    is_known &= !__builtin_add_overflow(last, step, &last);
  }
  if (is_empty) return 0;
  int64_t bytes = 0;
  is_known &= !__builtin_add_overflow(last, int64_t{1}, &last);
  is_known &= !__builtin_mul_overflow(last, item, &bytes);
  check(is_known, "a tensor has no such size");
  return bytes;
}

// Throws where a tensor is none, or would leave its memory.
inline void check_tensor(const Tensor& x) {
  const int64_t extent = extent_of(x);
  if (extent == 0) return;
  check(x.data != nullptr, "a tensor with elements has memory");
  check(extent <= x.bytes, "a tensor ends where its memory does");
}

// Throws where what an operator writes lies on numbers that it has checked and reads again: views
// of one memory could change an index after it was found to be good.
inline void check_apart(const Tensor& written, std::initializer_list<const Tensor*> indices) {
  const auto begin = reinterpret_cast<uintptr_t>(written.data);
  const auto end = begin + static_cast<uintptr_t>(extent_of(written));
  for (const Tensor* each : indices) {
    if (each == nullptr) continue;
    const auto first = reinterpret_cast<uintptr_t>(each->data);
    const auto last = first + static_cast<uintptr_t>(extent_of(*each));
    check(last <= begin || end <= first || first == last || begin == end,
          "what is written does not overlap indices");
  }
}

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
  check(!__builtin_mul_overflow(step, bytes_of(dtype), &made.bytes), "a result has no such size");
  return made;
}

// A result, contiguous; what is in it is not defined.
inline Tensor empty(std::span<const int64_t> sizes, Element dtype) {
  Tensor made = shaped(sizes, dtype);
  check(allocator_of_call != nullptr, "an operator is called by a runner");
  made.data = allocator_of_call->allocate(made.bytes);
  return made;
}

inline Tensor empty(std::initializer_list<int64_t> sizes, Element dtype) {
  return empty(std::span<const int64_t>(sizes.begin(), sizes.size()), dtype);
}

// Memory that an operator needs while it runs, aligned to 64.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    const auto rounded = (static_cast<size_t>(bytes) + 63) / 64 * 64;
    data_.reset(static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(rounded, 64))));
    if (data_ == nullptr) fail("no memory of " + std::to_string(bytes) + " bytes");
  }
  char* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
};

}  // namespace specc
