// Binds the kernels to the operators of kernels/ops.py, twice: for torch's dispatcher (eager
// graphs) and as C functions that AOTInductor's code calls directly, without a dispatcher between.
// Only torch's stable C interface is used, so that this file compiles in seconds.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "attention_tensors.h"
#include "bus_errors.h"
#include "kernels.h"
#include "shims.h"
#include "tensors.h"
#include "threads.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

AtenTensorHandle tree_attention(AtenTensorHandle q_handle, AtenTensorHandle k_handle,
                                AtenTensorHandle v_handle, AtenTensorHandle k_cache_handle,
                                AtenTensorHandle v_cache_handle, AtenTensorHandle q_start_handle,
                                AtenTensorHandle position_handle, AtenTensorHandle slot_handle,
                                AtenTensorHandle cache_len_handle,
                                AtenTensorHandle ancestors_handle,
                                AtenTensorHandle block_table_handle,
                                AtenTensorHandle sink_logits_handle, AtenTensorHandle slopes_handle,
                                double scale, int64_t window, int64_t sink, double softcap,
                                bool rounds_bias, int64_t most_rows, int64_t chunk) {
  const View q(q_handle), k(k_handle), v(v_handle), k_cache(k_cache_handle),
      v_cache(v_cache_handle), q_start(q_start_handle), position(position_handle),
      slot(slot_handle), cache_len(cache_len_handle), block_table(block_table_handle);
  check(q.dim == 3 && k.dim == 3 && v.dim == 3, "q, k and v have 3 dimensions");
  check(k_cache.dim == 4 && v_cache.dim == 4, "caches have 4 dimensions");
  for (const View* x : {&q, &k, &v, &k_cache, &v_cache})
    check(x->is_dense_row(), "the last dimension of q, k, v and the caches is contiguous");
  check(k.dtype == q.dtype && v.dtype == q.dtype && k_cache.dtype == v_cache.dtype &&
            (k_cache.dtype == q.dtype || k_cache.dtype == aoti_torch_dtype_int8()),
        "q, k, v and the caches have one dtype, or both caches int8");
  const int64_t heads = q.sizes[0], tokens = q.sizes[1], kv_heads = k.sizes[0];
  check(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
        "the number of KV heads divides that of heads");
  check(q.sizes[2] > 0 && v.sizes[2] > 0, "heads have 1 element or more");
  check(window >= 0 && sink >= 0, "window and sink are 0 or more");
  check(most_rows >= 0 && chunk >= 0, "most_rows and chunk are 0 or more");
  check(k.sizes[1] == tokens && v.sizes[1] == tokens && v.sizes[0] == kv_heads, "q, k and v agree");
  check(k.sizes[2] == q.sizes[2] && columns_of(k_cache) == q.sizes[2] &&
            columns_of(v_cache) == v.sizes[2] && k_cache.sizes[2] == kv_heads &&
            v_cache.sizes[2] == kv_heads && k_cache.sizes[1] == v_cache.sizes[1],
        "the caches fit k and v");
  specc::TreeAttention a{};
  a.dtype = to_dtype(q);
  a.holds_int8 = k_cache.dtype != q.dtype;
  a.num_heads = heads;
  a.num_kv_heads = kv_heads;
  a.num_tokens = tokens;
  a.head_dim = q.sizes[2];
  a.value_dim = v.sizes[2];
  a.q = q.data;
  a.q_head_stride = q.strides[0];
  a.q_token_stride = q.strides[1];
  a.k = k.data;
  a.k_head_stride = k.strides[0];
  a.k_token_stride = k.strides[1];
  a.v = v.data;
  a.v_head_stride = v.strides[0];
  a.v_token_stride = v.strides[1];
  a.k_cache = k_cache.data;
  a.k_block_stride = k_cache.strides[0];
  a.k_row_stride = k_cache.strides[1];
  a.k_cache_head_stride = k_cache.strides[2];
  a.v_cache = v_cache.data;
  a.v_block_stride = v_cache.strides[0];
  a.v_row_stride = v_cache.strides[1];
  a.v_cache_head_stride = v_cache.strides[2];
  a.num_blocks = std::min(k_cache.sizes[0], v_cache.sizes[0]);
  a.block_size = k_cache.sizes[1];
  set_tokens(a, q_start, position, slot, cache_len, ancestors_handle, block_table);
  a.scale = static_cast<float>(scale);
  // no position is beyond that
  a.window = std::min<int64_t>(window, std::numeric_limits<int32_t>::max());
  a.sink = std::min<int64_t>(sink, std::numeric_limits<int32_t>::max());
  a.chunk = std::min<int64_t>(chunk, std::numeric_limits<int32_t>::max());
  check(softcap >= 0 && softcap <= std::numeric_limits<float>::max(),
        "softcap is a finite number of 0 or more");
  a.softcap = static_cast<float>(softcap);
  if (sink_logits_handle != nullptr) {
    const View sink_logits(sink_logits_handle);
    check_index(sink_logits, 1, q.dtype, "sink_logits is [H] in the dtype of q");
    check(sink_logits.sizes[0] == heads, "sink_logits is [H]");
    a.sink_logits = sink_logits.data;
  }
  if (slopes_handle != nullptr) {
    const View slopes(slopes_handle);
    check_index(slopes, 1, aoti_torch_dtype_float32(), "slopes is [H] float32");
    check(slopes.sizes[0] == heads, "slopes is [H]");
    a.slopes = slopes.as<float>();
    a.rounds_bias = rounds_bias;
  }
  a.most_rows = most_rows;
  specc::check_bounds(a);
  // [Nt, H, DV] in memory: what follows is a projection over all heads of a token
  const int64_t out_sizes[] = {heads, tokens, a.value_dim};
  const int64_t out_strides[] = {a.value_dim, heads * a.value_dim, 1};
  AtenTensorHandle out = nullptr;
  call(aoti_torch_empty_strided(3, out_sizes, out_strides, q.dtype, aoti_torch_device_type_cpu(), 0,
                                &out));
  a.out = data_of(out);
  a.out_head_stride = out_strides[0];
  a.out_token_stride = out_strides[1];
  specc::tree_attention(a, specc::kernel_threads());
  return out;
}

void block_mass(AtenTensorHandle q_handle, AtenTensorHandle k_cache_handle,
                AtenTensorHandle q_start_handle, AtenTensorHandle position_handle,
                AtenTensorHandle slot_handle, AtenTensorHandle cache_len_handle,
                AtenTensorHandle ancestors_handle, AtenTensorHandle block_table_handle,
                AtenTensorHandle mass_handle, double scale) {
  const View q(q_handle), k_cache(k_cache_handle), cache_len(cache_len_handle), mass(mass_handle);
  check(mass.dim == 2 && mass.dtype == aoti_torch_dtype_float32() && mass.is_dense_row(),
        "mass is [M, C] float32");
  // nobody votes: the case of nearly all passes
  if (mass.sizes[1] == 0) return;
  check(q.dim == 3 && k_cache.dim == 4, "q has 3 dimensions, and the cache 4");
  check(q.is_dense_row() && k_cache.is_dense_row(),
        "the last dimension of q and the cache is contiguous");
  check(q.dtype == k_cache.dtype || k_cache.dtype == aoti_torch_dtype_int8(),
        "q and the cache have one dtype, or the cache int8");
  check(q.sizes[2] > 0 && columns_of(k_cache) == q.sizes[2], "the cache fits q");
  check(q.sizes[0] > 0 && k_cache.sizes[2] > 0 && q.sizes[0] % k_cache.sizes[2] == 0,
        "the number of KV heads divides that of heads");
  specc::BlockMass a{};
  specc::TreeAttention& pass = a.pass;
  pass.dtype = to_dtype(q);
  pass.holds_int8 = k_cache.dtype != q.dtype;
  pass.num_heads = q.sizes[0];
  pass.num_kv_heads = k_cache.sizes[2];
  pass.num_tokens = q.sizes[1];
  pass.head_dim = q.sizes[2];
  pass.q = q.data;
  pass.q_head_stride = q.strides[0];
  pass.q_token_stride = q.strides[1];
  pass.k_cache = k_cache.data;
  pass.k_block_stride = k_cache.strides[0];
  pass.k_row_stride = k_cache.strides[1];
  pass.k_cache_head_stride = k_cache.strides[2];
  pass.num_blocks = k_cache.sizes[0];
  pass.block_size = k_cache.sizes[1];
  set_tokens(pass, View(q_start_handle), View(position_handle), View(slot_handle), cache_len,
             ancestors_handle, View(block_table_handle));
  pass.scale = static_cast<float>(scale);
  check(mass.sizes[0] >= pass.batch, "mass has a row for each sequence");
  a.mass = mass.as<float>();
  a.row_stride = mass.strides[0];
  a.columns = mass.sizes[1];
  specc::block_mass(a, specc::kernel_threads());
}

// Weights [N, K] in blocks of outputs, those of one after those of the other.
void check_blocks(const View& w, specc::DType dtype, int64_t weights, int64_t n, int64_t k) {
  const int64_t unit = dtype == specc::DType::kFloat32 ? 1 : 2;
  const auto parts = [](int64_t x, int64_t size) { return x / size + (x % size != 0); };
  check(n >= 0 && k >= 0, "outputs and columns are 0 or more");
  check(w.dim == 4 && w.sizes[2] == specc::kLinearBlock && w.sizes[3] == unit,
        "the weight is in blocks of 32 outputs");
  // of a tensor, so that no product of sizes can be too large
  const bool is_whole =
      w.sizes[0] % weights == 0 && w.sizes[0] / weights == parts(n, specc::kLinearBlock);
  check(is_whole && w.sizes[1] == parts(k, unit),
        "the blocks are those of all outputs and columns");
}

// What the arguments say of a product by such weights, without bias and result.
specc::Linear product_of(const View& x, const View& w, int64_t weights, int64_t out_features) {
  check(x.dtype == w.dtype && x.is_dense_row() && w.is_contiguous(),
        "x and weight have one dtype; rows of x and all of the weight are contiguous");
  specc::Linear a{};
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

AtenTensorHandle linear(AtenTensorHandle x_handle, AtenTensorHandle w_handle,
                        AtenTensorHandle bias_handle, int64_t out_features) {
  const View x(x_handle), w(w_handle);
  specc::Linear a = product_of(x, w, 1, out_features);
  if (bias_handle != nullptr) {
    const View bias(bias_handle);
    check_index(bias, 1, x.dtype, "bias is [N] in the dtype of x");
    check(bias.sizes[0] == a.n, "bias is [N]");
    a.bias = bias.data;
  }
  AtenTensorHandle y = empty({a.rows, a.n}, x.dtype);
  a.y = data_of(y);
  specc::linear(&a, 1, specc::kernel_threads());
  return y;
}

// Each run of rows by its expert's blocks; rows after the last run are zeros.
AtenTensorHandle grouped_linear(AtenTensorHandle x_handle, AtenTensorHandle w_handle,
                                AtenTensorHandle ends_handle, int64_t out_features) {
  const View x(x_handle), w(w_handle), ends(ends_handle);
  check_ends(ends);
  const specc::Linear whole = product_of(x, w, ends.sizes[0], out_features);
  AtenTensorHandle y = empty({whole.rows, whole.n}, x.dtype);
  const int64_t item = whole.dtype == specc::DType::kFloat32 ? 4 : 2;
  const int64_t weight_bytes =
      w.sizes[0] / ends.sizes[0] * w.sizes[1] * specc::kLinearBlock * w.sizes[3] * item;
  std::vector<specc::Linear> products;
  for_each_run(ends, data_of(y), whole.rows, whole.n * item,
               [&](int64_t expert, int64_t first, int64_t rows, void* out) {
                 specc::Linear& a = products.emplace_back(whole);
                 a.rows = rows;
                 a.x = static_cast<const char*>(whole.x) + first * a.x_stride * item;
                 a.w = static_cast<const char*>(whole.w) + expert * weight_bytes;
                 a.y = out;
               });
  specc::linear(products.data(), static_cast<int64_t>(products.size()), specc::kernel_threads());
  return y;
}

AtenTensorHandle embedding(AtenTensorHandle w_handle, AtenTensorHandle tokens_handle,
                           int64_t num_embeddings, int64_t width) {
  const View w(w_handle), tokens(tokens_handle);
  check_index(tokens, 1, aoti_torch_dtype_int64(), "tokens is [T] int64");
  check(w.is_contiguous(), "the weight is contiguous");
  specc::Embedding a{};
  a.dtype = to_dtype(w);
  check_blocks(w, a.dtype, 1, num_embeddings, width);
  a.num_tokens = tokens.sizes[0];
  a.n = num_embeddings;
  a.k = width;
  a.tokens = tokens.as<int64_t>();
  a.w = w.data;
  AtenTensorHandle out = empty({a.num_tokens, width}, w.dtype);
  a.out = data_of(out);
  specc::embedding(a);
  return out;
}

Tensor boxed_tree_attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache,
                            Tensor q_start, Tensor position, Tensor slot, Tensor cache_len,
                            std::optional<Tensor> ancestors, Tensor block_table,
                            std::optional<Tensor> sink_logits, std::optional<Tensor> slopes,
                            double scale, int64_t window, int64_t sink, double softcap,
                            bool rounds_bias, int64_t most_rows, int64_t chunk) {
  return Tensor(tree_attention(q.get(), k.get(), v.get(), k_cache.get(), v_cache.get(),
                               q_start.get(), position.get(), slot.get(), cache_len.get(),
                               handle_of(ancestors), block_table.get(), handle_of(sink_logits),
                               handle_of(slopes), scale, window, sink, softcap, rounds_bias,
                               most_rows, chunk));
}

void boxed_block_mass(Tensor q, Tensor k_cache, Tensor q_start, Tensor position, Tensor slot,
                      Tensor cache_len, std::optional<Tensor> ancestors, Tensor block_table,
                      Tensor mass, double scale) {
  block_mass(q.get(), k_cache.get(), q_start.get(), position.get(), slot.get(), cache_len.get(),
             handle_of(ancestors), block_table.get(), mass.get(), scale);
}

Tensor boxed_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t out_features) {
  return Tensor(linear(x.get(), weight.get(), handle_of(bias), out_features));
}

Tensor boxed_grouped_linear(Tensor x, Tensor weight, Tensor ends, int64_t out_features) {
  return Tensor(grouped_linear(x.get(), weight.get(), ends.get(), out_features));
}

Tensor boxed_embedding(Tensor weight, Tensor tokens, int64_t num_embeddings, int64_t width) {
  return Tensor(embedding(weight.get(), tokens.get(), num_embeddings, width));
}

}  // namespace

// A namespace of their own: loading this library changes nothing for the eager graphs, which call
// the oracles as `specc::`. The schemas are those of kernels/ops.py; what a step does between its
// programs is added in step_operators.cpp.
STABLE_TORCH_LIBRARY(specc_cpu, library) {
  library.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors, "
      "Tensor block_table, Tensor? sink_logits=None, Tensor? slopes=None, *, float scale, "
      "int window=0, int sink=0, float softcap=0.0, bool rounds_bias=False, int most_rows=0, "
      "int chunk=0) -> Tensor");
  library.def(
      "block_mass(Tensor q, Tensor k_cache, Tensor q_start, Tensor position, Tensor slot, "
      "Tensor cache_len, Tensor? ancestors, Tensor block_table, Tensor(a!) mass, *, float scale) "
      "-> ()");
  library.def("linear(Tensor input, Tensor weight, Tensor? bias, int out_features) -> Tensor");
  library.def("grouped_linear(Tensor x, Tensor weight, Tensor ends, int out_features) -> Tensor");
  library.def(
      "embedding_of_blocks(Tensor weight, Tensor tokens, int num_embeddings, int width) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("tree_attention", TORCH_BOX(&boxed_tree_attention));
  library.impl("block_mass", TORCH_BOX(&boxed_block_mass));
  library.impl("linear", TORCH_BOX(&boxed_linear));
  library.impl("grouped_linear", TORCH_BOX(&boxed_grouped_linear));
  library.impl("embedding_of_blocks", TORCH_BOX(&boxed_embedding));
}

extern "C" {

// Declared to AOTInductor in kernels/native.py, C_SHIMS.
__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_tree_attention(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle k_cache,
    AtenTensorHandle v_cache, AtenTensorHandle q_start, AtenTensorHandle position,
    AtenTensorHandle slot, AtenTensorHandle cache_len, AtenTensorHandle* ancestors,
    AtenTensorHandle block_table, AtenTensorHandle* sink_logits, AtenTensorHandle* slopes,
    double scale, int64_t window, int64_t sink, double softcap, int32_t rounds_bias,
    int64_t most_rows, int64_t chunk, AtenTensorHandle* result) {
  return specc::guarded([&] {
    *result = tree_attention(q, k, v, k_cache, v_cache, q_start, position, slot, cache_len,
                             ancestors == nullptr ? nullptr : *ancestors, block_table,
                             sink_logits == nullptr ? nullptr : *sink_logits,
                             slopes == nullptr ? nullptr : *slopes, scale, window, sink, softcap,
                             rounds_bias != 0, most_rows, chunk);
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_block_mass(
    AtenTensorHandle q, AtenTensorHandle k_cache, AtenTensorHandle q_start,
    AtenTensorHandle position, AtenTensorHandle slot, AtenTensorHandle cache_len,
    AtenTensorHandle* ancestors, AtenTensorHandle block_table, AtenTensorHandle mass,
    double scale, AtenTensorHandle*) {  // the last is null: there is no result
  return specc::guarded([&] {
    block_mass(q, k_cache, q_start, position, slot, cache_len,
               ancestors == nullptr ? nullptr : *ancestors, block_table, mass, scale);
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t out_features,
    AtenTensorHandle* result) {
  return specc::guarded(
      [&] { *result = linear(x, weight, bias == nullptr ? nullptr : *bias, out_features); });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_grouped_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle ends, int64_t out_features,
    AtenTensorHandle* result) {
  return specc::guarded([&] { *result = grouped_linear(x, weight, ends, out_features); });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_embedding_of_blocks(
    AtenTensorHandle weight, AtenTensorHandle tokens, int64_t num_embeddings, int64_t width,
    AtenTensorHandle* result) {
  return specc::guarded([&] { *result = embedding(weight, tokens, num_embeddings, width); });
}

__attribute__((visibility("default"))) float specc_sum_floats(const float* data, int64_t count,
                                                             int threads) {
  return specc::sum_floats(data, count, threads);
}

// Let a fault in this memory say that a mapped file was cut, until it is forgotten.
__attribute__((visibility("default"))) void specc_watch_memory(const void* data, size_t bytes) {
  specc::watch_memory(data, bytes);
}

__attribute__((visibility("default"))) void specc_forget_memory(const void* data) {
  specc::forget_memory(data);
}

// What a kernel that is called here and now would use.
__attribute__((visibility("default"))) int specc_kernel_threads() {
  return specc::kernel_threads();
}
}
