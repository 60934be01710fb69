// What the operators read of torch's tensors and check of their shapes, through the stable C
// interface: files that include nothing else of torch compile in seconds.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
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
    int64_t expected = 1;
    bool is_packed = true;
    for (int64_t i = dim - 1; i >= 0; --i) {
      if (sizes[i] == 0) return true;
      if (sizes[i] != 1 && strides[i] != expected) is_packed = false;
      expected *= sizes[i];
    }
    return is_packed;
  }
  // the last dimension lies in one piece
  bool is_dense_row() const { return sizes[dim - 1] <= 1 || strides[dim - 1] == 1; }
  template <typename T>
  T* as() const { return static_cast<T*>(data); }
};

inline DType to_dtype(const View& view) {
  if (view.dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (view.dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  fail("the CPU kernels take float32 and bfloat16");
}

inline void check_index(const View& view, int64_t dim, int32_t dtype, const char* what) {
  check(view.dim == dim && view.dtype == dtype && view.is_contiguous(), what);
}

inline AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
  int64_t strides[4];
  int64_t step = 1;
  for (int64_t i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes.begin()[i];
  }
  AtenTensorHandle result = nullptr;
  call(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                                aoti_torch_device_type_cpu(), 0, &result));
  return result;
}

inline void* data_of(AtenTensorHandle handle) {
  void* data = nullptr;
  call(aoti_torch_get_data_ptr(handle, &data));
  return data;
}

}  // namespace specc::tensors
