// specc::attend_expanded: latents of a sequence are gathered and multiplied by the up-projections,
// and the kernel of specc::tree_attention goes over what comes of it, some heads at a time.
#include <algorithm>
#include <cstring>

#include "attention_tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

// Of keys and values of as many heads as fit, one at least; `passes/memory.py` counts them.
constexpr int64_t kExpandedBytes = 32 << 20;
constexpr int64_t kLatentsAtOnce = 1024;  // rows that are gathered before they are multiplied

struct Expansion {
  TreeAttention a;  // of which k and v are not read
  int64_t item;  // bytes of a number
  int64_t rank, shared;
  const Tensor *up_k, *up_v;

  // y = x · upᵀ of a head of up-projections [H, N, R]; rows of y are `stride` numbers apart.
  void multiply(const Tensor& up, int64_t head, const char* x, int64_t rows, char* y,
                int64_t stride, const Scratch& blocks) const {
    const char* data = up.as<char>() + head * up.strides[0] * item;
    const int threads = kernel_threads();
    pack_blocks({a.dtype, up.sizes[1], rank, data, up.strides[1], blocks.data()}, threads);
    Linear product{};
    product.dtype = a.dtype;
    product.rows = rows;
    product.n = up.sizes[1];
    product.k = rank;
    product.x = x;
    product.x_stride = rank + shared;
    product.w = blocks.data();
    product.y = y;
    product.y_stride = stride;
    specc::linear(&product, 1, threads);
  }

  void gather(int64_t b, int64_t first, int64_t count, char* to) const {
    const int64_t bytes = (rank + shared) * item;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = first + i;
      const int64_t block = a.block_table[b * a.blocks_per_sequence + slot / a.block_size];
      const int64_t row = block * a.k_block_stride + slot % a.block_size * a.k_row_stride;
      std::memcpy(to + i * bytes, static_cast<const char*>(a.k_cache) + row * item, bytes);
    }
  }

  // Keys [rows, heads, n + r] and values [rows, heads, DV] of some heads.
  void expand(int64_t b, int64_t rows, int64_t head, int64_t heads, char* latents, char* keys,
              char* values, const Scratch& blocks) const {
    const int64_t own = up_k->sizes[1], width = rank + shared;
    for (int64_t first = 0; first < rows; first += kLatentsAtOnce) {
      const int64_t count = std::min(kLatentsAtOnce, rows - first);
      gather(b, first, count, latents);
      for (int64_t h = 0; h < heads; ++h) {
        char* to_key = keys + (first * heads + h) * a.head_dim * item;
        char* to_value = values + (first * heads + h) * a.value_dim * item;
        multiply(*up_k, head + h, latents, count, to_key, heads * a.head_dim, blocks);
        multiply(*up_v, head + h, latents, count, to_value, heads * a.value_dim, blocks);
        for (int64_t i = 0; i < count; ++i)
          std::memcpy(to_key + (i * heads * a.head_dim + own) * item,
                      latents + (i * width + rank) * item, shared * item);
      }
    }
  }

  // Attend to what a sequence's latents expand to.
  void attend(int64_t b) const {
    const int64_t begin = a.q_start[b], count = a.q_start[b + 1] - begin;
    int64_t rows = 0;
    for (int64_t t = begin; t < begin + count; ++t)
      rows = std::max<int64_t>(rows, a.slot[t] + 1);
    // of dead tokens alone, outputs are still to be cleared: a row that nobody sees is enough
    const int64_t room = std::max<int64_t>(rows, 1);
    const int64_t head_bytes = room * (a.head_dim + a.value_dim) * item;
    const int64_t at_once = std::clamp<int64_t>(kExpandedBytes / head_bytes, 1, a.num_heads);
    const Scratch latents(std::min(kLatentsAtOnce, room) * (rank + shared) * item);
    const Scratch keys(room * at_once * a.head_dim * item);
    const Scratch values(room * at_once * a.value_dim * item);
    const Scratch blocks(
        bytes_of_blocks(a.dtype, std::max(up_k->sizes[1], up_v->sizes[1]), rank));
    const int32_t start[] = {0, static_cast<int32_t>(count)}, block = 0;
    for (int64_t head = 0; head < a.num_heads; head += at_once) {
      const int64_t heads = std::min(at_once, a.num_heads - head);
      expand(b, rows, head, heads, latents.data(), keys.data(), values.data(), blocks);
      TreeAttention part = a;
      const auto from = [&](const void* data, int64_t place) {
        return static_cast<const char*>(data) + place * item;
      };
      part.num_heads = part.num_kv_heads = heads;
      part.num_tokens = count;
      part.batch = 1;
      part.q = from(a.q, head * a.q_head_stride + begin * a.q_token_stride);
      part.k_cache = keys.data();
      part.k_row_stride = heads * a.head_dim;
      part.k_cache_head_stride = a.head_dim;
      part.v_cache = values.data();
      part.v_row_stride = heads * a.value_dim;
      part.v_cache_head_stride = a.value_dim;
      // one block, which holds the whole sequence
      part.k_block_stride = part.v_block_stride = 0;
      part.num_blocks = part.blocks_per_sequence = 1;
      part.block_size = room;
      part.block_table = &block;
      part.q_start = start;
      part.position = a.position + begin;
      part.slot = a.slot + begin;
      part.cache_len = a.cache_len + b;
      if (a.ancestors != nullptr) part.ancestors = a.ancestors + begin * a.num_words;
      if (a.sink_logits != nullptr) part.sink_logits = from(a.sink_logits, head);
      part.most_rows = 0;
      const int64_t place = head * a.out_head_stride + begin * a.out_token_stride;
      part.out = const_cast<char*>(from(a.out, place));
      specc::tree_attention(part, kernel_threads());
    }
  }
};

Tensor attend_expanded(const Tensor& absorbed, const Tensor& q, const Tensor& k_cache,
                       const Tensor& up_k, const Tensor& up_v, const Tensor& q_start,
                       const Tensor& position, const Tensor& slot, const Tensor& cache_len,
                       const Tensor* ancestors, const Tensor& block_table,
                       const Tensor* sink_logits, int64_t most_rows, double scale,
                       double softcap) {
  check(absorbed.dim == 3 && q.dim == 3 && up_k.dim == 3 && up_v.dim == 3 && k_cache.dim == 4,
        "absorbed, q, up_k and up_v have 3 dimensions, and the cache 4");
  for (const Tensor* x : {&absorbed, &q, &k_cache, &up_k, &up_v})
    check(x->is_dense_row() && x->dtype == q.dtype,
          "operands have one dtype, and the last dimension of each is contiguous");
  const int64_t heads = q.sizes[0], tokens = q.sizes[1], rank = up_k.sizes[2];
  check(most_rows >= 1, "most_rows is 1 or more");
  check(heads > 0 && absorbed.sizes[0] == heads && up_k.sizes[0] == heads &&
            up_v.sizes[0] == heads && absorbed.sizes[1] == tokens,
        "absorbed, q and the up-projections agree in heads and tokens");
  check(rank > 0 && up_v.sizes[2] == rank && up_k.sizes[1] > 0 && up_v.sizes[1] > 0 &&
            up_v.sizes[1] == absorbed.sizes[2],
        "up_k is [H, n, R], and up_v [H, DV, R]");
  check(k_cache.sizes[2] == 1 && k_cache.sizes[1] > 0 && k_cache.sizes[3] >= rank &&
            q.sizes[2] == up_k.sizes[1] + k_cache.sizes[3] - rank,
        "the cache has a row of R + r numbers for each slot, and q n + r columns");
  Expansion e{};
  TreeAttention& a = e.a;
  a.dtype = to_dtype(q);
  a.num_heads = a.num_kv_heads = heads;
  a.value_dim = up_v.sizes[1];
  set_queries(a, q);
  set_key_cache(a, k_cache);
  set_tokens(a, q_start, position, slot, cache_len, ancestors, block_table);
  a.scale = static_cast<float>(scale);
  set_softcap(a, softcap);
  set_sink_logits(a, sink_logits, q.dtype);
  a.most_rows = most_rows;
  // beyond the slots that are checked no row is read
  check_bounds(a);
  e.item = bytes_of(q.dtype);
  e.rank = rank;
  e.shared = k_cache.sizes[3] - rank;
  e.up_k = &up_k;
  e.up_v = &up_v;
  const Tensor out = empty_heads(a, q.dtype);
  const auto copy = [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t h = 0; h < heads; ++h)
        std::memcpy(out.as<char>() + (t * heads + h) * a.value_dim * e.item,
                    static_cast<const char*>(absorbed.data) +
                        (h * absorbed.strides[0] + t * absorbed.strides[1]) * e.item,
                    a.value_dim * e.item);
  };
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.leaves_out(b))
      e.attend(b);
    else
      copy(a.q_start[b], a.q_start[b + 1]);
  }
  copy(a.q_start[a.batch], tokens);
  return out;
}

}  // namespace

SPECC_OPERATOR("specc::attend_expanded", attend_expanded);

}  // namespace specc::operators
