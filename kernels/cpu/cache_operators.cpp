// What a layer does with its caches, as operators of tensors: rotary embedding and writes, then
// attention to what is there.
#include <algorithm>
#include <limits>

#include "attention_tensors.h"
#include "fused.h"
#include "operands.h"
#include "threads.h"

namespace specc::operators {
namespace {

void check_heads(const Tensor& x, const char* what) { check(x.dim == 3 && x.is_dense_row(), what); }

void check_caches(const Tensor& like, const Tensor& k_cache, const Tensor& v_cache) {
  for (const Tensor* cache : {&k_cache, &v_cache}) {
    check(cache->dim == 4 && cache->is_dense_row(),
          "caches are [blocks, block_size, HK, columns], rows contiguous");
    check(cache->dtype == like.dtype || cache->dtype == kInt8,
          "rows and caches have one dtype, or both caches int8");
    check(cache->sizes[1] >= 1, "a block has 1 row or more");
  }
  check(k_cache.dtype == v_cache.dtype && k_cache.sizes[1] == v_cache.sizes[1] &&
            k_cache.sizes[2] == v_cache.sizes[2],
        "both caches have the same dtype, heads and rows in a block");
}

WriteKV write_of(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                 const Tensor& q_start, const Tensor& slot, const Tensor& block_table,
                 bool values_in_keys) {
  check_heads(k, "k is [HK, Nt, D], rows contiguous");
  check_heads(v, "v is [HK, Nt, DV], rows contiguous");
  check_caches(k, k_cache, v_cache);
  WriteKV a{};
  a.dtype = to_dtype(k);
  a.holds_int8 = k_cache.dtype == kInt8;
  a.num_kv_heads = k.sizes[0];
  a.num_tokens = k.sizes[1];
  a.head_dim = k.sizes[2];
  a.value_dim = v.sizes[2];
  check(a.head_dim > 0 && a.value_dim > 0, "heads have 1 element or more");
  check(v.dtype == k.dtype && v.sizes[0] == a.num_kv_heads && v.sizes[1] == a.num_tokens,
        "k and v agree");
  check(columns_of(k_cache) == a.head_dim && columns_of(v_cache) == a.value_dim &&
            k_cache.sizes[2] == a.num_kv_heads,
        "the caches fit k and v");
  a.k = k.data;
  a.k_head_stride = k.strides[0];
  a.k_token_stride = k.strides[1];
  a.k_cache = k_cache.data;
  a.k_block_stride = k_cache.strides[0];
  a.k_row_stride = k_cache.strides[1];
  a.k_cache_head_stride = k_cache.strides[2];
  a.num_blocks = k_cache.sizes[0];
  if (values_in_keys) {
    check(!a.holds_int8 && a.value_dim <= a.head_dim, "values are the first columns of their keys");
  } else {
    a.v = v.data;
    a.v_head_stride = v.strides[0];
    a.v_token_stride = v.strides[1];
    a.v_cache = v_cache.data;
    a.v_block_stride = v_cache.strides[0];
    a.v_row_stride = v_cache.strides[1];
    a.v_cache_head_stride = v_cache.strides[2];
    a.num_blocks = std::min(a.num_blocks, v_cache.sizes[0]);
  }
  a.block_size = k_cache.sizes[1];
  check_index(q_start, 1, kInt32, "q_start is [B + 1] int32");
  check_index(slot, 1, kInt32, "slot is [Nt] int32");
  check_index(block_table, 2, kInt32, "block_table is [B, n] int32");
  a.q_start = q_start.as<int32_t>();
  a.slot = slot.as<int32_t>();
  a.block_table = block_table.as<int32_t>();
  a.batch = block_table.sizes[0];
  a.blocks_per_sequence = block_table.sizes[1];
  check(q_start.sizes[0] == a.batch + 1 && slot.sizes[0] == a.num_tokens,
        "the metadata fits the tokens");
  check_apart(k_cache, {&q_start, &slot, &block_table});
  if (!values_in_keys) check_apart(v_cache, {&q_start, &slot, &block_table});
  check_bounds(a);
  return a;
}

void write_kv(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& q_start, const Tensor& slot, const Tensor& block_table,
              bool values_in_keys) {
  specc::write_kv(write_of(k, v, k_cache, v_cache, q_start, slot, block_table, values_in_keys),
                  kernel_threads());
}

Tensor rope_write(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                  const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache,
                  const Tensor& q_start, const Tensor& slot, const Tensor& block_table,
                  bool hadamard) {
  RopeWrite a{};
  a.hadamard = hadamard;
  check_heads(q, "q is [H, Nt, D], rows contiguous");
  a.write = write_of(k, v, k_cache, v_cache, q_start, slot, block_table, false);
  check(q.dtype == k.dtype && q.sizes[1] == a.write.num_tokens && q.sizes[2] == a.write.head_dim,
        "q and k agree");
  for (const Tensor* table : {&cos, &sin})
    check(table->dim == 2 && table->is_dense_row() && table->sizes[0] == a.write.num_tokens &&
              table->sizes[1] == cos.sizes[1] && table->dtype == cos.dtype,
          "cos and sin are [Nt, R], rows contiguous");
  a.num_heads = q.sizes[0];
  a.q = q.data;
  a.q_head_stride = q.strides[0];
  a.q_token_stride = q.strides[1];
  a.rotated = cos.sizes[1];
  check(a.rotated % 2 == 0 && a.rotated <= a.write.head_dim,
        "an even number of a head's columns is rotated");
  a.table_dtype = to_dtype(cos);
  a.cos = cos.data;
  a.cos_stride = cos.strides[0];
  a.sin = sin.data;
  a.sin_stride = sin.strides[0];
  const Tensor out = empty_heads(a.num_heads, a.write.num_tokens, a.write.head_dim, q.dtype);
  a.out = out.data;
  specc::rope_write(a, kernel_threads());
  return out;
}

Tensor attend(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& q_start,
              const Tensor& position, const Tensor& slot, const Tensor& cache_len,
              const Tensor* ancestors, const Tensor& block_table, const Tensor* sink_logits,
              const Tensor* slopes, double scale, int64_t window, int64_t sink, double softcap,
              bool values_in_keys, bool rounds_bias, int64_t most_rows, int64_t chunk) {
  check_heads(q, "q is [H, Nt, D], rows contiguous");
  check_caches(q, k_cache, v_cache);
  TreeAttention a{};
  a.dtype = to_dtype(q);
  a.holds_int8 = k_cache.dtype == kInt8;
  a.num_heads = q.sizes[0];
  a.num_kv_heads = k_cache.sizes[2];
  a.value_dim = columns_of(v_cache);
  check(a.num_heads > 0 && a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0,
        "the number of KV heads divides that of heads");
  check(q.sizes[2] > 0 && a.value_dim > 0 && columns_of(k_cache) == q.sizes[2],
        "the caches fit q");
  check(!values_in_keys || (!a.holds_int8 && a.value_dim <= q.sizes[2]),
        "values are the first columns of their keys");
  set_queries(a, q);
  set_key_cache(a, k_cache);
  const Tensor& values = values_in_keys ? k_cache : v_cache;
  a.v_cache = values.data;
  a.v_block_stride = values.strides[0];
  a.v_row_stride = values.strides[1];
  a.v_cache_head_stride = values.strides[2];
  a.num_blocks = std::min(k_cache.sizes[0], values.sizes[0]);
  set_tokens(a, q_start, position, slot, cache_len, ancestors, block_table);
  set_scores(a, scale, softcap, sink_logits, slopes, rounds_bias, q.dtype);
  set_visible(a, window, sink, most_rows, chunk);
  check_bounds(a);
  const Tensor out = empty_heads(a, q.dtype);
  specc::tree_attention(a, kernel_threads());
  return out;
}

Tensor hadamard(const Tensor& x) {
  Hadamard a{};
  a.dtype = to_dtype(x);
  a.rows = rows_of(x);
  a.n = x.sizes[x.dim - 1];
  a.x = x.data;
  const Tensor out = empty_as(x);
  a.out = out.data;
  specc::hadamard(a, kernel_threads());
  return out;
}

}  // namespace

SPECC_OPERATOR("specc::hadamard", hadamard);
SPECC_OPERATOR("specc::write_kv", write_kv);
SPECC_OPERATOR("specc::rope_write", rope_write);
SPECC_OPERATOR("specc::attend", attend);

}  // namespace specc::operators
