// Binds the projection by quantized weights to its operator, twice, as register.cpp does.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "kernels.h"
#include "shims.h"
#include "tensors.h"
#include "threads.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

AtenTensorHandle linear_q(AtenTensorHandle x_handle, AtenTensorHandle w_handle,
                          AtenTensorHandle bias_handle, int64_t out_features, int64_t bits,
                          int64_t group, bool has_zeros, bool is_float) {
  const View x(x_handle), w(w_handle);
  check(x.dim == 2 && x.is_dense_row(), "x is [M, K], its rows contiguous");
  check(w.dim == 2 && w.dtype == aoti_torch_dtype_uint8() && w.is_contiguous(),
        "a quantized weight is uint8 [blocks, bytes], contiguous");
  check(out_features >= 0, "outputs are 0 or more");
  specc::LinearQ a{};
  a.dtype = to_dtype(x);
  a.rows = x.sizes[0];
  a.n = out_features;
  a.k = x.sizes[1];
  a.bits = bits;
  a.group = group;
  a.has_zeros = has_zeros;
  a.is_float = is_float;
  const int64_t blocks = out_features / specc::kLinearBlock +
                         (out_features % specc::kLinearBlock != 0);
  check(w.sizes[0] == blocks && w.sizes[1] == specc::block_bytes(a),
        "the blocks are those of all outputs and columns");
  a.x = x.data;
  a.x_stride = x.strides[0];
  a.w = w.as<uint8_t>();
  if (bias_handle != nullptr) {
    const View bias(bias_handle);
    check_index(bias, 1, x.dtype, "bias is [N] in the dtype of x");
    check(bias.sizes[0] == a.n, "bias is [N]");
    a.bias = bias.data;
  }
  AtenTensorHandle y = empty({a.rows, a.n}, x.dtype);
  a.y = data_of(y);
  a.y_stride = a.n;
  specc::linear_q(a, specc::kernel_threads());
  return y;
}

Tensor boxed_linear_q(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t out_features,
                      int64_t bits, int64_t group, bool has_zeros, bool is_float) {
  const AtenTensorHandle handle = bias.has_value() ? bias->get() : nullptr;
  return Tensor(
      linear_q(x.get(), weight.get(), handle, out_features, bits, group, has_zeros, is_float));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def(
      "linear_q(Tensor input, Tensor weight, Tensor? bias, int out_features, int bits, int group, "
      "bool has_zeros, bool is_float=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("linear_q", TORCH_BOX(&boxed_linear_q));
}

// Declared to AOTInductor in kernels/native.py, C_SHIMS.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_linear_q(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t out_features,
    int64_t bits, int64_t group, int32_t has_zeros, int32_t is_float, AtenTensorHandle* result) {
  return specc::guarded([&] {
    *result = linear_q(x, weight, bias == nullptr ? nullptr : *bias, out_features, bits, group,
                       has_zeros != 0, is_float != 0);
  });
}
