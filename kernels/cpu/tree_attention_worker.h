// What a thread of specc::tree_attention does: attends from one place of the line of tiles to
// another, and merges what was cut. Included after the pragma of tree_attention.cpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "team.h"
#include "tree_attention_ahead.h"
#include "tree_attention_plan.h"
#include "tree_attention_rows.h"
#include "tree_attention_softmax.h"
#include "tree_attention_sums.h"
#include "tree_attention_tile.h"
#include "tree_attention_view.h"
#include "vec.h"

namespace specc::attention {

// Cost of a thread's share, about 10 microseconds: entering a parallel region takes a few.
constexpr int64_t kMinCost = 800000;

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
        sums_size_(round_up(Sums::size(plan.max_unit_rows, width_), 16)),
        memory_(memory()),
        view_(a, plan, memory_.parts),
        tile_({a.head_dim, a.value_dim, plan.max_rows, plan.max_unit_rows}) {
    std::vector<float>& storage = memory_.storage;
    const int64_t dim = std::max(a.head_dim, width_) + kTile;
    const int64_t parts[] = {round_up(dim, 16), plan.max_rows * kTile, 2 * sums_size_,
                             a.slopes ? kMaxRows * kTile : 0, tile_.scratch()};
    int64_t total = 16;
    for (int64_t part : parts) total += part;
    if (static_cast<int64_t>(storage.size()) < total) storage.resize(total);
    float* p = storage.data();
    while (reinterpret_cast<uintptr_t>(p) % 64) ++p;
    zeros_ = p;
    std::memset(zeros_, 0, parts[0] * sizeof(float));
    scores_ = zeros_ + parts[0];
    own_ = scores_ + parts[1];
    positions_ = own_ + parts[2];
    tile_.bind(positions_ + parts[3]);
  }

  // Attend from one place of the line to another. Of units that others have a part of, sums stay:
  // of the one that this thread begins, and of each piece of the one that it goes on with.
  void attend(Place begin, Place end, int64_t thread);
  // Complete the unit that this thread began and the next ones went on with.
  void merge(Place begin, Place end, int64_t thread, int64_t threads);

 private:
  struct Rows {
    int64_t count;
    const S *keys[kTile], *values[kTile];
    const S* seen_values[kTile];  // of the head that is attended to; zeros for the others
  };
  // Of a thread; it only ever grows.
  struct Memory {
    std::vector<float> storage, kept;
    std::vector<float> more;  // scores and positions of parts after the first
    std::vector<Part> parts;
    std::vector<Rows> rows;             // of the parts of a tile
    std::vector<RowPart> row;           // a query row's keys, where it has any
    std::vector<Weighted<S>> weighted;  // of the parts
  };
  static Memory& memory() {
    static thread_local Memory of_thread;
    return of_thread;
  }
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
  // Adds what slopes give a row's scores; returns the factor that is left to multiply them by.
  float with_distances(const Unit& unit, int64_t head, int64_t r, int64_t part, float factor,
                       float* row) const {
    if (a_.slopes == nullptr) return factor;
    const float slope = a_.slopes[head * group_ + r % group_];
    const float* keys = positions(part) + r / group_ * kTile;
    const auto token = static_cast<float>(a_.position[plan_.live[unit.item.first + r / group_]]);
    if (a_.rounds_bias)
      add_rounded_distances(row, factor, slope, a_.scale, keys, token);
    else
      add_distances(row, factor, slope, keys, token);
    return 1;
  }
  // `next_sums` says where each piece goes.
  template <class NextSums>
  void tiles(const Unit& unit, int64_t first, int64_t last, NextSums next_sums);
  void find_parts(const Unit& unit, int64_t tile);
  void attend_tile(const Unit& unit, int64_t head, const Rows* next, Sums to);
  bool weigh_row(const Unit& unit, int64_t head, int64_t r, Sums to, float* alpha);
  void find_rows(const Item& item, int64_t slot, Rows* rows) const;
  void load_queries(const Unit& unit);
  void finish(const Unit& unit, Sums from);
  // What a row's sums are multiplied by, in the end and once, whoever summed which tiles.
  float share(float max, float sum, int64_t head) const {
    if (a_.sink_logits == nullptr) return 1 / sum;
    const float sink = to_float(static_cast<const T*>(a_.sink_logits)[head]) * 1.44269504088896f;
    const float most = std::max(max, sink);
    const float own = exp2_of_nonpositive(splat(max - most))[0];
    return own / (sum * own + exp2_of_nonpositive(splat(sink - most))[0]);
  }
  // What stays of a thread of a unit that was cut: the sums of the pieces it began with, or those of
  // a piece of the unit that it went on with.
  int64_t kept_size(const Unit& unit) const {
    return round_up(Sums::size(unit.heads * unit.rows, width_), 16);
  }
  Sums begun(const Unit& unit, int64_t thread) const {
    return Sums(plan_.kept[thread], unit.heads * unit.rows, width_);
  }
  Sums piece_of(const Unit& unit, int64_t thread, int64_t piece) const {
    float* from = plan_.kept_pieces[thread];
    return Sums(from + piece * kept_size(unit), unit.heads * unit.rows, width_);
  }
  float* scores(int64_t part) const {
    return part == 0 ? scores_ : memory_.more.data() + (part - 1) * more_size();
  }
  float* positions(int64_t part) const {
    return part == 0 ? positions_ : scores(part) + plan_.max_rows * kTile;
  }
  int64_t more_size() const { return (plan_.max_rows + (a_.slopes ? kMaxRows : 0)) * kTile; }

  const TreeAttention& a_;
  Plan& plan_;
  const int64_t group_, width_, sums_size_;
  Memory& memory_;
  View view_;  // of the tile that is attended to
  Tile tile_;
  float *zeros_, *scores_, *own_;
  float* positions_;  // of keys, as each token of an item sees them; where there are slopes
  Rows next_;         // of the first part of the next tile
};

// Where the rows of kTile slots lie, up to the item's end; those of the first KV head.
template <class T, class Tile>
void Worker<T, Tile>::find_rows(const Item& item, int64_t slot, Rows* rows) const {
  const int32_t* table = a_.block_table + item.sequence * a_.blocks_per_sequence;
  rows->count = std::clamp<int64_t>(item.end - slot, 0, kTile);
  int64_t block = slot / a_.block_size, row = slot % a_.block_size;
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

// A query row's weights in all parts of a tile; true if its sums are to be multiplied by alpha.
template <class T, class Tile>
bool Worker<T, Tile>::weigh_row(const Unit& unit, int64_t head, int64_t r, Sums to,
                                float* alpha) {
  const int64_t token = r / group_;
  std::vector<RowPart>& parts = memory_.row;
  parts.clear();
  for (int64_t p = 0; p < view_.size(); ++p) {
    const uint64_t bits = view_[p].bits[token];
    float* row = scores(p) + r * kTile;
    if (!bits) {
      std::memset(row, 0, kTile * sizeof(float));
      continue;
    }
    float factor = a_.scale;
    if (a_.softcap != 0) squash(row, a_.scale / a_.softcap), factor = a_.softcap;
    factor = with_distances(unit, head, r, p, factor, row);
    const int64_t place = view_[p].place[token];
    if (view_.size() == 1 && place == kInPlace)
      return softmax(row, bits, factor, to.max + r, to.sum + r * kWidth, alpha);
    parts.push_back({row, bits, factor, place, view_[p].prefix});
  }
  if (parts.empty()) return false;
  return softmax_of_parts(parts.data(), parts.size(), to.max + r, to.sum + r * kWidth, alpha);
}

// The tile that is viewed, for one KV head; `next` are rows of the next tile.
template <class T, class Tile>
void Worker<T, Tile>::attend_tile(const Unit& unit, int64_t head, const Rows* next, Sums to) {
  const S* zeros = reinterpret_cast<const S*>(zeros_);
  const int64_t key = head * a_.k_cache_head_stride, value = head * a_.v_cache_head_stride;
  const char* ask_for[2 * kTile];
  for (int64_t i = 0; i < next->count; ++i) {
    ask_for[i] = reinterpret_cast<const char*>(next->keys[i] + key);
    ask_for[next->count + i] = reinterpret_cast<const char*>(next->values[i] + value);
  }
  int64_t work = 0;
  for (int64_t p = 0; p < view_.size(); ++p) work += tile_.work(unit.rows, view_[p].count());
  Ahead ahead(ask_for, next->count, Tile::row_size(a_.head_dim) * sizeof(S),
              Tile::row_size(a_.value_dim) * sizeof(S), work);
  const auto of_head = [&](int64_t p, const S* const* from, int64_t offset, const S** to) {
    for (int64_t i = 0; i < kTile; ++i) to[i] = view_[p].seen >> i & 1 ? from[i] + offset : zeros;
  };
  const S* keys[kTile];
  memory_.weighted.clear();
  for (int64_t p = 0; p < view_.size(); ++p) {
    const int64_t count = view_[p].count();
    of_head(p, memory_.rows[p].keys, key, keys);
    of_head(p, memory_.rows[p].values, value, memory_.rows[p].seen_values);
    tile_.score((head - unit.head) * unit.rows, unit.rows, keys, count, scores(p), ahead);
    memory_.weighted.push_back({scores(p), memory_.rows[p].seen_values, count});
  }
  for (int64_t r = 0; r < unit.rows; ++r) {
    float alpha = 1;
    ahead.spend(kSoftmaxWork);
    if (!weigh_row(unit, head, r, to, &alpha)) continue;
    float* values = to.values + r * width_;
    for (int64_t j = 0; j < width_; j += kWidth)
      store(values + j, load(values + j) * splat(alpha));
  }
  if (memory_.weighted.size() == 1)
    tile_.add(memory_.weighted[0], unit.rows, to.values, ahead);
  else
    tile_.add_parts(memory_.weighted.data(), memory_.weighted.size(), unit.rows, to.values, ahead);
  ahead.finish();
}
template <class T, class Tile>
void Worker<T, Tile>::find_parts(const Unit& unit, int64_t tile) {
  view_.find(unit.item, tile);
  const auto parts = static_cast<size_t>(view_.size());
  if (memory_.rows.size() < parts) memory_.rows.resize(parts);
  const size_t more = (std::max<size_t>(parts, 1) - 1) * more_size();
  if (memory_.more.size() < more) memory_.more.resize(more);
  for (size_t p = 0; p < parts; ++p) {
    find_rows(unit.item, view_[p].slot, &memory_.rows[p]);
    if (a_.slopes == nullptr) continue;
    for (int64_t i = 0; i < unit.item.tokens; ++i)
      key_positions(a_, unit.item.sequence, plan_.live[unit.item.first + i], view_[p].slot,
                    positions(p) + i * kTile);
  }
}

template <class T, class Tile>
template <class NextSums>
void Worker<T, Tile>::tiles(const Unit& unit, int64_t first, int64_t last, NextSums next_sums) {
  const Item& item = unit.item;
  load_queries(unit);
  Sums to(nullptr, 0, 0);
  for (int64_t index = first; index < last; ++index) {
    if (item.begins_piece(index)) {
      to = next_sums();
      to.clear(unit.heads * unit.rows, width_);
    }
    find_parts(unit, item.column(index));
    if (view_.size() == 0) continue;
    next_.count = 0;
    if (index + 1 < last) find_rows(item, item.column(index + 1), &next_);
    for (int64_t head = unit.head; head < unit.head + unit.heads; ++head)
      attend_tile(unit, head, &next_, to.from((head - unit.head) * unit.rows, width_));
  }
}

template <class T, class Tile>
void Worker<T, Tile>::finish(const Unit& unit, Sums from) {
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
  int64_t of_pieces = 0;
  if (begin.tile > 0) {
    const Unit cut = unit(begin);
    const int64_t last = begin.same_unit(end) ? end.tile : cut.item.num_tiles;
    of_pieces = cut.item.pieces(begin.tile, last) * kept_size(cut);
  }
  const int64_t of_begun = end.tile > 0 ? kept_size(unit(end)) : 0;
  const size_t size = of_pieces + of_begun;
  if (memory_.kept.size() < size) memory_.kept.resize(size);
  plan_.kept_pieces[thread] = memory_.kept.data();
  plan_.kept[thread] = memory_.kept.data() + of_pieces;
  const Sums own(own_, plan_.max_unit_rows, width_);
  const Sums piece(own_ + sums_size_, plan_.max_unit_rows, width_);
  for (Place at = begin;;) {
    const bool is_last = at.same_unit(end);
    if (is_last && at.tile == end.tile) return;
    const Unit now = unit(at);
    const int64_t last = is_last ? end.tile : now.item.num_tiles;
    if (at.tile > 0) {
      int64_t count = 0;
      tiles(now, at.tile, last, [&] { return piece_of(now, thread, count++); });
    } else {
      const bool is_whole = last == now.item.num_tiles;
      const Sums to = is_whole ? own : begun(now, thread);
      InOrder in_order(to, piece, now.heads * now.rows, width_);
      tiles(now, 0, last, [&] { return in_order.next(); });
      in_order.finish();
      if (is_whole) finish(now, own);
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
  const Sums to = begun(cut, thread);
  Place from = end;
  for (int64_t other = thread + 1; other < threads && from.same_unit(end); ++other) {
    const Place next = plan_.place(plan_.cost * (other + 1) / threads);
    const int64_t last = next.same_unit(from) ? next.tile : cut.item.num_tiles;
    const int64_t pieces = cut.item.pieces(from.tile, last);
    for (int64_t piece = 0; piece < pieces; ++piece)
      to.add(piece_of(cut, other, piece), cut.heads * cut.rows, width_);
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
  plan.kept.resize(threads);
  plan.kept_pieces.resize(threads);
  if (threads == 1) {
    Worker<T, Tile> worker(a, plan);
    write_rows<T, typename Tile::Stored>(a, 0, a.num_tokens);
    worker.attend({}, plan.place(plan.cost), 0);
    return;
  }
  in_parallel(threads, [&](int64_t thread, int64_t count, const auto& barrier) {
    Worker<T, Tile> worker(a, plan);
    write_rows<T, typename Tile::Stored>(a, a.num_tokens * thread / count,
                                         a.num_tokens * (thread + 1) / count);
    barrier();  // a token sees rows that other threads write
    const Place begin = plan.place(plan.cost * thread / count);
    const Place end = plan.place(plan.cost * (thread + 1) / count);
    worker.attend(begin, end, thread);
    barrier();
    worker.merge(begin, end, thread, count);
  });
}

}  // namespace specc::attention
