// specc::tree_attention: its kernel as an operator of tensors.
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

}  // namespace

SPECC_OPERATOR("specc::tree_attention", tree_attention);

}  // namespace specc::operators
