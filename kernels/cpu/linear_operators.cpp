// Projections by weights in blocks, one or a mixture's, and embeddings by such weights, as operators
// of tensors.
#include <vector>

#include "tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

// Weights [N, K] in blocks of outputs, those of one after those of the other.
void check_blocks(const Tensor& w, DType dtype, int64_t weights, int64_t n, int64_t k) {
  const int64_t unit = dtype == DType::kFloat32 ? 1 : 2;
  const auto parts = [](int64_t x, int64_t size) { return x / size + (x % size != 0); };
  check(n >= 0 && k >= 0, "outputs and columns are 0 or more");
  check(w.dim == 4 && w.sizes[2] == kLinearBlock && w.sizes[3] == unit,
        "the weight is in blocks of 32 outputs");
  // of a tensor, so that no product of sizes can be too large
  const bool is_whole = w.sizes[0] % weights == 0 && w.sizes[0] / weights == parts(n, kLinearBlock);
  check(is_whole && w.sizes[1] == parts(k, unit),
        "the blocks are those of all outputs and columns");
}

// What the arguments say of a product by such weights, without bias and result.
Linear product_of(const Tensor& x, const Tensor& w, int64_t weights, int64_t out_features) {
  check(x.dtype == w.dtype && x.is_dense_row() && w.is_contiguous(),
        "x and weight have one dtype; rows of x and all of the weight are contiguous");
  Linear a{};
  a.dtype = to_dtype(x);
  check(x.dim == 2, "x is [M, K]");
  check_blocks(w, a.dtype, weights, out_features, x.sizes[1]);
  a.rows = x.sizes[0];
  a.n = out_features;
  a.k = x.sizes[1];
  a.x = x.data;
  a.x_stride = x.strides[0];
  a.w = w.data;
  a.y_stride = out_features;
  return a;
}

Tensor linear(const Tensor& x, const Tensor& w, const Tensor* bias, int64_t out_features) {
  Linear a = product_of(x, w, 1, out_features);
  if (bias != nullptr) {
    check_index(*bias, 1, x.dtype, "bias is [N] in the dtype of x");
    check(bias->sizes[0] == a.n, "bias is [N]");
    a.bias = bias->data;
  }
  const Tensor y = empty({a.rows, a.n}, x.dtype);
  a.y = y.data;
  specc::linear(&a, 1, kernel_threads());
  return y;
}

// Each run of rows by its expert's blocks; rows after the last run are zeros.
Tensor grouped_linear(const Tensor& x, const Tensor& w, const Tensor& ends, int64_t out_features) {
  check_ends(ends);
  const Linear whole = product_of(x, w, ends.sizes[0], out_features);
  const Tensor y = empty({whole.rows, whole.n}, x.dtype);
  const int64_t item = bytes_of(x.dtype);
  const int64_t weight_bytes =
      w.sizes[0] / ends.sizes[0] * w.sizes[1] * kLinearBlock * w.sizes[3] * item;
  std::vector<Linear> products;
  for_each_run(ends, y.data, whole.rows, whole.n * item,
               [&](int64_t expert, int64_t first, int64_t rows, void* out) {
                 Linear& a = products.emplace_back(whole);
                 a.rows = rows;
                 a.x = static_cast<const char*>(whole.x) + first * a.x_stride * item;
                 a.w = static_cast<const char*>(whole.w) + expert * weight_bytes;
                 a.y = out;
               });
  specc::linear(products.data(), static_cast<int64_t>(products.size()), kernel_threads());
  return y;
}

Tensor embedding_of_blocks(const Tensor& w, const Tensor& tokens, int64_t num_embeddings,
                           int64_t width) {
  check_index(tokens, 1, kInt64, "tokens is [T] int64");
  check(w.is_contiguous(), "the weight is contiguous");
  Embedding a{};
  a.dtype = to_dtype(w);
  check_blocks(w, a.dtype, 1, num_embeddings, width);
  a.num_tokens = tokens.sizes[0];
  a.n = num_embeddings;
  a.k = width;
  a.tokens = tokens.as<int64_t>();
  a.w = w.data;
  const Tensor out = empty({a.num_tokens, width}, w.dtype);
  a.out = out.data;
  embedding(a);
  return out;
}

}  // namespace

SPECC_OPERATOR("specc::linear", linear);
SPECC_OPERATOR("specc::grouped_linear", grouped_linear);
SPECC_OPERATOR("specc::embedding_of_blocks", embedding_of_blocks);

}  // namespace specc::operators
