// What operators and their functions look like: made of kernels/operators, and of torch's registry,
// by `python -m specc.kernels.generate`.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "tensor.h"

namespace specc {

// Whether a function has the type that the schema of the operator with this name asks for, which
// `SPECC_OPERATOR` asks. Names of other namespaces than specc are not compared.
template <class Function>
consteval bool fits_schema(std::string_view name) {
  using T = const Tensor&;
  using O = const Tensor*;  // may be absent
  using Ts = std::span<const Tensor>;
  using Ints = std::span<const int64_t>;
  using Text = std::string_view;
  using One = Tensor;
  using Two = std::tuple<Tensor, Tensor>;
  using Three = std::tuple<Tensor, Tensor, Tensor>;
  using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  if (name == "specc::accept")
    return std::is_same_v<Function, Three(T, T, T, int64_t, O, O, Ts, T, T, T, T, T)>;
  if (name == "specc::accept_winners")
    return std::is_same_v<Function, Three(T, T, T, int64_t)>;
  if (name == "specc::act_and_mul")
    return std::is_same_v<Function, One(T, Text)>;
  if (name == "specc::add_lora")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T)>;
  if (name == "specc::add_norm_gate_up")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, Text, Text)>;
  if (name == "specc::add_norm_head")
    return std::is_same_v<Function, One(T, T, T, double, bool, T, O, T)>;
  if (name == "specc::add_norm_linear")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, O, Text)>;
  if (name == "specc::add_norm_rope_write")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, O, T, T, T, T, T, T, T, Text)>;
  if (name == "specc::add_rms_norm")
    return std::is_same_v<Function, Two(T, T, T, double, bool)>;
  if (name == "specc::all_reduce")
    return std::is_same_v<Function, One(T)>;
  if (name == "specc::ancestor_words")
    return std::is_same_v<Function, Two(T)>;
  if (name == "specc::attend")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, O, T, O, O, double, int64_t, int64_t,
        double, bool, bool, int64_t, int64_t)>;
  if (name == "specc::attend_expanded")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, T, T, O, T, O, int64_t, double,
        double)>;
  if (name == "specc::best_of_ranks")
    return std::is_same_v<Function, One(T, T)>;
  if (name == "specc::block_conv")
    return std::is_same_v<Function, One(T, T, T, T)>;
  if (name == "specc::block_mass")
    return std::is_same_v<Function, void(T, T, T, T, T, T, O, T, T, double)>;
  if (name == "specc::bmm_by_token")
    return std::is_same_v<Function, One(T, T)>;
  if (name == "specc::cache_write")
    return std::is_same_v<Function, One(T, T, T)>;
  if (name == "specc::column_winners")
    return std::is_same_v<Function, Two(T, T, T, T, int64_t, int64_t)>;
  if (name == "specc::commit_kv")
    return std::is_same_v<Function, void(T, T, T, T)>;
  if (name == "specc::commit_rows")
    return std::is_same_v<Function, Two(T, T, T)>;
  if (name == "specc::dense_attention")
    return std::is_same_v<Function, One(T, T, T, O, O, double, double)>;
  if (name == "specc::dense_conv")
    return std::is_same_v<Function, One(T, T, O, Text)>;
  if (name == "specc::dense_recurrence")
    return std::is_same_v<Function, One(T, T, T, T, O)>;
  if (name == "specc::distance_bias")
    return std::is_same_v<Function, One(T, T, T, double, double)>;
  if (name == "specc::draft_children")
    return std::is_same_v<Function, Two(T, int64_t, T, T, int64_t, T, T, bool)>;
  if (name == "specc::embed_norm_rope_write")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, O, T, T, T, T, T, T, T)>;
  if (name == "specc::embedding_of_blocks")
    return std::is_same_v<Function, One(T, T, int64_t, int64_t)>;
  if (name == "specc::embedding_q")
    return std::is_same_v<Function, One(T, T, int64_t, int64_t, Text)>;
  if (name == "specc::experts")
    return std::is_same_v<Function, One(T, T, T, T, T, Text, O, O, int64_t, Text, Text, O, O)>;
  if (name == "specc::fold_conv")
    return std::is_same_v<Function, void(T, T, T, T, T)>;
  if (name == "specc::fold_recurrence")
    return std::is_same_v<Function, void(T, T, T, T, T, int64_t, bool)>;
  if (name == "specc::from_first")
    return std::is_same_v<Function, One(T)>;
  if (name == "specc::gather_rows")
    return std::is_same_v<Function, One(T)>;
  if (name == "specc::grouped_linear")
    return std::is_same_v<Function, One(T, T, T, int64_t)>;
  if (name == "specc::grouped_mm")
    return std::is_same_v<Function, One(T, T, T)>;
  if (name == "specc::grouped_mm_q")
    return std::is_same_v<Function, One(T, T, T, int64_t, int64_t, int64_t, bool, bool, int64_t,
        Text)>;
  if (name == "specc::hadamard")
    return std::is_same_v<Function, One(T)>;
  if (name == "specc::image_slots")
    return std::is_same_v<Function, One(T, T, int64_t)>;
  if (name == "specc::invariant_attend")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, O, T, O, O, double, int64_t, int64_t,
        double, bool, int64_t)>;
  if (name == "specc::invariant_experts")
    return std::is_same_v<Function, One(T, T, T, T, T, Text, O, O, int64_t, Text, Text, O, O)>;
  if (name == "specc::invariant_linear")
    return std::is_same_v<Function, One(T, T, O)>;
  if (name == "specc::invariant_linear_q")
    return std::is_same_v<Function, One(T, T, O, int64_t, int64_t, int64_t, bool, bool, int64_t,
        Text)>;
  if (name == "specc::leave_step")
    return std::is_same_v<Function, void(T, T, T, T, T, T, T, O)>;
  if (name == "specc::linear")
    return std::is_same_v<Function, One(T, T, O, int64_t)>;
  if (name == "specc::linear_q")
    return std::is_same_v<Function, One(T, T, O, int64_t, int64_t, int64_t, bool, bool, int64_t,
        Text)>;
  if (name == "specc::lookup")
    return std::is_same_v<Function, Two(T, T, T, T, int64_t, int64_t)>;
  if (name == "specc::masked_attention")
    return std::is_same_v<Function, One(T, T, T, T, double, double)>;
  if (name == "specc::merge_trees")
    return std::is_same_v<Function, Four(T, T, T)>;
  if (name == "specc::next_tokens")
    return std::is_same_v<Function, One(T, T, T)>;
  if (name == "specc::node_winners")
    return std::is_same_v<Function, One(T, T, T, int64_t, T, T, T, T, T)>;
  if (name == "specc::norm_rope_write")
    return std::is_same_v<Function, One(T, T, T, T, T, double, bool, T, T, T, T, T, T, T, bool)>;
  if (name == "specc::over_link")
    return std::is_same_v<Function, One(T, Text)>;
  if (name == "specc::record_tokens")
    return std::is_same_v<Function, void(T, T, T, T, T, T)>;
  if (name == "specc::rerank_tree")
    return std::is_same_v<Function, Three(T, T, T, int64_t)>;
  if (name == "specc::rms_norm")
    return std::is_same_v<Function, One(T, T, double, bool)>;
  if (name == "specc::rope_write")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, T, T, T, bool)>;
  if (name == "specc::rope_write_latent")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, T, T, T, T, Text)>;
  if (name == "specc::route")
    return std::is_same_v<Function, Two(T, T, O, O, Text, int64_t, bool, double, double, int64_t,
        int64_t, int64_t, int64_t, O)>;
  if (name == "specc::skinny_linear")
    return std::is_same_v<Function, One(T, T, O)>;
  if (name == "specc::take_rows")
    return std::is_same_v<Function, One(T, T, T, T)>;
  if (name == "specc::tree_attention")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, T, T, O, T, O, O, double, int64_t,
        int64_t, double, bool, int64_t, int64_t)>;
  if (name == "specc::tree_conv")
    return std::is_same_v<Function, One(T, T, O, T, T, T, T, T, O, T, Text)>;
  if (name == "specc::tree_expand")
    return std::is_same_v<Function, One(T, int64_t)>;
  if (name == "specc::tree_recurrence")
    return std::is_same_v<Function, One(T, T, T, T, O, T, T, T, T, T, O, T)>;
  if (name == "specc::tree_rows")
    return std::is_same_v<Function, Two(T, T, T)>;
  if (name == "specc::vote_chain")
    return std::is_same_v<Function, One(T, T)>;
  if (name == "specc::write_kv")
    return std::is_same_v<Function, void(T, T, T, T, T, T, T, bool)>;
  if (name == "specc::write_rows")
    return std::is_same_v<Function, void(T, T, T, T, T)>;
  return !name.starts_with("specc::");
}

// All schemas, also of torch's operators that have a kernel, sorted by what stands before (.
constexpr const char* kSchemas[] = {
    "aten::_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? "
        "device=None, bool? pin_memory=None, bool non_blocking=False, MemoryFormat? "
        "memory_format=None) -> Tensor",
    "aten::abs(Tensor self) -> Tensor",
    "aten::add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor",
    "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::alias(Tensor(a) self) -> Tensor(a)",
    "aten::amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor",
    "aten::arange(Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? "
        "device=None, bool? pin_memory=None) -> Tensor",
    "aten::arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, Layout? "
        "layout=None, Device? device=None, bool? pin_memory=None) -> Tensor",
    "aten::arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? "
        "dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor",
    "aten::argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor",
    "aten::bitwise_and.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::bitwise_not(Tensor self) -> Tensor",
    "aten::bitwise_or.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::bmm(Tensor self, Tensor mat2) -> Tensor",
    "aten::cat(Tensor[] tensors, int dim=0) -> Tensor",
    "aten::chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]",
    "aten::clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor",
    "aten::clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor",
    "aten::clamp_max(Tensor self, Scalar max) -> Tensor",
    "aten::clamp_min(Tensor self, Scalar min) -> Tensor",
    "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor",
    "aten::contiguous(Tensor(a) self, *, MemoryFormat memory_format=0) -> Tensor(a)",
    "aten::cos(Tensor self) -> Tensor",
    "aten::cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor",
    "aten::detach(Tensor(a) self) -> Tensor(a)",
    "aten::div.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::div.Scalar_mode(Tensor self, Scalar other, *, str? rounding_mode) -> Tensor",
    "aten::div.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor",
    "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool "
        "scale_grad_by_freq=False, bool sparse=False) -> Tensor",
    "aten::empty_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? "
        "device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor",
    "aten::eq.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::eq.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::exp(Tensor self) -> Tensor",
    "aten::expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)",
    "aten::expm1(Tensor self) -> Tensor",
    "aten::flatten.using_ints(Tensor(a) self, int start_dim=0, int end_dim=-1) -> Tensor(a)",
    "aten::floor(Tensor self) -> Tensor",
    "aten::floor_divide(Tensor self, Tensor other) -> Tensor",
    "aten::floor_divide.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? "
        "layout=None, Device? device=None, bool? pin_memory=None) -> Tensor",
    "aten::full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, Layout? "
        "layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? "
        "memory_format=None) -> Tensor",
    "aten::gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor",
    "aten::ge.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::ge.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::gelu(Tensor self, *, str approximate=\"none\") -> Tensor",
    "aten::gt.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::gt.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor",
    "aten::index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> "
        "Tensor",
    "aten::index_put_(Tensor(a!) self, Tensor?[] indices, Tensor values, bool "
        "accumulate=False) -> Tensor(a!)",
    "aten::index_select(Tensor self, int dim, Tensor index) -> Tensor",
    "aten::layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? "
        "bias=None, float eps=1.0000000000000001e-05, bool cudnn_enable=True) -> Tensor",
    "aten::le.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::le.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::log(Tensor self) -> Tensor",
    "aten::log1p(Tensor self) -> Tensor",
    "aten::log_softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor",
    "aten::logical_and(Tensor self, Tensor other) -> Tensor",
    "aten::logical_not(Tensor self) -> Tensor",
    "aten::logical_or(Tensor self, Tensor other) -> Tensor",
    "aten::lt.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::lt.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor",
    "aten::masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor",
    "aten::max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor "
        "indices)",
    "aten::max.other(Tensor self, Tensor other) -> Tensor",
    "aten::maximum(Tensor self, Tensor other) -> Tensor",
    "aten::mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) "
        "-> Tensor",
    "aten::min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor "
        "indices)",
    "aten::min.other(Tensor self, Tensor other) -> Tensor",
    "aten::minimum(Tensor self, Tensor other) -> Tensor",
    "aten::mul.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::narrow(Tensor(a) self, int dim, SymInt start, SymInt length) -> Tensor(a)",
    "aten::ne.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::ne.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::neg(Tensor self) -> Tensor",
    "aten::ones(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? "
        "device=None, bool? pin_memory=None) -> Tensor",
    "aten::ones_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? "
        "device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor",
    "aten::permute(Tensor(a) self, int[] dims) -> Tensor(a)",
    "aten::pow.Scalar(Scalar self, Tensor exponent) -> Tensor",
    "aten::pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor",
    "aten::reciprocal(Tensor self) -> Tensor",
    "aten::relu(Tensor self) -> Tensor",
    "aten::remainder.Scalar(Tensor self, Scalar other) -> Tensor",
    "aten::remainder.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::repeat(Tensor self, SymInt[] repeats) -> Tensor",
    "aten::repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim=None, *, SymInt? "
        "output_size=None) -> Tensor",
    "aten::reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)",
    "aten::rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? "
        "eps=None) -> Tensor",
    "aten::rsqrt(Tensor self) -> Tensor",
    "aten::rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor",
    "aten::rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor",
    "aten::scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor",
    "aten::select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)",
    "aten::sigmoid(Tensor self) -> Tensor",
    "aten::silu(Tensor self) -> Tensor",
    "aten::sin(Tensor self) -> Tensor",
    "aten::slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, "
        "SymInt step=1) -> Tensor(a)",
    "aten::slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? "
        "end=None, SymInt step=1) -> Tensor",
    "aten::softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor",
    "aten::softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor",
    "aten::sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor "
        "indices)",
    "aten::sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> "
        "(Tensor values, Tensor indices)",
    "aten::split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]",
    "aten::split.sizes(Tensor(a -> *) self, SymInt[] split_size, int dim=0) -> Tensor(a)[]",
    "aten::split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> "
        "Tensor(a)[]",
    "aten::sqrt(Tensor self) -> Tensor",
    "aten::square(Tensor self) -> Tensor",
    "aten::squeeze(Tensor(a) self) -> Tensor(a)",
    "aten::squeeze.dim(Tensor(a) self, int dim) -> Tensor(a)",
    "aten::squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)",
    "aten::stack(Tensor[] tensors, int dim=0) -> Tensor",
    "aten::sub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor",
    "aten::sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor",
    "aten::sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? "
        "dtype=None) -> Tensor",
    "aten::t(Tensor(a) self) -> Tensor(a)",
    "aten::tanh(Tensor self) -> Tensor",
    "aten::to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool "
        "copy=False, MemoryFormat? memory_format=None) -> Tensor(a)",
    "aten::topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> "
        "(Tensor values, Tensor indices)",
    "aten::transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)",
    "aten::type_as(Tensor self, Tensor other) -> Tensor",
    "aten::unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]",
    "aten::unflatten.int(Tensor(a) self, int dim, SymInt[] sizes) -> Tensor(a)",
    "aten::unsqueeze(Tensor(a) self, int dim) -> Tensor(a)",
    "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)",
    "aten::where.Scalar(Tensor condition, Scalar self, Scalar other) -> Tensor",
    "aten::where.ScalarOther(Tensor condition, Tensor self, Scalar other) -> Tensor",
    "aten::where.ScalarSelf(Tensor condition, Scalar self, Tensor other) -> Tensor",
    "aten::where.self(Tensor condition, Tensor self, Tensor other) -> Tensor",
    "aten::zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? "
        "device=None, bool? pin_memory=None) -> Tensor",
    "aten::zeros_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? "
        "device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor",
    "specc::accept(Tensor logits, Tensor tokens, Tensor parents, int max_depth, Tensor? "
        "image, Tensor? q_rows, Tensor[] draft_logits, Tensor values, Tensor words, Tensor "
        "cache_len, Tensor history, Tensor block_table) -> (Tensor path, Tensor num_accepted, "
        "Tensor output_tokens)",
    "specc::accept_winners(Tensor winners, Tensor tokens, Tensor parents, int max_depth) -> "
        "(Tensor path, Tensor num_accepted, Tensor output_tokens)",
    "specc::act_and_mul(Tensor gate_up, str activation) -> Tensor",
    "specc::add_lora(Tensor base, Tensor input, Tensor adapters, Tensor down, Tensor up, "
        "Tensor pieces, Tensor scales) -> Tensor",
    "specc::add_norm_gate_up(Tensor x, Tensor residual, Tensor gamma, float eps, bool "
        "unit_offset, Tensor weight, str activation, str layout=\"\") -> (Tensor y, Tensor total)",
    "specc::add_norm_head(Tensor x, Tensor residual, Tensor gamma, float eps, bool "
        "unit_offset, Tensor weight, Tensor? bias, Tensor rows) -> Tensor",
    "specc::add_norm_linear(Tensor x, Tensor residual, Tensor gamma, float eps, bool "
        "unit_offset, Tensor weight, Tensor? bias, str layout=\"\") -> (Tensor y, Tensor total)",
    "specc::add_norm_rope_write(Tensor x, Tensor residual, Tensor gamma, float eps, bool "
        "unit_offset, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
        "Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table, str layout=\"\") -> "
        "(Tensor q, Tensor total)",
    "specc::add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool "
        "unit_offset=False) -> (Tensor, Tensor)",
    "specc::all_reduce(Tensor x) -> Tensor",
    "specc::ancestor_words(Tensor parents) -> (Tensor words, Tensor depths)",
    "specc::attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor position, "
        "Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor block_table, Tensor? "
        "sink_logits=None, Tensor? slopes=None, *, float scale, int window=0, int sink=0, float "
        "softcap=0., bool values_in_keys=False, bool rounds_bias=False, int most_rows=0, int "
        "chunk=0) -> Tensor",
    "specc::attend_expanded(Tensor absorbed, Tensor q, Tensor k_cache, Tensor up_k, Tensor "
        "up_v, Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors, "
        "Tensor block_table, Tensor? sink_logits=None, *, int most_rows, float scale, float "
        "softcap=0.) -> Tensor",
    "specc::best_of_ranks(Tensor score, Tensor token) -> Tensor",
    "specc::block_conv(Tensor x, Tensor base, Tensor factors, Tensor places) -> Tensor",
    "specc::block_mass(Tensor q, Tensor k_cache, Tensor q_start, Tensor position, Tensor "
        "slot, Tensor cache_len, Tensor? ancestors, Tensor block_table, Tensor(a!) mass, *, float "
        "scale) -> ()",
    "specc::bmm_by_token(Tensor x, Tensor weight) -> Tensor",
    "specc::cache_write(Tensor cache, Tensor update, Tensor write_index) -> Tensor",
    "specc::column_winners(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, "
        "int first, int vocab_size) -> (Tensor scores, Tensor tokens)",
    "specc::commit_kv(Tensor(a!) slab, Tensor source, Tensor target, Tensor block_table) -> "
        "()",
    "specc::commit_rows(Tensor path, Tensor cache_len, Tensor slot_of) -> (Tensor source, "
        "Tensor length)",
    "specc::dense_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
        "Tensor? sink_logits, *, float scale, float softcap=0.) -> Tensor",
    "specc::dense_conv(Tensor x, Tensor weight, Tensor? bias, *, str activation=\"\") -> "
        "Tensor",
    "specc::dense_recurrence(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta) -> Tensor",
    "specc::distance_bias(Tensor mask, Tensor positions, Tensor slopes, *, float hidden, "
        "float rounded_scale=0.) -> Tensor",
    "specc::draft_children(Tensor logits, int num_children, Tensor cache_len, Tensor columns, "
        "int depth, Tensor values, Tensor words, bool scored=False) -> (Tensor tokens, Tensor "
        "scores)",
    "specc::embed_norm_rope_write(Tensor tokens, Tensor embedding, Tensor gamma, float eps, "
        "bool unit_offset, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, Tensor(a!) "
        "k_cache, Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table) -> (Tensor "
        "q, Tensor total)",
    "specc::embedding_of_blocks(Tensor weight, Tensor tokens, int num_embeddings, int width) "
        "-> Tensor",
    "specc::embedding_q(Tensor weight, Tensor tokens, int num_embeddings, int width, str "
        "layout) -> Tensor",
    "specc::experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, str "
        "activation, Tensor? gate_up_bias=None, Tensor? down_bias=None, int size=0, str "
        "gate_up_layout=\"\", str down_layout=\"\", Tensor? shared_gate_up=None, Tensor? "
        "shared_down=None) -> Tensor",
    "specc::fold_conv(Tensor(a!) state, Tensor rows, Tensor source, Tensor cache_len, Tensor "
        "states) -> ()",
    "specc::fold_recurrence(Tensor(a!) state, Tensor rows, Tensor source, Tensor cache_len, "
        "Tensor states, *, int key_heads, bool has_beta) -> ()",
    "specc::from_first(Tensor x) -> Tensor",
    "specc::gather_rows(Tensor x) -> Tensor",
    "specc::grouped_linear(Tensor x, Tensor weight, Tensor ends, int out_features) -> Tensor",
    "specc::grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    "specc::grouped_mm_q(Tensor x, Tensor weight, Tensor ends, int out_features, int bits, "
        "int group, bool has_zeros, bool is_float=False, int row_bits=0, str format=\"\") -> "
        "Tensor",
    "specc::hadamard(Tensor x) -> Tensor",
    "specc::image_slots(Tensor image, Tensor slots, int num_nodes) -> Tensor",
    "specc::invariant_attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor "
        "position, Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor block_table, Tensor? "
        "sink_logits=None, Tensor? slopes=None, *, float scale, int window=0, int sink=0, float "
        "softcap=0., bool rounds_bias=False, int chunk=0) -> Tensor",
    "specc::invariant_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor "
        "down, str activation, Tensor? gate_up_bias=None, Tensor? down_bias=None, int size=0, str "
        "gate_up_layout=\"\", str down_layout=\"\", Tensor? shared_gate_up=None, Tensor? "
        "shared_down=None) -> Tensor",
    "specc::invariant_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    "specc::invariant_linear_q(Tensor input, Tensor weight, Tensor? bias, int out_features, "
        "int bits, int group, bool has_zeros, bool is_float=False, int row_bits=0, str "
        "format=\"\") -> Tensor",
    "specc::leave_step(Tensor(a!) results, Tensor(b!) last_tokens, Tensor(c!) cache_len, "
        "Tensor num_accepted, Tensor output_tokens, Tensor next_cache_len, Tensor "
        "next_last_tokens, Tensor? draft_lens) -> ()",
    "specc::linear(Tensor input, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    "specc::linear_q(Tensor input, Tensor weight, Tensor? bias, int out_features, int bits, "
        "int group, bool has_zeros, bool is_float=False, int row_bits=0, str format=\"\") -> "
        "Tensor",
    "specc::lookup(Tensor history, Tensor block_table, Tensor cache_len, Tensor last_tokens, "
        "int ngram, int num_tokens) -> (Tensor tokens, Tensor parents)",
    "specc::masked_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, *, float "
        "softcap=0.) -> Tensor",
    "specc::merge_trees(Tensor tokens, Tensor parents, Tensor start) -> (Tensor tokens, "
        "Tensor parents, Tensor image, Tensor count)",
    "specc::next_tokens(Tensor last_tokens, Tensor output_tokens, Tensor num_accepted) -> "
        "Tensor",
    "specc::node_winners(Tensor logits, Tensor tokens, Tensor parents, int first_node, Tensor "
        "values, Tensor words, Tensor cache_len, Tensor history, Tensor block_table) -> Tensor",
    "specc::norm_rope_write(Tensor q, Tensor k, Tensor v, Tensor q_gamma, Tensor k_gamma, "
        "float eps, bool unit_offset, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) "
        "v_cache, Tensor q_start, Tensor slot, Tensor block_table, bool hadamard=False) -> Tensor",
    "specc::over_link(Tensor x, str link) -> Tensor",
    "specc::record_tokens(Tensor(a!) history, Tensor block_table, Tensor cache_len, Tensor "
        "last_tokens, Tensor output_tokens, Tensor num_accepted) -> ()",
    "specc::rerank_tree(Tensor tokens, Tensor parents, Tensor scores, int num_nodes) -> "
        "(Tensor tokens, Tensor parents, Tensor kept)",
    "specc::rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> Tensor",
    "specc::rope_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) "
        "k_cache, Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table, bool "
        "hadamard=False) -> Tensor",
    "specc::rope_write_latent(Tensor q, Tensor q_rest, Tensor latent, Tensor shared, Tensor "
        "cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start, Tensor slot, "
        "Tensor block_table, str pairs) -> Tensor",
    "specc::route(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, str scores, int "
        "top_k, bool normalize, float eps, float scale, int groups, int top_groups, int "
        "group_best, int shared=0, Tensor? shared_gate=None) -> (Tensor ids, Tensor weights)",
    "specc::skinny_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    "specc::take_rows(Tensor slab, Tensor slots, Tensor q_start, Tensor block_table) -> "
        "Tensor",
    "specc::tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) "
        "v_cache, Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? "
        "ancestors, Tensor block_table, Tensor? sink_logits=None, Tensor? slopes=None, *, float "
        "scale, int window=0, int sink=0, float softcap=0., bool rounds_bias=False, int "
        "most_rows=0, int chunk=0) -> Tensor",
    "specc::tree_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor(b!) "
        "rows, Tensor q_start, Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor states, "
        "*, str activation=\"\") -> Tensor",
    "specc::tree_expand(Tensor logits, int num_children) -> Tensor",
    "specc::tree_recurrence(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor(a!) "
        "state, Tensor(b!) rows, Tensor q_start, Tensor slot, Tensor cache_len, Tensor? "
        "ancestors, Tensor states) -> Tensor",
    "specc::tree_rows(Tensor cache_len, Tensor nodes, Tensor depths) -> (Tensor slot, Tensor "
        "position)",
    "specc::vote_chain(Tensor tokens, Tensor weights) -> Tensor",
    "specc::write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor "
        "q_start, Tensor slot, Tensor block_table, *, bool values_in_keys=False) -> ()",
    "specc::write_rows(Tensor x, Tensor(a!) slab, Tensor q_start, Tensor slot, Tensor "
        "block_table) -> ()",
};

}  // namespace specc
