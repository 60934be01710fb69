// Binds norms, gates and softmax to their operators.
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>

#include "fused.h"
#include "operands.h"
#include "tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

// What all norms have: of rows of x, by a weight of as many numbers.
Norm norm_of(const Tensor& x, const Tensor* weight, const Tensor* bias, double eps) {
  Norm a{};
  a.dtype = to_dtype(x);
  a.rows = rows_of(x);
  a.n = x.sizes[x.dim - 1];
  a.x = x.data;
  a.eps = static_cast<float>(eps);
  for (const Tensor* item : {weight, bias}) {
    if (item == nullptr) continue;
    check(item->dim == 1 && item->sizes[0] == a.n && item->is_contiguous(),
          "the weight of a norm has as many numbers as a row");
    check(weight == nullptr || item->dtype == weight->dtype, "weight and bias have one dtype");
    a.weight_dtype = to_dtype(*item);
  }
  if (weight != nullptr) a.weight = weight->data;
  if (bias != nullptr) a.bias = bias->data;
  return a;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool unit_offset) {
  Norm a = norm_of(x, &weight, nullptr, eps);
  a.unit_offset = unit_offset;
  const Tensor out = empty_as(x);
  a.out = out.data;
  specc::rms_norm(a, kernel_threads());
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                                 const Tensor& weight, double eps,
                                                 bool unit_offset) {
  check(has_same_sizes(x, residual) && x.dtype == residual.dtype,
        "x and residual have the same sizes and dtype");
  Norm a = norm_of(x, &weight, nullptr, eps);
  a.residual = residual.data;
  a.residual_rows = rows_of(residual);
  a.unit_offset = unit_offset;
  const Tensor out = empty_as(x), total = empty_as(x);
  a.out = out.data;
  a.total = total.data;
  specc::rms_norm(a, kernel_threads());
  return {out, total};
}

Tensor layer_norm(const Tensor& x, Ints shape, const Tensor* weight, const Tensor* bias,
                           double eps, bool) {
  check(shape.size() == 1 && x.dim > 0 && shape[0] == x.sizes[x.dim - 1],
        "a layer norm is over the last dimension");
  Norm a = norm_of(x, weight, bias, eps);
  const Tensor out = empty_as(x);
  a.out = out.data;
  specc::layer_norm(a, kernel_threads());
  return out;
}

// without a weight, too; eps of None is the least above 1 that float32 tells from it, less 1
Tensor rms_norm_of_shape(const Tensor& x, Ints shape, const Tensor* weight,
                              std::optional<double> eps) {
  check(shape.size() == 1 && x.dim > 0 && shape[0] == x.sizes[x.dim - 1],
        "a norm is over the last dimension");
  Norm a = norm_of(x, weight, nullptr, eps.value_or(std::numeric_limits<float>::epsilon()));
  const Tensor out = empty_as(x);
  a.out = out.data;
  specc::rms_norm(a, kernel_threads());
  return out;
}

Activation activation_named(std::string_view name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  check(name == "relu", "an activation is silu, gelu, gelu_tanh or relu");
  return Activation::kRelu;
}

Tensor act_and_mul(const Tensor& gate_up, std::string_view activation) {
  ActAndMul a{};
  a.activation = activation_named(activation);
  a.dtype = to_dtype(gate_up);
  a.rows = rows_of(gate_up);
  check(gate_up.sizes[gate_up.dim - 1] % 2 == 0, "gate and up are halves of a row");
  a.n = gate_up.sizes[gate_up.dim - 1] / 2;
  a.gate_up = gate_up.data;
  Tensor like = gate_up;
  like.sizes[like.dim - 1] = a.n;
  const Tensor out = empty_as(like);
  a.out = out.data;
  specc::act_and_mul(a, kernel_threads());
  return out;
}

Tensor softmax_of(const Tensor& x, int64_t dim, std::optional<int64_t> dtype, bool is_log) {
  check(dim == -1 || dim == x.dim - 1, "a softmax is over the last dimension");
  Softmax a{};
  a.dtype = to_dtype(x);
  a.rows = rows_of(x);
  a.n = x.sizes[x.dim - 1];
  a.x = x.data;
  a.is_log = is_log;
  Tensor like = x;
  if (dtype.has_value()) like.dtype = static_cast<Element>(*dtype);
  a.out_dtype = to_dtype(like);
  const Tensor out = empty_as(like);
  a.out = out.data;
  specc::softmax(a, kernel_threads());
  return out;
}
Tensor softmax(const Tensor& x, int64_t dim, std::optional<int64_t> dtype) {
  return softmax_of(x, dim, dtype, false);
}
Tensor log_softmax(const Tensor& x, int64_t dim, std::optional<int64_t> dtype) {
  return softmax_of(x, dim, dtype, true);
}

}  // namespace

SPECC_OPERATOR("specc::rms_norm", rms_norm);
SPECC_OPERATOR("specc::add_rms_norm", add_rms_norm);
SPECC_OPERATOR("specc::act_and_mul", act_and_mul);
SPECC_OPERATOR("aten::rms_norm", rms_norm_of_shape);
SPECC_OPERATOR("aten::layer_norm", layer_norm);
SPECC_OPERATOR("aten::softmax.int", softmax);
SPECC_OPERATOR("aten::log_softmax.int", log_softmax);

}  // namespace specc::operators
