// specc::tree_attention on a CPU: flash attention over tiles of 64 keys.
//
// An item is one sequence's block of query rows: the queries of some tokens, all heads of one KV
// head packed together, so that a tile of K and V is read once for all of them. Per tile, keys
// are transposed into a panel, scores are a small matrix product, each token's visible keys are
// one 64-bit word, and the softmax is computed online (arXiv:2205.14135). All tiles of all items
// and heads form one line, which threads cut into pieces of equal cost; partial results of an item
// that was cut are merged (arXiv:2311.01282), whatever the lengths of the batch.
//
// Rows of the cache that no token of an item sees may hold NaN: they are replaced by a row of
// zeros before any arithmetic.

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "tree_attention_plan.h"
#include "vec.h"

namespace specc {
namespace {

using namespace attention;
using namespace vec;

// Cost of a thread's share, about 10 microseconds: entering a parallel region takes a few.
constexpr int64_t kMinCost = 800000;

// No score comes near these; -inf would make NaN of a difference.
constexpr float kNothing = -1e30f;  // maximum of no scores
constexpr float kMasked = -3e38f;   // score of a key that is masked: 2^(kMasked - kNothing) is 0

template <class T>
void prefetch(const T* row, int64_t size) {
  const char* p = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < size * sizeof(T); at += 64) __builtin_prefetch(p + at, 0, 3);
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Softmax numerators so far, and per row the maximum score and the sum of weights by lane.
struct Accumulator {
  float *values, *max, *sum;
  static int64_t size(int64_t rows, int64_t width) { return rows * (width + 2 * kWidth); }
  Accumulator(float* storage, int64_t rows, int64_t width)
      : values(storage), max(storage + rows * width), sum(max + rows * kWidth) {}
};

template <class T>
class Worker {
 public:
  // what queries and keys are multiplied in: float, or pairs of bfloat16
  using Key = std::conditional_t<std::is_same_v<T, BFloat16> && kHasPairs, Pair, float>;
  static constexpr bool kPairs = std::is_same_v<Key, Pair>;

  Worker(const TreeAttention& a, Plan& plan)
      : a_(a),
        plan_(plan),
        group_(a.num_heads / a.num_kv_heads),
        depth_(kPairs ? (a.head_dim + 1) / 2 : a.head_dim),
        width_(round_up(a.value_dim, kWidth)),
        partial_size_(Accumulator::size(plan.max_rows, width_)) {
    // per thread, and only ever grows
    static thread_local std::vector<float> storage;
    const int64_t rows = plan.max_rows, dim = std::max(a.head_dim, width_);
    const int64_t parts[] = {round_up(dim, 16), kTile * depth_, round_up(rows * depth_, 16),
                             rows * kTile, kTile * width_, partial_size_};
    int64_t total = 16;
    for (int64_t part : parts) total += part;
    if (static_cast<int64_t>(storage.size()) < total) storage.resize(total);
    float* p = storage.data();
    while (reinterpret_cast<uintptr_t>(p) % 64) ++p;
    float* at[6];
    for (int i = 0; i < 6; p += parts[i++]) at[i] = p;
    zeros_ = at[0], keys_ = reinterpret_cast<Key*>(at[1]), queries_ = reinterpret_cast<Key*>(at[2]);
    scores_ = at[3], floats_ = at[4], own_ = at[5];
    std::memset(zeros_, 0, parts[0] * sizeof(float));
  }

  // Write K and V of tokens [first, last) to the cache, and the output of dead tokens.
  void write(int64_t first, int64_t last);
  // Attend from one place of the line to another; what is cut goes to this thread's partials.
  void attend(Place begin, Place end, int64_t thread);
  // Complete the item that this thread began and the next ones went on with.
  void merge(Place begin, Place end, int64_t thread, int64_t threads);

 private:
  struct Rows {
    int64_t count;
    const T *keys[kTile], *values[kTile];
  };
  void clear_output(int64_t token) {
    T* out = static_cast<T*>(a_.out) + token * a_.out_token_stride;
    for (int64_t h = 0; h < a_.num_heads; ++h)
      std::memset(out + h * a_.out_head_stride, 0, a_.value_dim * sizeof(T));
  }
  void tiles(const Item& item, int64_t head, int64_t first, int64_t last, Accumulator to);
  uint64_t visible(const Item& item, int64_t token, int64_t tile) const;
  void find_rows(const Item& item, int64_t head, int64_t index, Rows* rows) const;
  void load_queries(const Item& item, int64_t head);
  void transpose_keys(const Rows& rows, int64_t count, const Rows& next);
  bool softmax(float* scores, int64_t columns, uint64_t bits, float* max, float* sum, float* alpha);
  void finish(const Item& item, int64_t head, Accumulator from);
  Accumulator partial(int64_t thread, int which) const {
    float* p = plan_.partial.data() + (2 * thread + which) * partial_size_;
    return Accumulator(p, plan_.max_rows, width_);
  }

  const TreeAttention& a_;
  Plan& plan_;
  const int64_t group_, depth_, width_, partial_size_;
  float *zeros_, *scores_, *floats_, *own_;
  Key *keys_, *queries_;
  uint64_t bits_[kMaxRows];
  Rows rows_[2];  // of this tile and of the next
};

template <class T>
void Worker<T>::write(int64_t first, int64_t last) {
  // tokens behind those of the last sequence are nobody's
  for (int64_t t = std::max<int64_t>(first, a_.q_start[a_.batch]); t < last; ++t) clear_output(t);
  for (int64_t b = 0; b < a_.batch; ++b) {
    const int64_t begin = std::max<int64_t>(first, a_.q_start[b]);
    const int64_t end = std::min<int64_t>(last, a_.q_start[b + 1]);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a_.slot[t];
      if (slot < 0) {
        clear_output(t);
        continue;
      }
      const int64_t block = a_.block_table[b * a_.blocks_per_sequence + slot / a_.block_size];
      const int64_t row = slot % a_.block_size;
      T* to_k = static_cast<T*>(a_.k_cache) + block * a_.k_block_stride + row * a_.k_row_stride;
      T* to_v = static_cast<T*>(a_.v_cache) + block * a_.v_block_stride + row * a_.v_row_stride;
      const T* k = static_cast<const T*>(a_.k) + t * a_.k_token_stride;
      const T* v = static_cast<const T*>(a_.v) + t * a_.v_token_stride;
      for (int64_t h = 0; h < a_.num_kv_heads; ++h) {
        std::memcpy(to_k + h * a_.k_cache_head_stride, k + h * a_.k_head_stride,
                    a_.head_dim * sizeof(T));
        std::memcpy(to_v + h * a_.v_cache_head_stride, v + h * a_.v_head_stride,
                    a_.value_dim * sizeof(T));
      }
    }
  }
}

template <class T>
uint64_t Worker<T>::visible(const Item& item, int64_t token, int64_t tile) const {
  const int64_t length = a_.cache_len[item.sequence], position = a_.position[token];
  uint64_t bits = range_bits(tile, 0, a_.ancestors ? length : position + 1);
  if (a_.window)
    bits &= range_bits(tile, position - a_.window + 1, tile + kTile) | range_bits(tile, 0, a_.sink);
  if (a_.ancestors && tile + kTile > length)
    bits |= ancestor_bits(a_.ancestors + token * a_.num_words, a_.num_words, tile - length);
  return bits & range_bits(tile, 0, item.end);
}

// Where the rows of an item's tile lie, up to the item's end.
template <class T>
void Worker<T>::find_rows(const Item& item, int64_t head, int64_t index, Rows* rows) const {
  const int32_t* table = a_.block_table + item.sequence * a_.blocks_per_sequence;
  const T* k = static_cast<const T*>(a_.k_cache) + head * a_.k_cache_head_stride;
  const T* v = static_cast<const T*>(a_.v_cache) + head * a_.v_cache_head_stride;
  const int64_t tile = item.column(index);
  rows->count = std::clamp<int64_t>(item.end - tile, 0, kTile);
  int64_t block = tile / a_.block_size, row = tile % a_.block_size;
  for (int64_t i = 0; i < rows->count; ++block, row = 0) {
    const int64_t last = std::min(rows->count, i + a_.block_size - row);
    const T* key = k + table[block] * a_.k_block_stride + row * a_.k_row_stride;
    const T* value = v + table[block] * a_.v_block_stride + row * a_.v_row_stride;
    for (; i < last; ++i, key += a_.k_row_stride, value += a_.v_row_stride)
      rows->keys[i] = key, rows->values[i] = value;
  }
}

template <class T>
void Worker<T>::load_queries(const Item& item, int64_t head) {
  Key* to = queries_;
  for (int64_t i = 0; i < item.tokens; ++i) {
    const T* q = static_cast<const T*>(a_.q) + plan_.live[item.first + i] * a_.q_token_stride;
    for (int64_t g = 0; g < group_; ++g, to += depth_) {
      const T* row = q + (head * group_ + g) * a_.q_head_stride;
      if constexpr (kPairs) {
        to[depth_ - 1].bits = 0;
        std::memcpy(to, row, a_.head_dim * sizeof(T));
      } else {
        for (int64_t d = 0; d < a_.head_dim; ++d) to[d] = to_float(row[d]);
      }
    }
  }
}

// keys_[d][i] = rows.keys[i][d] for `count` keys, a multiple of kWidth; meanwhile the next tile is
// fetched: hardware foresees neither the blocks of a paged cache nor the gaps between heads.
template <class T>
void Worker<T>::transpose_keys(const Rows& rows, int64_t count, const Rows& next) {
  using Lane = std::conditional_t<kPairs, float, T>;  // a pair moves as one lane
  const int64_t whole = (kPairs ? a_.head_dim / 2 : a_.head_dim) / kWidth * kWidth;
  for (int64_t i = 0; i < count; i += kWidth) {
    for (int64_t r = i; r < std::min(i + kWidth, next.count); ++r) {
      prefetch(next.keys[r], a_.head_dim);
      prefetch(next.values[r], a_.value_dim);
    }
    for (int64_t d = 0; d < whole; d += kWidth) {
      Float square[kWidth];
      for (int r = 0; r < kWidth; ++r)
        square[r] = load(reinterpret_cast<const Lane*>(rows.keys[i + r]) + d);
      transpose(square);
      for (int r = 0; r < kWidth; ++r)
        store(reinterpret_cast<float*>(keys_) + (d + r) * kTile + i, square[r]);
    }
    for (int64_t d = whole; d < depth_; ++d)
      for (int r = 0; r < kWidth; ++r) {
        const T* row = rows.keys[i + r];
        Key& to = keys_[d * kTile + i + r];
        if constexpr (kPairs) {
          const uint32_t high = 2 * d + 1 < a_.head_dim ? row[2 * d + 1].bits : 0;
          to.bits = row[2 * d].bits | high << 16;
        } else {
          to = to_float(row[d]);
        }
      }
  }
}

// Replace scores by weights 2^(score - max) and update the row's maximum and sum; true if the
// maximum grew, so that what was added before is to be multiplied by alpha.
template <class T>
bool Worker<T>::softmax(float* scores, int64_t columns, uint64_t bits, float* max, float* sum,
                        float* alpha) {
  const Float scale = splat(a_.scale * 1.44269504088896f);  // log2(e): weights are powers of two
  Float x[kTile / kWidth], best = splat(kNothing);
  const int64_t count = columns / kWidth;
  for (int64_t j = 0; j < count; ++j) {
    x[j] = select(bits >> (j * kWidth), load(scores + j * kWidth) * scale, splat(kMasked));
    best = vec::max(best, x[j]);
  }
  const float before = *max;
  const float now = std::max(before, vec::max(best));
  Float total = load(sum);
  if (now > before) {
    *max = now;
    const Float factor = exp2_of_nonpositive(splat(before - now));
    *alpha = factor[0];
    total *= factor;
  }
  for (int64_t j = 0; j < count; ++j) {
    x[j] = exp2_of_nonpositive(x[j] - now);
    total += x[j];
    store(scores + j * kWidth, x[j]);
  }
  store(sum, total);
  return now > before;
}

template <class T>
void Worker<T>::tiles(const Item& item, int64_t head, int64_t first, int64_t last,
                      Accumulator to) {
  const int64_t rows = item.tokens * group_;
  load_queries(item, head);
  std::memset(to.values, 0, rows * width_ * sizeof(float));
  std::memset(to.sum, 0, rows * kWidth * sizeof(float));
  std::fill(to.max, to.max + rows, kNothing);
  // rows that end within a register, or that many row blocks read, are converted once
  const bool convert = width_ != a_.value_dim ||
                       (!std::is_same_v<T, float> && rows > 2 * kBlockRows);
  const T* zeros = reinterpret_cast<const T*>(zeros_);
  find_rows(item, head, first, &rows_[first % 2]);
  for (int64_t index = first; index < last; ++index) {
    const int64_t tile = item.column(index);
    Rows& current = rows_[index % 2];
    Rows& next = rows_[(index + 1) % 2];
    next.count = 0;
    if (index + 1 < last) find_rows(item, head, index + 1, &next);
    uint64_t seen = 0;
    for (int64_t i = 0; i < item.tokens; ++i)
      seen |= bits_[i] = visible(item, plan_.live[item.first + i], tile);
    if (!seen) continue;
    const int64_t keys = 64 - __builtin_clzll(seen);
    const int64_t columns = round_up(keys, kWidth);
    for (int64_t i = 0; i < columns; ++i)
      if (!(seen >> i & 1)) current.keys[i] = current.values[i] = zeros;
    transpose_keys(current, columns, next);
    const Key* panel = keys_;
    multiply<false>(queries_, depth_, rows, [panel](int64_t d) { return panel + d * kTile; },
                    depth_, scores_, kTile, columns);
    for (int64_t r = 0; r < rows; ++r) {
      const uint64_t bits = bits_[r / group_];
      float* row = scores_ + r * kTile;
      float alpha;
      if (!bits) {
        std::memset(row, 0, columns * sizeof(float));
      } else if (softmax(row, columns, bits, to.max + r, to.sum + r * kWidth, &alpha)) {
        float* values = to.values + r * width_;
        for (int64_t j = 0; j < width_; j += kWidth)
          store(values + j, load(values + j) * splat(alpha));
      }
    }
    if (convert) {
      for (int64_t i = 0; i < keys; ++i) {
        float* row = floats_ + i * width_;
        for (int64_t j = 0; j < a_.value_dim; ++j) row[j] = to_float(current.values[i][j]);
        for (int64_t j = a_.value_dim; j < width_; ++j) row[j] = 0;
      }
      const float* floats = floats_;
      const int64_t width = width_;
      multiply<true>(scores_, kTile, rows, [=](int64_t i) { return floats + i * width; }, keys,
                     to.values, width_, width_);
    } else {
      const T* const* values = current.values;
      multiply<true>(scores_, kTile, rows, [values](int64_t i) { return values[i]; }, keys,
                     to.values, width_, width_);
    }
  }
}

template <class T>
void Worker<T>::finish(const Item& item, int64_t head, Accumulator from) {
  const int64_t rows = item.tokens * group_;
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = 1 / vec::sum(load(from.sum + r * kWidth));
    T* out = static_cast<T*>(a_.out) + (head * group_ + r % group_) * a_.out_head_stride +
             plan_.live[item.first + r / group_] * a_.out_token_stride;
    for (int64_t d = 0; d < a_.value_dim; ++d)
      from_float(from.values[r * width_ + d] * factor, out + d);
  }
}

template <class T>
void Worker<T>::attend(Place begin, Place end, int64_t thread) {
  for (Place at = begin;;) {
    const bool is_last = at.same_unit(end);
    if (is_last && at.tile == end.tile) return;
    const Item& item = plan_.items[at.item];
    const int64_t last = is_last ? end.tile : item.num_tiles;
    if (at.tile == 0 && last == item.num_tiles) {
      const Accumulator own(own_, plan_.max_rows, width_);
      tiles(item, at.head, 0, last, own);
      finish(item, at.head, own);
    } else {
      tiles(item, at.head, at.tile, last, partial(thread, at.tile == 0));
    }
    if (is_last) return;
    at.tile = 0;
    if (++at.head == a_.num_kv_heads) at.head = 0, ++at.item;
  }
}

template <class T>
void Worker<T>::merge(Place begin, Place end, int64_t thread, int64_t threads) {
  const bool began = begin.tile == 0 || !begin.same_unit(end);
  if (end.tile == 0 || !began) return;
  const Item& item = plan_.items[end.item];
  const int64_t rows = item.tokens * group_;
  const Accumulator to = partial(thread, 1);
  Place from = end;
  for (int64_t other = thread + 1; other < threads && from.same_unit(end); ++other) {
    const Place next = plan_.place(plan_.cost * (other + 1) / threads);
    if (!(next.same_unit(from) && next.tile == from.tile)) {
      const Accumulator part = partial(other, 0);
      for (int64_t r = 0; r < rows; ++r) {
        const float max = std::max(to.max[r], part.max[r]);
        const Float old_factor = exp2_of_nonpositive(splat(to.max[r] - max));
        const Float factor = exp2_of_nonpositive(splat(part.max[r] - max));
        to.max[r] = max;
        const auto add = [&](float* x, const float* y) {
          store(x, load(x) * old_factor + load(y) * factor);
        };
        add(to.sum + r * kWidth, part.sum + r * kWidth);
        for (int64_t j = r * width_; j < (r + 1) * width_; j += kWidth)
          add(to.values + j, part.values + j);
      }
    }
    from = next;
  }
  finish(item, end.head, to);
}

template <class T>
void run(const TreeAttention& a, int num_threads) {
  static thread_local Plan plan_of_thread;
  Plan& plan = plan_of_thread;  // of this thread, also in the region below
  plan.build(a);
  const int threads =
      static_cast<int>(std::clamp<int64_t>(plan.cost / kMinCost, 1, std::max(num_threads, 1)));
  if (threads == 1) {
    Worker<T> worker(a, plan);
    worker.write(0, a.num_tokens);
    worker.attend({}, plan.place(plan.cost), 0);
    return;
  }
  const int64_t width = round_up(a.value_dim, kWidth);
  const size_t size = 2 * threads * Accumulator::size(plan.max_rows, width);
  if (plan.partial.size() < size) plan.partial.resize(size);
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
    Worker<T> worker(a, plan);
    worker.write(a.num_tokens * thread / count, a.num_tokens * (thread + 1) / count);
    // a token sees rows that other threads write
#pragma omp barrier
    const Place begin = plan.place(plan.cost * thread / count);
    const Place end = plan.place(plan.cost * (thread + 1) / count);
    worker.attend(begin, end, thread);
#pragma omp barrier
    worker.merge(begin, end, thread, count);
  }
}

}  // namespace

void tree_attention(const TreeAttention& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    run<float>(a, num_threads);
  else
    run<BFloat16>(a, num_threads);
}

}  // namespace specc
