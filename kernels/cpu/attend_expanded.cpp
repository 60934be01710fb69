// specc::attend_expanded: latents of a sequence are gathered and multiplied by torch's products, and
// the kernel of specc::tree_attention goes over what comes of it, some heads at a time.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "attention_tensors.h"
#include "kernels.h"
#include "shims.h"
#include "tensors.h"
#include "threads.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

// Of keys and values of as many heads as fit, one at least; `passes/memory.py` counts them.
constexpr int64_t kExpandedBytes = 32 << 20;
constexpr int64_t kLatentsAtOnce = 1024;  // rows that are gathered before they are multiplied

// A tensor that ends with its name.
class Owned {
 public:
  explicit Owned(AtenTensorHandle handle) : handle_(handle) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { aoti_torch_delete_tensor_object(handle_); }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  char* data() const { return static_cast<char*>(data_of(handle_)); }

 private:
  AtenTensorHandle handle_;
};

struct Matrix {
  char* data;
  int64_t rows, columns, row_stride, column_stride;
};

struct Expansion {
  specc::TreeAttention a;  // of which k and v are not read
  int32_t dtype;
  int64_t item;  // bytes of a number
  int64_t rank, shared;
  const View *up_k, *up_v;

  AtenTensorHandle as_tensor(const Matrix& m) const {
    const int64_t sizes[] = {m.rows, m.columns}, strides[] = {m.row_stride, m.column_stride};
    AtenTensorHandle result = nullptr;
    call(aoti_torch_create_tensor_from_blob(m.data, 2, sizes, strides, 0, dtype,
                                            aoti_torch_device_type_cpu(), 0, &result));
    return result;
  }
  void multiply(const Matrix& to, const Matrix& x, const Matrix& y) const {
    const Owned out(as_tensor(to)), left(as_tensor(x)), right(as_tensor(y));
    call(aoti_torch_cpu_mm_out(out.get(), left.get(), right.get()));
  }
  // [R, N] of a head of up-projections [H, N, R].
  Matrix turned(const View& up, int64_t head) const {
    char* data = static_cast<char*>(up.data) + head * up.strides[0] * item;
    return {data, up.sizes[2], up.sizes[1], 1, up.strides[1]};
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
              char* values) const {
    const int64_t own = up_k->sizes[1], width = rank + shared;
    for (int64_t first = 0; first < rows; first += kLatentsAtOnce) {
      const int64_t count = std::min(kLatentsAtOnce, rows - first);
      gather(b, first, count, latents);
      const Matrix x{latents, count, rank, width, 1};
      for (int64_t h = 0; h < heads; ++h) {
        char* to_key = keys + (first * heads + h) * a.head_dim * item;
        char* to_value = values + (first * heads + h) * a.value_dim * item;
        multiply({to_key, count, own, heads * a.head_dim, 1}, x, turned(*up_k, head + h));
        multiply({to_value, count, a.value_dim, heads * a.value_dim, 1}, x,
                 turned(*up_v, head + h));
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
    const Owned latents(empty({std::min(kLatentsAtOnce, room), rank + shared}, dtype));
    const Owned keys(empty({room, at_once, a.head_dim}, dtype));
    const Owned values(empty({room, at_once, a.value_dim}, dtype));
    const int32_t start[] = {0, static_cast<int32_t>(count)}, block = 0;
    for (int64_t head = 0; head < a.num_heads; head += at_once) {
      const int64_t heads = std::min(at_once, a.num_heads - head);
      expand(b, rows, head, heads, latents.data(), keys.data(), values.data());
      specc::TreeAttention part = a;
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
      specc::tree_attention(part, specc::kernel_threads());
    }
  }
};

AtenTensorHandle attend_expanded(AtenTensorHandle absorbed_handle, AtenTensorHandle q_handle,
                                 AtenTensorHandle k_cache_handle, AtenTensorHandle up_k_handle,
                                 AtenTensorHandle up_v_handle, AtenTensorHandle q_start_handle,
                                 AtenTensorHandle position_handle, AtenTensorHandle slot_handle,
                                 AtenTensorHandle cache_len_handle,
                                 AtenTensorHandle ancestors_handle,
                                 AtenTensorHandle block_table_handle,
                                 AtenTensorHandle sink_logits_handle, int64_t most_rows,
                                 double scale, double softcap) {
  const View absorbed(absorbed_handle), q(q_handle), k_cache(k_cache_handle), up_k(up_k_handle),
      up_v(up_v_handle);
  check(absorbed.dim == 3 && q.dim == 3 && up_k.dim == 3 && up_v.dim == 3 && k_cache.dim == 4,
        "absorbed, q, up_k and up_v have 3 dimensions, and the cache 4");
  for (const View* x : {&absorbed, &q, &k_cache, &up_k, &up_v})
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
  // torch's products take rows and columns in any order, but none on top of another
  for (const View* up : {&up_k, &up_v})
    check(up->strides[1] >= rank, "rows of the up-projections do not overlap");
  check(softcap >= 0 && softcap <= std::numeric_limits<float>::max(),
        "softcap is a finite number of 0 or more");
  Expansion e{};
  specc::TreeAttention& a = e.a;
  a.dtype = to_dtype(q);
  a.num_heads = a.num_kv_heads = heads;
  a.num_tokens = tokens;
  a.head_dim = q.sizes[2];
  a.value_dim = up_v.sizes[1];
  a.q = q.data;
  a.q_head_stride = q.strides[0];
  a.q_token_stride = q.strides[1];
  a.k_cache = k_cache.data;
  a.k_block_stride = k_cache.strides[0];
  a.k_row_stride = k_cache.strides[1];
  a.num_blocks = k_cache.sizes[0];
  a.block_size = k_cache.sizes[1];
  set_tokens(a, View(q_start_handle), View(position_handle), View(slot_handle),
             View(cache_len_handle), ancestors_handle, View(block_table_handle));
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  if (sink_logits_handle != nullptr) {
    const View sink_logits(sink_logits_handle);
    check_index(sink_logits, 1, q.dtype, "sink_logits is [H] in the dtype of q");
    check(sink_logits.sizes[0] == heads, "sink_logits is [H]");
    a.sink_logits = sink_logits.data;
  }
  a.most_rows = most_rows;
  // beyond the slots that are checked no row is read
  specc::check_bounds(a);
  e.dtype = q.dtype;
  e.item = a.dtype == specc::DType::kFloat32 ? 4 : 2;
  e.rank = rank;
  e.shared = k_cache.sizes[3] - rank;
  e.up_k = &up_k;
  e.up_v = &up_v;
  const int64_t out_sizes[] = {heads, tokens, a.value_dim};
  const int64_t out_strides[] = {a.value_dim, heads * a.value_dim, 1};
  AtenTensorHandle handle = nullptr;
  call(aoti_torch_empty_strided(3, out_sizes, out_strides, q.dtype, aoti_torch_device_type_cpu(), 0,
                                &handle));
  Owned out(handle);
  a.out = out.data();
  a.out_head_stride = out_strides[0];
  a.out_token_stride = out_strides[1];
  const auto copy = [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t h = 0; h < heads; ++h)
        std::memcpy(out.data() + (t * heads + h) * a.value_dim * e.item,
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
  return out.release();
}

Tensor boxed_attend_expanded(Tensor absorbed, Tensor q, Tensor k_cache, Tensor up_k, Tensor up_v,
                             Tensor q_start, Tensor position, Tensor slot, Tensor cache_len,
                             std::optional<Tensor> ancestors, Tensor block_table,
                             std::optional<Tensor> sink_logits, int64_t most_rows, double scale,
                             double softcap) {
  return Tensor(attend_expanded(absorbed.get(), q.get(), k_cache.get(), up_k.get(), up_v.get(),
                                q_start.get(), position.get(), slot.get(), cache_len.get(),
                                handle_of(ancestors), block_table.get(), handle_of(sink_logits),
                                most_rows, scale, softcap));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def(
      "attend_expanded(Tensor absorbed, Tensor q, Tensor k_cache, Tensor up_k, Tensor up_v, "
      "Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors, "
      "Tensor block_table, Tensor? sink_logits=None, *, int most_rows, float scale, "
      "float softcap=0.0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("attend_expanded", TORCH_BOX(&boxed_attend_expanded));
}

// Declared to AOTInductor in kernels/native.py, C_SHIMS.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_attend_expanded(
    AtenTensorHandle absorbed, AtenTensorHandle q, AtenTensorHandle k_cache, AtenTensorHandle up_k,
    AtenTensorHandle up_v, AtenTensorHandle q_start, AtenTensorHandle position,
    AtenTensorHandle slot, AtenTensorHandle cache_len, AtenTensorHandle* ancestors,
    AtenTensorHandle block_table, AtenTensorHandle* sink_logits, int64_t most_rows, double scale,
    double softcap, AtenTensorHandle* result) {
  return specc::guarded([&] {
    *result = attend_expanded(absorbed, q, k_cache, up_k, up_v, q_start, position, slot, cache_len,
                              ancestors == nullptr ? nullptr : *ancestors, block_table,
                              sink_logits == nullptr ? nullptr : *sink_logits, most_rows, scale,
                              softcap);
  });
}
