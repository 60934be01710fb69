// Binds the kernels to the operators of kernels/ops.py, twice: for torch's dispatcher (eager
// graphs) and as C functions that AOTInductor's code calls directly, without a dispatcher between.
// Only torch's stable C interface is used, so that this file compiles in seconds.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "threads.h"

using torch::stable::Tensor;

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("specc: " + what); }

void check(bool holds, const char* what) {
  if (!holds) fail(what);
}

void call(AOTITorchError code) {
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

specc::DType to_dtype(const View& view) {
  if (view.dtype == aoti_torch_dtype_float32()) return specc::DType::kFloat32;
  if (view.dtype == aoti_torch_dtype_bfloat16()) return specc::DType::kBFloat16;
  fail("the CPU kernels take float32 and bfloat16");
}

void check_index(const View& view, int64_t dim, int32_t dtype, const char* what) {
  check(view.dim == dim && view.dtype == dtype && view.is_contiguous(), what);
}

AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
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

AtenTensorHandle tree_attention(AtenTensorHandle q_handle, AtenTensorHandle k_handle,
                                AtenTensorHandle v_handle, AtenTensorHandle k_cache_handle,
                                AtenTensorHandle v_cache_handle, AtenTensorHandle q_start_handle,
                                AtenTensorHandle position_handle, AtenTensorHandle slot_handle,
                                AtenTensorHandle cache_len_handle, AtenTensorHandle ancestors_handle,
                                AtenTensorHandle block_table_handle, double scale, int64_t window,
                                int64_t sink) {
  const View q(q_handle), k(k_handle), v(v_handle), k_cache(k_cache_handle),
      v_cache(v_cache_handle), q_start(q_start_handle), position(position_handle),
      slot(slot_handle), cache_len(cache_len_handle), block_table(block_table_handle);
  const int32_t i32 = aoti_torch_dtype_int32(), i64 = aoti_torch_dtype_int64();
  check(q.dim == 3 && k.dim == 3 && v.dim == 3, "q, k and v have 3 dimensions");
  check(k_cache.dim == 4 && v_cache.dim == 4, "caches have 4 dimensions");
  for (const View* x : {&q, &k, &v, &k_cache, &v_cache}) {
    check(x->is_dense_row(), "the last dimension of q, k, v and the caches is contiguous");
    check(x->dtype == q.dtype, "q, k, v and the caches have one dtype");
  }
  const int64_t heads = q.sizes[0], tokens = q.sizes[1], kv_heads = k.sizes[0];
  const int64_t batch = cache_len.sizes[0];
  check(kv_heads > 0 && heads % kv_heads == 0, "the number of KV heads divides that of heads");
  check(k.sizes[1] == tokens && v.sizes[1] == tokens && v.sizes[0] == kv_heads, "q, k and v agree");
  check(k.sizes[2] == q.sizes[2] && k_cache.sizes[3] == q.sizes[2] &&
            v_cache.sizes[3] == v.sizes[2] && k_cache.sizes[2] == kv_heads &&
            v_cache.sizes[2] == kv_heads && k_cache.sizes[1] == v_cache.sizes[1],
        "the caches fit k and v");
  check_index(q_start, 1, i32, "q_start is [B + 1] int32");
  check_index(position, 1, i64, "position is [Nt] int64");
  check_index(slot, 1, i32, "slot is [Nt] int32");
  check_index(cache_len, 1, i32, "cache_len is [B] int32");
  check_index(block_table, 2, i32, "block_table is [B, n] int32");
  check(q_start.sizes[0] == batch + 1 && block_table.sizes[0] == batch &&
            position.sizes[0] == tokens && slot.sizes[0] == tokens,
        "the metadata fits the tokens");
  // [Nt, H, DV] in memory: what follows is a projection over all heads of a token
  const int64_t out_dim = v.sizes[2];
  const int64_t out_sizes[] = {heads, tokens, out_dim};
  const int64_t out_strides[] = {out_dim, heads * out_dim, 1};
  AtenTensorHandle out = nullptr;
  call(aoti_torch_empty_strided(3, out_sizes, out_strides, q.dtype, aoti_torch_device_type_cpu(), 0,
                                &out));
  specc::TreeAttention a{};
  a.dtype = to_dtype(q);
  a.num_heads = heads;
  a.num_kv_heads = kv_heads;
  a.num_tokens = tokens;
  a.head_dim = q.sizes[2];
  a.value_dim = out_dim;
  a.batch = batch;
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
  a.block_size = k_cache.sizes[1];
  a.q_start = q_start.as<int32_t>();
  a.position = position.as<int64_t>();
  a.slot = slot.as<int32_t>();
  a.cache_len = cache_len.as<int32_t>();
  if (ancestors_handle != nullptr) {
    // no words at all: causal, so that one compiled program serves prefill and trees
    const View ancestors(ancestors_handle);
    check_index(ancestors, 2, i64, "ancestors is [Nt, W] int64");
    check(ancestors.sizes[0] == tokens, "ancestors has a row for each token");
    a.num_words = ancestors.sizes[1];
    a.ancestors = a.num_words > 0 ? ancestors.as<int64_t>() : nullptr;
  }
  a.block_table = block_table.as<int32_t>();
  a.blocks_per_sequence = block_table.sizes[1];
  a.scale = static_cast<float>(scale);
  a.window = window;
  a.sink = sink;
  void* data = nullptr;
  call(aoti_torch_get_data_ptr(out, &data));
  a.out = data;
  a.out_head_stride = out_strides[0];
  a.out_token_stride = out_strides[1];
  specc::tree_attention(a, specc::kernel_threads());
  return out;
}

AtenTensorHandle linear(AtenTensorHandle x_handle, AtenTensorHandle w_handle,
                        AtenTensorHandle bias_handle) {
  const View x(x_handle), w(w_handle);
  check(x.dim == 2 && w.dim == 2 && x.sizes[1] == w.sizes[1], "x is [M, K], weight is [N, K]");
  check(x.dtype == w.dtype && x.is_dense_row() && w.is_contiguous(),
        "x and weight have one dtype; their rows are contiguous");
  specc::Linear a{};
  a.dtype = to_dtype(x);
  a.rows = x.sizes[0];
  a.n = w.sizes[0];
  a.k = w.sizes[1];
  a.x = x.data;
  a.x_stride = x.strides[0];
  a.w = w.data;
  if (bias_handle != nullptr) {
    const View bias(bias_handle);
    check_index(bias, 1, x.dtype, "bias is [N] in the dtype of x");
    check(bias.sizes[0] == a.n, "bias is [N]");
    a.bias = bias.data;
  }
  AtenTensorHandle y = empty({a.rows, a.n}, x.dtype);
  void* data = nullptr;
  call(aoti_torch_get_data_ptr(y, &data));
  a.y = data;
  a.y_stride = a.n;
  specc::linear(a, specc::kernel_threads());
  return y;
}

void* data_of(AtenTensorHandle handle) {
  void* data = nullptr;
  call(aoti_torch_get_data_ptr(handle, &data));
  return data;
}

// Slots as int64, whatever integers they are.
std::vector<int64_t> slots_of(const View& view, const char* what) {
  int64_t count = 1;
  for (int64_t i = 0; i < view.dim; ++i) count *= view.sizes[i];
  check(view.is_contiguous(), what);
  if (view.dtype == aoti_torch_dtype_int64())
    return {view.as<int64_t>(), view.as<int64_t>() + count};
  check(view.dtype == aoti_torch_dtype_int32(), what);
  return {view.as<int32_t>(), view.as<int32_t>() + count};
}

Tensor tree_expand(Tensor logits_tensor, int64_t num_children) {
  const View logits(logits_tensor.get());
  check(logits.dim == 2 && logits.is_dense_row(), "logits is [R, V], rows contiguous");
  check(num_children >= 1 && num_children <= logits.sizes[1], "1 … V children");
  Tensor out(empty({logits.sizes[0], num_children}, aoti_torch_dtype_int64()));
  specc::tree_expand({to_dtype(logits), logits.sizes[0], logits.sizes[1], num_children, logits.data,
                      logits.strides[0], static_cast<int64_t*>(data_of(out.get()))});
  return out;
}

std::tuple<Tensor, Tensor, Tensor> accept_greedy(Tensor logits_tensor, Tensor tokens_tensor,
                                                 Tensor parents_tensor, int64_t max_depth) {
  const View logits(logits_tensor.get()), tokens(tokens_tensor.get()),
      parents(parents_tensor.get());
  check(tokens.dim == 2 && tokens.dtype == aoti_torch_dtype_int64() && tokens.is_dense_row(),
        "tokens is [B, N] int64, rows contiguous");
  const int64_t batch = tokens.sizes[0], num_nodes = tokens.sizes[1];
  check(logits.dim == 2 && logits.is_dense_row() && logits.sizes[0] == batch * num_nodes,
        "logits is [B * N, V], rows contiguous");
  check(parents.dim == 2 && parents.dtype == aoti_torch_dtype_int32() && parents.is_dense_row() &&
            parents.sizes[0] == batch && parents.sizes[1] == num_nodes,
        "parents is [B, N] int32, rows contiguous");
  check(max_depth >= 0, "max_depth is at least 0");
  check(num_nodes >= 1 && logits.sizes[1] >= 1, "a tree has a root, logits have 1 token or more");
  const int32_t i32 = aoti_torch_dtype_int32();
  Tensor path(empty({batch, max_depth + 1}, i32)), num_accepted(empty({batch}, i32)),
      output(empty({batch, max_depth + 1}, aoti_torch_dtype_int64()));
  specc::AcceptGreedy a{};
  a.dtype = to_dtype(logits);
  a.batch = batch;
  a.num_nodes = num_nodes;
  a.vocab = logits.sizes[1];
  a.max_depth = max_depth;
  a.logits = logits.data;
  a.row_stride = logits.strides[0];
  a.tokens = tokens.as<int64_t>();
  a.token_stride = tokens.strides[0];
  a.parents = parents.as<int32_t>();
  a.parent_stride = parents.strides[0];
  a.path = static_cast<int32_t*>(data_of(path.get()));
  a.num_accepted = static_cast<int32_t*>(data_of(num_accepted.get()));
  a.output_tokens = static_cast<int64_t*>(data_of(output.get()));
  specc::accept_greedy(a);
  return {path, num_accepted, output};
}

std::tuple<Tensor, Tensor> tree_rows(Tensor cache_len_tensor, Tensor nodes_tensor,
                                     Tensor depths_tensor) {
  const View cache_len(cache_len_tensor.get()), nodes(nodes_tensor.get()),
      depths(depths_tensor.get());
  const int32_t i32 = aoti_torch_dtype_int32();
  check_index(cache_len, 1, i32, "cache_len is [B] int32");
  check_index(nodes, 1, i32, "nodes is [M] int32");
  check_index(depths, 1, i32, "depths is [M] int32");
  check(nodes.sizes[0] == depths.sizes[0], "nodes and depths agree");
  const int64_t batch = cache_len.sizes[0], count = nodes.sizes[0];
  Tensor slot(empty({batch * count}, i32)), position(empty({batch * count}, aoti_torch_dtype_int64()));
  int32_t* slots = static_cast<int32_t*>(data_of(slot.get()));
  int64_t* positions = static_cast<int64_t*>(data_of(position.get()));
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t length = cache_len.as<int32_t>()[b];
    for (int64_t i = 0; i < count; ++i) {
      slots[b * count + i] = length + nodes.as<int32_t>()[i];
      positions[b * count + i] = std::max<int64_t>(length + depths.as<int32_t>()[i], 0);
    }
  }
  return {slot, position};
}

std::tuple<Tensor, Tensor> commit_rows(Tensor path_tensor, Tensor cache_len_tensor,
                                       Tensor has_row_tensor) {
  const View path(path_tensor.get()), cache_len(cache_len_tensor.get()),
      has_row(has_row_tensor.get());
  const int32_t i32 = aoti_torch_dtype_int32();
  check_index(path, 2, i32, "path is [B, P] int32");
  check_index(cache_len, 1, i32, "cache_len is [B] int32");
  check_index(has_row, 1, i32, "has_row is [N] int32");
  check(path.sizes[0] == cache_len.sizes[0], "path and cache_len agree");
  const int64_t batch = path.sizes[0], width = path.sizes[1];
  Tensor source(empty({batch, width}, i32)), length(empty({batch}, i32));
  int32_t* sources = static_cast<int32_t*>(data_of(source.get()));
  int32_t* lengths = static_cast<int32_t*>(data_of(length.get()));
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t committed = cache_len.as<int32_t>()[b];
    lengths[b] = committed;
    for (int64_t i = b * width; i < (b + 1) * width; ++i) {
      const int32_t node = path.as<int32_t>()[i];
      check(node < has_row.sizes[0], "has_row has an entry for each node");
      const bool is_kept = node >= 0 && has_row.as<int32_t>()[node] != 0;
      sources[i] = is_kept ? committed + node : -1;
      lengths[b] += is_kept;
    }
  }
  return {source, length};
}

Tensor next_tokens(Tensor last_tensor, Tensor output_tensor, Tensor accepted_tensor) {
  const View last(last_tensor.get()), output(output_tensor.get()), accepted(accepted_tensor.get());
  const int32_t i64 = aoti_torch_dtype_int64();
  check_index(last, 2, i64, "last_tokens is [B, 2] int64");
  check_index(output, 2, i64, "output_tokens is [B, P] int64");
  check_index(accepted, 1, aoti_torch_dtype_int32(), "num_accepted is [B] int32");
  const int64_t batch = last.sizes[0], width = output.sizes[1];
  check(last.sizes[1] == 2 && output.sizes[0] == batch && accepted.sizes[0] == batch,
        "last_tokens, output_tokens and num_accepted agree");
  Tensor out(empty({batch, 2}, i64));
  int64_t* pairs = static_cast<int64_t*>(data_of(out.get()));
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t count = accepted.as<int32_t>()[b];
    check(0 <= count && count < width, "num_accepted is less than P");
    const int64_t* row = output.as<int64_t>() + b * width;
    pairs[2 * b] = count > 0 ? row[count - 1] : last.as<int64_t>()[2 * b + 1];
    pairs[2 * b + 1] = row[count];
  }
  return out;
}

void commit_kv(Tensor slab_tensor, Tensor source_tensor, Tensor target_tensor,
               Tensor table_tensor) {
  const View slab(slab_tensor.get()), source(source_tensor.get()), target(target_tensor.get()),
      table(table_tensor.get());
  check(slab.dim == 6 && slab.is_contiguous(), "slab is [L, 2, blocks, block_size, HK, D]");
  check_index(table, 2, aoti_torch_dtype_int32(), "block_table is [B, n] int32");
  check(source.dim == 2 && target.dim == 2 && source.sizes[0] == table.sizes[0] &&
            target.sizes[0] == table.sizes[0] && source.sizes[1] == target.sizes[1],
        "source and target are [B, P]");
  const std::vector<int64_t> from = slots_of(source, "source is contiguous, of int32 or int64"),
                             to = slots_of(target, "target is contiguous, of int32 or int64");
  const int64_t item = to_dtype(slab) == specc::DType::kFloat32 ? 4 : 2;
  specc::commit_kv({slab.data, slab.sizes[0] * slab.sizes[1], slab.sizes[2], slab.sizes[3],
                    slab.sizes[4] * slab.sizes[5] * item, table.sizes[0], source.sizes[1],
                    from.data(), to.data(), table.as<int32_t>(), table.sizes[1]});
}

AtenTensorHandle handle_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->get() : nullptr;
}

Tensor boxed_tree_attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache,
                            Tensor q_start, Tensor position, Tensor slot, Tensor cache_len,
                            std::optional<Tensor> ancestors, Tensor block_table, double scale,
                            int64_t window, int64_t sink) {
  return Tensor(tree_attention(q.get(), k.get(), v.get(), k_cache.get(), v_cache.get(),
                               q_start.get(), position.get(), slot.get(), cache_len.get(),
                               handle_of(ancestors), block_table.get(), scale, window, sink));
}

Tensor boxed_linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  return Tensor(linear(x.get(), weight.get(), handle_of(bias)));
}

// AOTInductor's code reads a code, not an exception.
template <typename F>
AOTITorchError guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace

// A namespace of their own: loading this library changes nothing for the eager graphs, which call
// the oracles as `specc::`. The schemas are those of kernels/ops.py.
STABLE_TORCH_LIBRARY(specc_cpu, library) {
  library.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors, "
      "Tensor block_table, *, float scale, int window=0, int sink=0) -> Tensor");
  library.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("tree_expand(Tensor logits, int num_children) -> Tensor");
  library.def(
      "accept_greedy(Tensor logits, Tensor tokens, Tensor parents, int max_depth) -> "
      "(Tensor path, Tensor num_accepted, Tensor output_tokens)");
  library.def("commit_kv(Tensor(a!) slab, Tensor source, Tensor target, Tensor block_table) -> ()");
  library.def(
      "tree_rows(Tensor cache_len, Tensor nodes, Tensor depths) -> (Tensor slot, Tensor "
      "position)");
  library.def(
      "commit_rows(Tensor path, Tensor cache_len, Tensor has_row) -> (Tensor source, Tensor "
      "length)");
  library.def(
      "next_tokens(Tensor last_tokens, Tensor output_tokens, Tensor num_accepted) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("tree_attention", TORCH_BOX(&boxed_tree_attention));
  library.impl("linear", TORCH_BOX(&boxed_linear));
  library.impl("tree_expand", TORCH_BOX(&tree_expand));
  library.impl("accept_greedy", TORCH_BOX(&accept_greedy));
  library.impl("commit_kv", TORCH_BOX(&commit_kv));
  library.impl("tree_rows", TORCH_BOX(&tree_rows));
  library.impl("commit_rows", TORCH_BOX(&commit_rows));
  library.impl("next_tokens", TORCH_BOX(&next_tokens));
}

extern "C" {

// Declared to AOTInductor in kernels/native.py, C_SHIMS.
__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_tree_attention(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle k_cache,
    AtenTensorHandle v_cache, AtenTensorHandle q_start, AtenTensorHandle position,
    AtenTensorHandle slot, AtenTensorHandle cache_len, AtenTensorHandle* ancestors,
    AtenTensorHandle block_table, double scale, int64_t window, int64_t sink,
    AtenTensorHandle* result) {
  return guarded([&] {
    *result = tree_attention(q, k, v, k_cache, v_cache, q_start, position, slot, cache_len,
                             ancestors == nullptr ? nullptr : *ancestors, block_table, scale,
                             window, sink);
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
    AtenTensorHandle* result) {
  return guarded([&] { *result = linear(x, weight, bias == nullptr ? nullptr : *bias); });
}

__attribute__((visibility("default"))) float specc_sum_floats(const float* data, int64_t count,
                                                             int threads) {
  return specc::sum_floats(data, count, threads);
}
}
