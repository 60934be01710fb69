// specc::rope_write and specc::write_kv: what a pass writes to a layer's caches.
#include <cstring>
#include <type_traits>
#include <vector>

#include "fused.h"
#include "hadamard.h"
#include "kv_rows.h"
#include "lanes.h"

namespace specc {
namespace {

using vec::BFloat16;
using vec::by_sixteen;
using vec::load16;
using vec::Sixteen;
using vec::store16;

template <class T, class S>
void store_kv(const T* row, int64_t dim, S* to) {
  if constexpr (std::is_same_v<T, S>)
    std::memcpy(to, row, dim * sizeof(T));
  else
    store_row(row, dim, to);
}

// Of token t of sequence b.
template <class S>
S* row_in_cache(const WriteKV& a, void* cache, int64_t block_stride, int64_t row_stride, int64_t b,
                int64_t t) {
  const int64_t slot = a.slot[t];
  const int64_t block = a.block_table[b * a.blocks_per_sequence + slot / a.block_size];
  return static_cast<S*>(cache) + block * block_stride + slot % a.block_size * row_stride;
}

// each(b, t) for the tokens of [first, last); b is -1 for those that are nobody's.
template <class Each>
void for_each_token(const WriteKV& a, int64_t first, int64_t last, const Each& each) {
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t begin = std::max<int64_t>(first, a.q_start[b]);
    const int64_t end = std::min<int64_t>(last, a.q_start[b + 1]);
    for (int64_t t = begin; t < end; ++t) each(a.slot[t] < 0 ? -1 : b, t);
  }
  for (int64_t t = std::max<int64_t>(first, a.q_start[a.batch]); t < last; ++t) each(-1, t);
}

template <class T, class S>
void write_values(const WriteKV& a, int64_t b, int64_t t) {
  if (a.v == nullptr) return;
  S* to = row_in_cache<S>(a, a.v_cache, a.v_block_stride, a.v_row_stride, b, t);
  const T* v = static_cast<const T*>(a.v) + t * a.v_token_stride;
  for (int64_t h = 0; h < a.num_kv_heads; ++h)
    store_kv(v + h * a.v_head_stride, a.value_dim, to + h * a.v_cache_head_stride);
}

// (a, b) → (a · cos - b · sin, b · cos + a · sin), each half with its own columns of the tables.
template <class T, class Table>
void rotate(const T* x, int64_t dim, int64_t rotated, const Table* cos, const Table* sin, T* to) {
  const int64_t half = rotated / 2;
  by_sixteen(half, [&](int64_t i, auto count) {
    const Sixteen first = load16(x + i, count), second = load16(x + half + i, count);
    store16(to + i,
            first * load16(cos + i, count) - second * load16(sin + i, count), count);
    store16(to + half + i,
            second * load16(cos + half + i, count) + first * load16(sin + half + i, count), count);
  });
  if (dim > rotated) std::memcpy(to + rotated, x + rotated, (dim - rotated) * sizeof(T));
}

template <class T, class S, class Table>
void rope_tokens(const RopeWrite& a, int64_t first, int64_t last) {
  const WriteKV& w = a.write;
  static thread_local std::vector<T> of_thread;
  std::vector<T>& row = of_thread;
  if (static_cast<int64_t>(row.size()) < w.head_dim) row.resize(w.head_dim);
  for_each_token(w, first, last, [&](int64_t b, int64_t t) {
    const Table* cos = static_cast<const Table*>(a.cos) + t * a.cos_stride;
    const Table* sin = static_cast<const Table*>(a.sin) + t * a.sin_stride;
    const T* q = static_cast<const T*>(a.q) + t * a.q_token_stride;
    T* out = static_cast<T*>(a.out) + t * a.num_heads * w.head_dim;
    for (int64_t h = 0; h < a.num_heads; ++h) {
      T* to = out + h * w.head_dim;
      rotate(q + h * a.q_head_stride, w.head_dim, a.rotated, cos, sin, to);
      if (a.hadamard) hadamard_row(to, w.head_dim, to);
    }
    if (b < 0) return;
    S* to = row_in_cache<S>(w, w.k_cache, w.k_block_stride, w.k_row_stride, b, t);
    const T* k = static_cast<const T*>(w.k) + t * w.k_token_stride;
    for (int64_t h = 0; h < w.num_kv_heads; ++h) {
      rotate(k + h * w.k_head_stride, w.head_dim, a.rotated, cos, sin, row.data());
      if (a.hadamard) hadamard_row(row.data(), w.head_dim, row.data());
      store_kv(row.data(), w.head_dim, to + h * w.k_cache_head_stride);
    }
    write_values<T, S>(w, b, t);
  });
}

template <class T, class S>
void write_tokens(const WriteKV& a, int64_t first, int64_t last) {
  for_each_token(a, first, last, [&](int64_t b, int64_t t) {
    if (b < 0) return;
    S* to = row_in_cache<S>(a, a.k_cache, a.k_block_stride, a.k_row_stride, b, t);
    const T* k = static_cast<const T*>(a.k) + t * a.k_token_stride;
    for (int64_t h = 0; h < a.num_kv_heads; ++h)
      store_kv(k + h * a.k_head_stride, a.head_dim, to + h * a.k_cache_head_stride);
    write_values<T, S>(a, b, t);
  });
}

template <class T, class S>
void rope_of(const RopeWrite& a, int num_threads) {
  const int64_t columns = (a.num_heads + 2 * a.write.num_kv_heads) * a.write.head_dim;
  share_rows(a.write.num_tokens, columns, num_threads, [&](int64_t first, int64_t last) {
    if (a.table_dtype == DType::kFloat32)
      rope_tokens<T, S, float>(a, first, last);
    else
      rope_tokens<T, S, BFloat16>(a, first, last);
  });
}

template <class T, class S>
void write_of(const WriteKV& a, int num_threads) {
  const int64_t columns = a.num_kv_heads * (a.head_dim + a.value_dim);
  share_rows(a.num_tokens, columns, num_threads,
             [&](int64_t first, int64_t last) { write_tokens<T, S>(a, first, last); });
}

}  // namespace

void rope_write(const RopeWrite& a, int num_threads) {
  if (a.write.dtype == DType::kFloat32)
    return a.write.holds_int8 ? rope_of<float, int8_t>(a, num_threads)
                              : rope_of<float, float>(a, num_threads);
  return a.write.holds_int8 ? rope_of<BFloat16, int8_t>(a, num_threads)
                            : rope_of<BFloat16, BFloat16>(a, num_threads);
}

void write_kv(const WriteKV& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    return a.holds_int8 ? write_of<float, int8_t>(a, num_threads)
                        : write_of<float, float>(a, num_threads);
  return a.holds_int8 ? write_of<BFloat16, int8_t>(a, num_threads)
                      : write_of<BFloat16, BFloat16>(a, num_threads);
}

}  // namespace specc
