// specc::tree_attention and specc::block_mass: their kernels as operators of tensors.
#include <algorithm>
#include <limits>

#include "attention_tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

Tensor tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& q_start, const Tensor& position,
                      const Tensor& slot, const Tensor& cache_len, const Tensor* ancestors,
                      const Tensor& block_table, const Tensor* sink_logits, const Tensor* slopes,
                      double scale, int64_t window, int64_t sink, double softcap, bool rounds_bias,
                      int64_t most_rows, int64_t chunk) {
  check(q.dim == 3 && k.dim == 3 && v.dim == 3, "q, k and v have 3 dimensions");
  check(k_cache.dim == 4 && v_cache.dim == 4, "caches have 4 dimensions");
  for (const Tensor* x : {&q, &k, &v, &k_cache, &v_cache})
    check(x->is_dense_row(), "the last dimension of q, k, v and the caches is contiguous");
  check(k.dtype == q.dtype && v.dtype == q.dtype && k_cache.dtype == v_cache.dtype &&
            (k_cache.dtype == q.dtype || k_cache.dtype == kInt8),
        "q, k, v and the caches have one dtype, or both caches int8");
  const int64_t heads = q.sizes[0], tokens = q.sizes[1], kv_heads = k.sizes[0];
  check(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
        "the number of KV heads divides that of heads");
  check(q.sizes[2] > 0 && v.sizes[2] > 0, "heads have 1 element or more");
  check(k.sizes[1] == tokens && v.sizes[1] == tokens && v.sizes[0] == kv_heads, "q, k and v agree");
  check(k.sizes[2] == q.sizes[2] && columns_of(k_cache) == q.sizes[2] &&
            columns_of(v_cache) == v.sizes[2] && k_cache.sizes[2] == kv_heads &&
            v_cache.sizes[2] == kv_heads && k_cache.sizes[1] == v_cache.sizes[1],
        "the caches fit k and v");
  TreeAttention a{};
  a.dtype = to_dtype(q);
  a.holds_int8 = k_cache.dtype != q.dtype;
  a.num_heads = heads;
  a.num_kv_heads = kv_heads;
  a.value_dim = v.sizes[2];
  set_queries(a, q);
  a.k = k.data;
  a.k_head_stride = k.strides[0];
  a.k_token_stride = k.strides[1];
  a.v = v.data;
  a.v_head_stride = v.strides[0];
  a.v_token_stride = v.strides[1];
  set_key_cache(a, k_cache);
  a.v_cache = v_cache.data;
  a.v_block_stride = v_cache.strides[0];
  a.v_row_stride = v_cache.strides[1];
  a.v_cache_head_stride = v_cache.strides[2];
  a.num_blocks = std::min(k_cache.sizes[0], v_cache.sizes[0]);
  set_tokens(a, q_start, position, slot, cache_len, ancestors, block_table, {&k_cache, &v_cache});
  set_scores(a, scale, softcap, sink_logits, slopes, rounds_bias, q.dtype);
  set_visible(a, window, sink, most_rows, chunk);
  check_bounds(a);
  const Tensor out = empty_heads(a, q.dtype);
  specc::tree_attention(a, kernel_threads());
  return out;
}

void block_mass(const Tensor& q, const Tensor& k_cache, const Tensor& q_start,
                const Tensor& position, const Tensor& slot, const Tensor& cache_len,
                const Tensor* ancestors, const Tensor& block_table, const Tensor& mass,
                double scale) {
  check(mass.dim == 2 && mass.dtype == kFloat32 && mass.is_dense_row(), "mass is [M, C] float32");
  // nobody votes: the case of nearly all passes
  if (mass.sizes[1] == 0) return;
  check(q.dim == 3 && k_cache.dim == 4, "q has 3 dimensions, and the cache 4");
  check(q.is_dense_row() && k_cache.is_dense_row(),
        "the last dimension of q and the cache is contiguous");
  check(q.dtype == k_cache.dtype || k_cache.dtype == kInt8,
        "q and the cache have one dtype, or the cache int8");
  check(q.sizes[2] > 0 && columns_of(k_cache) == q.sizes[2], "the cache fits q");
  check(q.sizes[0] > 0 && k_cache.sizes[2] > 0 && q.sizes[0] % k_cache.sizes[2] == 0,
        "the number of KV heads divides that of heads");
  BlockMass a{};
  TreeAttention& pass = a.pass;
  pass.dtype = to_dtype(q);
  pass.holds_int8 = k_cache.dtype != q.dtype;
  pass.num_heads = q.sizes[0];
  pass.num_kv_heads = k_cache.sizes[2];
  set_queries(pass, q);
  set_key_cache(pass, k_cache);
  set_tokens(pass, q_start, position, slot, cache_len, ancestors, block_table, {&mass});
  pass.scale = static_cast<float>(scale);
  check(mass.sizes[0] >= pass.batch, "mass has a row for each sequence");
  a.mass = mass.as<float>();
  a.row_stride = mass.strides[0];
  a.columns = mass.sizes[1];
  specc::block_mass(a, kernel_threads());
}

}  // namespace

SPECC_OPERATOR("specc::tree_attention", tree_attention);
SPECC_OPERATOR("specc::block_mass", block_mass);

}  // namespace specc::operators
