// What the operators read of torch's tensors and check of their shapes, through the stable C
// interface: files that include nothing else of torch compile in seconds.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace specc::tensors {

[[noreturn]] inline void fail(const std::string& what) {
  throw std::runtime_error("specc: " + what);
}

inline void check(bool holds, const char* what) {
  if (!holds) fail(what);
}

inline void call(AOTITorchError code) {
  if (code != 0) fail("a call into torch failed");
}

// What the kernels need to know of a tensor, read once.
struct View {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
  int32_t dtype;

  explicit View(AtenTensorHandle handle) {
    int64_t* values = nullptr;
    call(aoti_torch_get_data_ptr(handle, &data));
    call(aoti_torch_get_dim(handle, &dim));
    call(aoti_torch_get_sizes(handle, &values));
    sizes = values;
    call(aoti_torch_get_strides(handle, &values));
    strides = values;
    call(aoti_torch_get_dtype(handle, &dtype));
  }

  bool is_contiguous() const {
    // beside a size of 0 the others may have any product
    uint64_t expected = 1;
    bool is_packed = true;
    for (int64_t i = dim - 1; i >= 0; --i) {
      if (sizes[i] == 0) return true;
      if (sizes[i] != 1 && static_cast<uint64_t>(strides[i]) != expected) is_packed = false;
      expected *= static_cast<uint64_t>(sizes[i]);
    }
    return is_packed;
  }
  // the last dimension lies in one piece
  bool is_dense_row() const {
    return dim > 0 && (sizes[dim - 1] <= 1 || strides[dim - 1] == 1);
  }
  template <typename T>
  T* as() const { return static_cast<T*>(data); }
};

inline int32_t i32() { return aoti_torch_dtype_int32(); }
inline int32_t i64() { return aoti_torch_dtype_int64(); }

// [B, N] of a dtype, each row in one piece
inline bool is_rows(const View& view, int32_t dtype) {
  return view.dim == 2 && view.dtype == dtype && view.is_dense_row();
}

// of two dimensions
inline bool is_same_shape(const View& one, const View& other) {
  return one.sizes[0] == other.sizes[0] && one.sizes[1] == other.sizes[1];
}

inline DType to_dtype(const View& view) {
  if (view.dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (view.dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  fail("the CPU kernels take float32 and bfloat16");
}

inline void check_index(const View& view, int64_t dim, int32_t dtype, const char* what) {
  check(view.dim == dim && view.dtype == dtype && view.is_contiguous(), what);
}

// Where runs of rows end, one for each expert of a mixture.
inline void check_ends(const View& ends) {
  check_index(ends, 1, aoti_torch_dtype_int32(), "ends are [E] int32, contiguous");
  // else no weight says how many outputs there can be
  check(ends.sizes[0] > 0, "a mixture has 1 expert or more");
}

// run(expert, first, rows, out) for each expert that has rows of `rows`; `out` is where its results
// begin, of rows of so many bytes. Results of rows after the last run become zeros.
template <class Run>
void for_each_run(const View& ends, void* results, int64_t rows, int64_t row_bytes,
                  const Run& run) {
  auto* out = static_cast<char*>(results);
  int64_t first = 0;
  for (int64_t expert = 0; expert < ends.sizes[0]; ++expert) {
    const int64_t last = ends.as<int32_t>()[expert];
    check(last >= first && last <= rows, "ends are rows of x, in order");
    if (last > first) run(expert, first, last - first, out + first * row_bytes);
    first = last;
  }
  if (row_bytes > 0 && rows > first)
    std::memset(out + first * row_bytes, 0, static_cast<size_t>((rows - first) * row_bytes));
}

// Levels, nodes and tokens that a number asks room for, and no tensor: an engine has plans of 1024
// nodes at most (specc/speculation/tree.py), out of 4 times as many candidates.
constexpr int64_t kMaxCount = 65536;

inline void check_count(int64_t count, int64_t least, const char* name) {
  if (count < least || count > kMaxCount)
    fail(std::string(name) + " is " + std::to_string(least) + " … " + std::to_string(kMaxCount));
}

inline bool is_i32(int64_t value) { return value == static_cast<int32_t>(value); }

inline AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
  int64_t strides[4];
  int64_t step = 1;
  for (int64_t i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = step;
    check(!__builtin_mul_overflow(step, sizes.begin()[i], &step), "a result has no such size");
  }
  AtenTensorHandle result = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                               aoti_torch_device_type_cpu(), 0, &result) != 0)
    fail("no memory for a result of " + std::to_string(step) + " elements");
  return result;
}

inline void* data_of(AtenTensorHandle handle) {
  void* data = nullptr;
  call(aoti_torch_get_data_ptr(handle, &data));
  return data;
}

template <typename T>
T* out(const torch::stable::Tensor& tensor) {
  return static_cast<T*>(data_of(tensor.get()));
}

// What the C functions take for a tensor that may be absent.
inline AtenTensorHandle handle_of(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor.has_value() ? tensor->get() : nullptr;
}

}  // namespace specc::tensors
