// Projections by quantized weights, one or a mixture's, as operators of tensors.
#include <string_view>
#include <vector>

#include "tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

// What the arguments say of a product by `num_weights` weights, without bias and result.
LinearQ product_of(const Tensor& x, const Tensor& w, int64_t num_weights, int64_t out_features,
                   int64_t bits, int64_t group, bool has_zeros, bool is_float, int64_t row_bits,
                   std::string_view format) {
  check(x.dim == 2 && x.is_dense_row(), "x is [M, K], its rows contiguous");
  check(w.dim == 2 && w.dtype == kUInt8 && w.is_contiguous(),
        "a quantized weight is uint8 [blocks, bytes], contiguous");
  check(out_features >= 0, "outputs are 0 or more");
  LinearQ a{};
  a.dtype = to_dtype(x);
  a.rows = x.sizes[0];
  a.n = out_features;
  a.k = x.sizes[1];
  a.bits = bits;
  a.group = group;
  a.has_zeros = has_zeros;
  a.is_float = is_float;
  if (!format.empty()) {
    a.format = block_format(format);
    check(a.format != nullptr, "a format of blocks that there is");
  }
  const int64_t most_bits = a.dtype == DType::kFloat32 ? 24 : 16;
  a.row_bits = row_bits == 0 ? most_bits : row_bits;
  check(a.row_bits == most_bits || a.row_bits == 16 || a.row_bits == 8,
        "rows have 8 or 16 bits, or, of float32, 24");
  const int64_t blocks = out_features / kLinearBlock + (out_features % kLinearBlock != 0);
  // of a tensor, so that no product of sizes can be too large
  const bool is_whole = w.sizes[0] % num_weights == 0 && w.sizes[0] / num_weights == blocks;
  check(is_whole && w.sizes[1] == block_bytes(a),
        "the blocks are those of all outputs and columns");
  a.x = x.data;
  a.x_stride = x.strides[0];
  a.w = w.as<uint8_t>();
  return a;
}

Tensor linear_q(const Tensor& x, const Tensor& w, const Tensor* bias, int64_t out_features,
                int64_t bits, int64_t group, bool has_zeros, bool is_float, int64_t row_bits,
                std::string_view format) {
  LinearQ a =
      product_of(x, w, 1, out_features, bits, group, has_zeros, is_float, row_bits, format);
  if (bias != nullptr) {
    check_index(*bias, 1, x.dtype, "bias is [N] in the dtype of x");
    check(bias->sizes[0] == a.n, "bias is [N]");
    a.bias = bias->data;
  }
  const Tensor y = empty({a.rows, a.n}, x.dtype);
  a.y = y.data;
  a.y_stride = a.n;
  specc::linear_q(&a, 1, kernel_threads());
  return y;
}

// Each run of rows by its expert's blocks; rows after the last run are zeros.
Tensor grouped_mm_q(const Tensor& x, const Tensor& w, const Tensor& ends, int64_t out_features,
                    int64_t bits, int64_t group, bool has_zeros, bool is_float, int64_t row_bits,
                    std::string_view format) {
  check_ends(ends);
  const int64_t experts = ends.sizes[0];
  const LinearQ whole = product_of(x, w, experts, out_features, bits, group, has_zeros, is_float,
                                   row_bits, format);
  const Tensor y = empty({whole.rows, whole.n}, x.dtype);
  const int64_t item = bytes_of(x.dtype);
  const auto* in = static_cast<const char*>(x.data);
  const int64_t expert_bytes = w.sizes[0] / experts * w.sizes[1];
  std::vector<LinearQ> products;
  for_each_run(ends, y.data, whole.rows, whole.n * item,
               [&](int64_t expert, int64_t first, int64_t rows, void* out) {
                 LinearQ& a = products.emplace_back(whole);
                 a.rows = rows;
                 a.x = in + first * a.x_stride * item;
                 a.w = whole.w + expert * expert_bytes;
                 a.y = out;
                 a.y_stride = a.n;
               });
  specc::linear_q(products.data(), static_cast<int64_t>(products.size()), kernel_threads());
  return y;
}

}  // namespace

SPECC_OPERATOR("specc::linear_q", linear_q);
SPECC_OPERATOR("specc::grouped_mm_q", grouped_mm_q);

}  // namespace specc::operators
