// What a thread of specc::tree_attention does: writes rows, attends from one place of the line of
// tiles to another, and merges what was cut. Included after the pragma of tree_attention.cpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "kv_rows.h"
#include "team.h"
#include "tree_attention_ahead.h"
#include "tree_attention_plan.h"
#include "tree_attention_tile.h"
#include "vec.h"

namespace specc::attention {

using namespace vec;

// Cost of a thread's share, about 10 microseconds: entering a parallel region takes a few.
constexpr int64_t kMinCost = 800000;

// Softmax numerators so far, and per row the maximum score and the sum of weights by lane.
struct Accumulator {
  float *values, *max, *sum;
  static int64_t size(int64_t rows, int64_t width) { return rows * (width + 2 * kWidth); }
  Accumulator(float* storage, int64_t rows, int64_t width)
      : values(storage), max(storage + rows * width), sum(max + rows * kWidth) {}
  // The rows from `row` on.
  Accumulator from(int64_t row, int64_t width) const {
    Accumulator to = *this;
    to.values += row * width, to.max += row, to.sum += row * kWidth;
    return to;
  }
};

// A thread of a call: T of queries and outputs, `Tile` of the rows in the cache.
template <class T, class Tile>
class Worker {
 public:
  using S = typename Tile::Stored;

  Worker(const TreeAttention& a, Plan& plan)
      : a_(a),
        plan_(plan),
        group_(a.num_heads / a.num_kv_heads),
        width_(Tile::width(a.value_dim)),
        partial_size_(Accumulator::size(plan.max_unit_rows, width_)),
        tile_({a.head_dim, a.value_dim, plan.max_rows, plan.max_unit_rows}) {
    // per thread, and only ever grows
    static thread_local std::vector<float> storage;
    const int64_t dim = std::max(a.head_dim, width_) + kTile;
    const int64_t parts[] = {round_up(dim, 16), plan.max_rows * kTile,
                             round_up(partial_size_, 16), a.slopes ? kMaxRows * kTile : 0,
                             tile_.scratch()};
    int64_t total = 16;
    for (int64_t part : parts) total += part;
    if (static_cast<int64_t>(storage.size()) < total) storage.resize(total);
    float* p = storage.data();
    while (reinterpret_cast<uintptr_t>(p) % 64) ++p;
    zeros_ = p;
    std::memset(zeros_, 0, parts[0] * sizeof(float));
    scores_ = zeros_ + parts[0];
    own_ = scores_ + parts[1];
    places_ = own_ + parts[2];
    tile_.bind(places_ + parts[3]);
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
    const S *keys[kTile], *values[kTile];
  };
  // Query rows of an item, for the KV heads from `head` on that a tile is used for in turn.
  struct Unit {
    const Item& item;
    int64_t head, heads, rows;  // rows of one head
  };
  Unit unit(Place at) const {
    const Item& item = plan_.items[at.item];
    const int64_t head = item.first_head(at.unit, a_.num_kv_heads);
    return {item, head, item.first_head(at.unit + 1, a_.num_kv_heads) - head,
            item.tokens * group_};
  }
  static void write_row(const T* row, int64_t dim, S* to) {
    if constexpr (std::is_same_v<T, S>)
      std::memcpy(to, row, dim * sizeof(T));
    else
      store_row(row, dim, to);
  }
  // Adds what slopes give a row's scores; returns the factor that is left to multiply them by.
  float with_distances(const Unit& unit, int64_t head, int64_t r, float factor, float* row) const {
    if (a_.slopes == nullptr) return factor;
    const float slope = a_.slopes[head * group_ + r % group_];
    const float* keys = places_ + r / group_ * kTile;
    const auto token = static_cast<float>(a_.position[plan_.live[unit.item.first + r / group_]]);
    if (a_.rounds_bias)
      add_rounded_distances(row, factor, slope, a_.scale, keys, token);
    else
      add_distances(row, factor, slope, keys, token);
    return 1;
  }
  void clear_output(int64_t token) {
    T* out = static_cast<T*>(a_.out) + token * a_.out_token_stride;
    for (int64_t h = 0; h < a_.num_heads; ++h)
      std::memset(out + h * a_.out_head_stride, 0, a_.value_dim * sizeof(T));
  }
  void tiles(const Unit& unit, int64_t first, int64_t last, Accumulator to);
  void attend_tile(const Unit& unit, int64_t head, const Rows& rows, const char* const* next,
                   int64_t num_next, uint64_t seen, Accumulator to);
  uint64_t visible(const Item& item, int64_t token, int64_t tile) const;
  void find_rows(const Item& item, int64_t index, Rows* rows) const;
  void load_queries(const Unit& unit);
  void finish(const Unit& unit, Accumulator from);
  // What a row's sums are multiplied by, in the end and once, whoever summed which tiles.
  float share(float max, float sum, int64_t head) const {
    if (a_.sink_logits == nullptr) return 1 / sum;
    const float sink = to_float(static_cast<const T*>(a_.sink_logits)[head]) * 1.44269504088896f;
    const float most = std::max(max, sink);
    const float own = exp2_of_nonpositive(splat(max - most))[0];
    return own / (sum * own + exp2_of_nonpositive(splat(sink - most))[0]);
  }
  Accumulator partial(int64_t thread, int which) const {
    float* p = plan_.partial.data() + (2 * thread + which) * partial_size_;
    return Accumulator(p, plan_.max_unit_rows, width_);
  }

  const TreeAttention& a_;
  Plan& plan_;
  const int64_t group_, width_, partial_size_;
  Tile tile_;
  float *zeros_, *scores_, *own_;
  float* places_;  // of keys, as each token of an item sees them; where there are slopes
  uint64_t bits_[kMaxRows];
  Rows rows_[2];  // of this tile and of the next
};

template <class T, class Tile>
void Worker<T, Tile>::write(int64_t first, int64_t last) {
  // tokens after those of the last sequence are nobody's
  for (int64_t t = std::max<int64_t>(first, a_.q_start[a_.batch]); t < last; ++t) clear_output(t);
  for (int64_t b = 0; b < a_.batch; ++b) {
    const int64_t begin = std::max<int64_t>(first, a_.q_start[b]);
    const int64_t end = std::min<int64_t>(last, a_.q_start[b + 1]);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a_.slot[t];
      if (slot < 0 || a_.leaves_out(b)) clear_output(t);
      if (slot < 0 || a_.k == nullptr) continue;
      const int64_t block = a_.block_table[b * a_.blocks_per_sequence + slot / a_.block_size];
      const int64_t row = slot % a_.block_size;
      S* to_k = static_cast<S*>(a_.k_cache) + block * a_.k_block_stride + row * a_.k_row_stride;
      S* to_v = static_cast<S*>(a_.v_cache) + block * a_.v_block_stride + row * a_.v_row_stride;
      const T* k = static_cast<const T*>(a_.k) + t * a_.k_token_stride;
      const T* v = static_cast<const T*>(a_.v) + t * a_.v_token_stride;
      for (int64_t h = 0; h < a_.num_kv_heads; ++h) {
        write_row(k + h * a_.k_head_stride, a_.head_dim, to_k + h * a_.k_cache_head_stride);
        write_row(v + h * a_.v_head_stride, a_.value_dim, to_v + h * a_.v_cache_head_stride);
      }
    }
  }
}

template <class T, class Tile>
uint64_t Worker<T, Tile>::visible(const Item& item, int64_t token, int64_t tile) const {
  const int64_t length = a_.cache_len[item.sequence], position = a_.position[token];
  uint64_t bits = range_bits(tile, 0, a_.ancestors ? length : position + 1);
  if (a_.window)
    bits &= range_bits(tile, position - a_.window + 1, tile + kTile) | range_bits(tile, 0, a_.sink);
  if (a_.chunk) bits &= range_bits(tile, position - position % a_.chunk, tile + kTile);
  if (a_.ancestors && tile + kTile > length) {
    const int64_t* words = a_.ancestors + token * a_.num_words;
    uint64_t nodes = ancestor_bits(words, a_.num_words, tile - length);
    if (a_.chunk)
      nodes = last_of_path(words, a_.num_words, tile - length, nodes, position % a_.chunk + 1);
    bits |= nodes;
  }
  return bits & range_bits(tile, 0, item.end);
}

// Where the rows of an item's tile lie, up to the item's end; those of the first KV head.
template <class T, class Tile>
void Worker<T, Tile>::find_rows(const Item& item, int64_t index, Rows* rows) const {
  const int32_t* table = a_.block_table + item.sequence * a_.blocks_per_sequence;
  const int64_t tile = item.column(index);
  rows->count = std::clamp<int64_t>(item.end - tile, 0, kTile);
  int64_t block = tile / a_.block_size, row = tile % a_.block_size;
  for (int64_t i = 0; i < rows->count; ++block, row = 0) {
    const int64_t last = std::min(rows->count, i + a_.block_size - row);
    const S* key = static_cast<const S*>(a_.k_cache) + table[block] * a_.k_block_stride +
                   row * a_.k_row_stride;
    const S* value = static_cast<const S*>(a_.v_cache) + table[block] * a_.v_block_stride +
                     row * a_.v_row_stride;
    for (; i < last; ++i, key += a_.k_row_stride, value += a_.v_row_stride)
      rows->keys[i] = key, rows->values[i] = value;
  }
}

template <class T, class Tile>
void Worker<T, Tile>::load_queries(const Unit& unit) {
  const T* rows[kMaxRows];
  std::vector<const T*> many;
  const T** to = rows;
  if (unit.rows > kMaxRows) many.resize(unit.rows), to = many.data();
  for (int64_t head = unit.head; head < unit.head + unit.heads; ++head) {
    for (int64_t row = 0; row < unit.rows; ++row)
      to[row] = static_cast<const T*>(a_.q) +
                plan_.live[unit.item.first + row / group_] * a_.q_token_stride +
                (head * group_ + row % group_) * a_.q_head_stride;
    tile_.load_queries((head - unit.head) * unit.rows, to, unit.rows);
  }
}

// One tile of one KV head, whose rows these are; `next` are those of the next tile, as Ahead takes
// them.
template <class T, class Tile>
void Worker<T, Tile>::attend_tile(const Unit& unit, int64_t head, const Rows& rows,
                                  const char* const* next, int64_t num_next, uint64_t seen,
                                  Accumulator to) {
  const int64_t keys = 64 - __builtin_clzll(seen);
  Ahead ahead(next, num_next, Tile::row_size(a_.head_dim) * sizeof(S),
              Tile::row_size(a_.value_dim) * sizeof(S), tile_.work(unit.rows, keys));
  tile_.score((head - unit.head) * unit.rows, unit.rows, rows.keys, keys, scores_, ahead);
  const float factor = a_.softcap != 0 ? a_.softcap : a_.scale;
  for (int64_t r = 0; r < unit.rows; ++r) {
    const uint64_t bits = bits_[r / group_];
    float* row = scores_ + r * kTile;
    float alpha = 1;
    ahead.spend(kSoftmaxWork);
    if (bits && a_.softcap != 0) squash(row, a_.scale / a_.softcap);
    if (!bits) {
      std::memset(row, 0, kTile * sizeof(float));
    } else if (softmax(row, bits, with_distances(unit, head, r, factor, row), to.max + r, to.sum + r * kWidth, &alpha)) {
      float* values = to.values + r * width_;
      for (int64_t j = 0; j < width_; j += kWidth)
        store(values + j, load(values + j) * splat(alpha));
    }
  }
  tile_.add(scores_, unit.rows, rows.values, keys, to.values, ahead);
  ahead.finish();
}

template <class T, class Tile>
void Worker<T, Tile>::tiles(const Unit& unit, int64_t first, int64_t last, Accumulator to) {
  const Item& item = unit.item;
  const int64_t all_rows = unit.heads * unit.rows;
  load_queries(unit);
  std::memset(to.values, 0, all_rows * width_ * sizeof(float));
  std::memset(to.sum, 0, all_rows * kWidth * sizeof(float));
  std::fill(to.max, to.max + all_rows, kNothing);
  const S* zeros = reinterpret_cast<const S*>(zeros_);
  find_rows(item, first, &rows_[first % 2]);
  for (int64_t index = first; index < last; ++index) {
    const int64_t tile = item.column(index);
    const Rows& current = rows_[index % 2];
    Rows& next = rows_[(index + 1) % 2];
    next.count = 0;
    if (index + 1 < last) find_rows(item, index + 1, &next);
    uint64_t seen = 0;
    for (int64_t i = 0; i < item.tokens; ++i)
      seen |= bits_[i] = visible(item, plan_.live[item.first + i], tile);
    if (!seen) continue;
    if (a_.slopes != nullptr)
      for (int64_t i = 0; i < item.tokens; ++i)
        key_positions(a_, item.sequence, plan_.live[item.first + i], tile, places_ + i * kTile);
    Rows of_head;
    const char* next_of_head[2 * kTile];
    for (int64_t head = unit.head; head < unit.head + unit.heads; ++head) {
      const int64_t key = head * a_.k_cache_head_stride, value = head * a_.v_cache_head_stride;
      for (int64_t i = 0; i < kTile; ++i) {
        const bool is_seen = seen >> i & 1;
        of_head.keys[i] = is_seen ? current.keys[i] + key : zeros;
        of_head.values[i] = is_seen ? current.values[i] + value : zeros;
      }
      for (int64_t i = 0; i < next.count; ++i) {
        next_of_head[i] = reinterpret_cast<const char*>(next.keys[i] + key);
        next_of_head[next.count + i] = reinterpret_cast<const char*>(next.values[i] + value);
      }
      attend_tile(unit, head, of_head, next_of_head, next.count, seen,
                  to.from((head - unit.head) * unit.rows, width_));
    }
  }
}

template <class T, class Tile>
void Worker<T, Tile>::finish(const Unit& unit, Accumulator from) {
  for (int64_t r = 0; r < unit.heads * unit.rows; ++r) {
    const int64_t head = (unit.head + r / unit.rows) * group_ + r % group_;
    const int64_t token = plan_.live[unit.item.first + r % unit.rows / group_];
    const float factor = share(from.max[r], vec::sum(load(from.sum + r * kWidth)), head);
    const float* values = from.values + r * width_;
    T* out = static_cast<T*>(a_.out) + head * a_.out_head_stride + token * a_.out_token_stride;
    for (int64_t d = 0; d < a_.value_dim; ++d) from_float(values[tile_.place(d)] * factor, out + d);
  }
}

template <class T, class Tile>
void Worker<T, Tile>::attend(Place begin, Place end, int64_t thread) {
  for (Place at = begin;;) {
    const bool is_last = at.same_unit(end);
    if (is_last && at.tile == end.tile) return;
    const Unit now = unit(at);
    const int64_t last = is_last ? end.tile : now.item.num_tiles;
    if (at.tile == 0 && last == now.item.num_tiles) {
      const Accumulator own(own_, plan_.max_unit_rows, width_);
      tiles(now, 0, last, own);
      finish(now, own);
    } else {
      tiles(now, at.tile, last, partial(thread, at.tile == 0));
    }
    if (is_last) return;
    at.tile = 0;
    if (++at.unit == now.item.units) at.unit = 0, ++at.item;
  }
}

template <class T, class Tile>
void Worker<T, Tile>::merge(Place begin, Place end, int64_t thread, int64_t threads) {
  const bool began = begin.tile == 0 || !begin.same_unit(end);
  if (end.tile == 0 || !began) return;
  const Unit cut = unit(end);
  const Accumulator to = partial(thread, 1);
  Place from = end;
  for (int64_t other = thread + 1; other < threads && from.same_unit(end); ++other) {
    const Place next = plan_.place(plan_.cost * (other + 1) / threads);
    if (!(next.same_unit(from) && next.tile == from.tile)) {
      const Accumulator part = partial(other, 0);
      for (int64_t r = 0; r < cut.heads * cut.rows; ++r) {
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
  finish(cut, to);
}

template <class T, class Tile>
void run(const TreeAttention& a, int num_threads) {
  static thread_local Plan plan_of_thread;
  Plan& plan = plan_of_thread;  // of this thread, also in the region below
  plan.build(a, num_threads);
  const int threads =
      static_cast<int>(std::clamp<int64_t>(plan.cost / kMinCost, 1, std::max(num_threads, 1)));
  if (threads == 1) {
    Worker<T, Tile> worker(a, plan);
    worker.write(0, a.num_tokens);
    worker.attend({}, plan.place(plan.cost), 0);
    return;
  }
  const int64_t width = Tile::width(a.value_dim);
  const size_t size = 2 * threads * Accumulator::size(plan.max_unit_rows, width);
  if (plan.partial.size() < size) plan.partial.resize(size);
  in_parallel(threads, [&](int64_t thread, int64_t count, const auto& barrier) {
    Worker<T, Tile> worker(a, plan);
    worker.write(a.num_tokens * thread / count, a.num_tokens * (thread + 1) / count);
    barrier();  // a token sees rows that other threads write
    const Place begin = plan.place(plan.cost * thread / count);
    const Place end = plan.place(plan.cost * (thread + 1) / count);
    worker.attend(begin, end, thread);
    barrier();
    worker.merge(begin, end, thread, count);
  });
}

}  // namespace specc::attention
