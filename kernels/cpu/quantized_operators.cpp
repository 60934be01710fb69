// Binds projections by quantized weights, one or a mixture's, to their operators, twice, as
// register.cpp does.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "kernels.h"
#include "shims.h"
#include "tensors.h"
#include "threads.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

// What the arguments say of a product by `num_weights` weights, without bias and result.
specc::LinearQ product_of(const View& x, const View& w, int64_t num_weights, int64_t out_features,
                          int64_t bits, int64_t group, bool has_zeros, bool is_float,
                          int64_t row_bits) {
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
  const int64_t most_bits = a.dtype == specc::DType::kFloat32 ? 24 : 16;
  a.row_bits = row_bits == 0 ? most_bits : row_bits;
  check(a.row_bits == most_bits || a.row_bits == 16 || a.row_bits == 8,
        "rows have 8 or 16 bits, or, of float32, 24");
  const int64_t blocks = out_features / specc::kLinearBlock +
                         (out_features % specc::kLinearBlock != 0);
  // of a tensor, so that no product of sizes can be too large
  const bool is_whole = w.sizes[0] % num_weights == 0 && w.sizes[0] / num_weights == blocks;
  check(is_whole && w.sizes[1] == specc::block_bytes(a),
        "the blocks are those of all outputs and columns");
  a.x = x.data;
  a.x_stride = x.strides[0];
  a.w = w.as<uint8_t>();
  return a;
}

AtenTensorHandle linear_q(AtenTensorHandle x_handle, AtenTensorHandle w_handle,
                          AtenTensorHandle bias_handle, int64_t out_features, int64_t bits,
                          int64_t group, bool has_zeros, bool is_float, int64_t row_bits) {
  const View x(x_handle), w(w_handle);
  specc::LinearQ a =
      product_of(x, w, 1, out_features, bits, group, has_zeros, is_float, row_bits);
  if (bias_handle != nullptr) {
    const View bias(bias_handle);
    check_index(bias, 1, x.dtype, "bias is [N] in the dtype of x");
    check(bias.sizes[0] == a.n, "bias is [N]");
    a.bias = bias.data;
  }
  AtenTensorHandle y = empty({a.rows, a.n}, x.dtype);
  a.y = data_of(y);
  a.y_stride = a.n;
  specc::linear_q(&a, 1, specc::kernel_threads());
  return y;
}

// Each run of rows by its expert's blocks; rows after the last run are zeros.
AtenTensorHandle grouped_mm_q(AtenTensorHandle x_handle, AtenTensorHandle w_handle,
                              AtenTensorHandle ends_handle, int64_t out_features, int64_t bits,
                              int64_t group, bool has_zeros, bool is_float,
                              int64_t row_bits) {
  const View x(x_handle), w(w_handle), ends(ends_handle);
  check_ends(ends);
  const int64_t experts = ends.sizes[0];
  const specc::LinearQ whole =
      product_of(x, w, experts, out_features, bits, group, has_zeros, is_float, row_bits);
  AtenTensorHandle y = empty({whole.rows, whole.n}, x.dtype);
  const int64_t item = whole.dtype == specc::DType::kFloat32 ? 4 : 2;
  const auto* in = static_cast<const char*>(x.data);
  const int64_t expert_bytes = w.sizes[0] / experts * w.sizes[1];
  std::vector<specc::LinearQ> products;
  for_each_run(ends, data_of(y), whole.rows, whole.n * item,
               [&](int64_t expert, int64_t first, int64_t rows, void* out) {
                 specc::LinearQ& a = products.emplace_back(whole);
                 a.rows = rows;
                 a.x = in + first * a.x_stride * item;
                 a.w = whole.w + expert * expert_bytes;
                 a.y = out;
                 a.y_stride = a.n;
               });
  specc::linear_q(products.data(), static_cast<int64_t>(products.size()),
                  specc::kernel_threads());
  return y;
}

Tensor boxed_linear_q(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t out_features,
                      int64_t bits, int64_t group, bool has_zeros, bool is_float,
                      int64_t row_bits) {
  const AtenTensorHandle handle = bias.has_value() ? bias->get() : nullptr;
  return Tensor(linear_q(x.get(), weight.get(), handle, out_features, bits, group, has_zeros,
                         is_float, row_bits));
}

Tensor boxed_grouped_mm_q(Tensor x, Tensor weight, Tensor ends, int64_t out_features, int64_t bits,
                          int64_t group, bool has_zeros, bool is_float, int64_t row_bits) {
  return Tensor(grouped_mm_q(x.get(), weight.get(), ends.get(), out_features, bits, group,
                             has_zeros, is_float, row_bits));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def(
      "linear_q(Tensor input, Tensor weight, Tensor? bias, int out_features, int bits, int group, "
      "bool has_zeros, bool is_float=False, int row_bits=0) -> Tensor");
  library.def(
      "grouped_mm_q(Tensor x, Tensor weight, Tensor ends, int out_features, int bits, int group, "
      "bool has_zeros, bool is_float=False, int row_bits=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("linear_q", TORCH_BOX(&boxed_linear_q));
  library.impl("grouped_mm_q", TORCH_BOX(&boxed_grouped_mm_q));
}

// Both are declared to AOTInductor in kernels/native.py, C_SHIMS.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_linear_q(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t out_features,
    int64_t bits, int64_t group, int32_t has_zeros, int32_t is_float, int64_t row_bits,
    AtenTensorHandle* result) {
  return specc::guarded([&] {
    *result = linear_q(x, weight, bias == nullptr ? nullptr : *bias, out_features, bits, group,
                       has_zeros != 0, is_float != 0, row_bits);
  });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_grouped_mm_q(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle ends, int64_t out_features,
    int64_t bits, int64_t group, int32_t has_zeros, int32_t is_float, int64_t row_bits,
    AtenTensorHandle* result) {
  return specc::guarded([&] {
    *result = grouped_mm_q(x, weight, ends, out_features, bits, group, has_zeros != 0,
                           is_float != 0, row_bits);
  });
}
