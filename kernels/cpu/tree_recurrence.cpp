// specc::tree_recurrence and specc::fold_recurrence. Columns of a head's state do not depend on
// each other, so a thread takes some of them at a time, which its first-level cache holds for all
// tokens of a sequence.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "recurrence.h"
#include "recurrent_state.h"
#include "row_memory.h"
#include "shares.h"
#include "state_walk.h"
#include "strided_rows.h"

namespace specc {
namespace {

using recurrence::Columns;
using recurrence::Inputs;
using recurrence::kColumns;
using recurrence::Turn;
using vec::BFloat16;
using vec::kLanes;
using vec::load16;
using vec::Sixteen;
using vec::store16;

// The first of a token's numbers, as floats: where they are, or in `memory`, where they are narrow.
template <class T>
const float* widened(const T* x, int64_t count, float* memory) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    vec::by_sixteen(count, [&](int64_t i, auto some) {
      store16(memory + i, load16(x + i, some), some);
    });
    return memory;
  }
}
void prefetch(const TokenHeads& x, int64_t token, int64_t head, int64_t first, int64_t count) {
  const int64_t item = x.dtype == DType::kFloat32 ? 4 : 2;
  const char* begin = static_cast<const char*>(x.data) +
                      (token * x.token_stride + head * x.head_stride + first) * item;
  for (int64_t at = 0; at < count * item; at += 64) __builtin_prefetch(begin + at);
}
const float* of_token(const TokenHeads& x, int64_t token, int64_t head, int64_t first,
                      int64_t count, float* memory) {
  const int64_t place = token * x.token_stride + head * x.head_stride + first;
  if (x.dtype == DType::kFloat32)
    return widened(static_cast<const float*>(x.data) + place, count, memory);
  return widened(static_cast<const BFloat16*>(x.data) + place, count, memory);
}

// Some columns of one head of one sequence, and the memory of a thread for them.
class HeadColumns {
 public:
  // Floats that `memory` has, for so many states of a tree.
  static int64_t floats(const RecurrentHeads& heads, int64_t num_states) {
    return (num_states + 2) * heads.key_dim * kColumns + 5 * (heads.key_dim + kLanes);
  }
  static int64_t blocks(const RecurrentHeads& heads) {
    return (heads.value_dim + kColumns - 1) / kColumns;
  }

  HeadColumns(const RecurrentHeads& heads, int64_t head, int64_t block, float* state, float* memory)
      : heads_(heads),
        head_(head),
        first_(block * kColumns),
        count_(std::min(kColumns, heads.value_dim - first_)),
        slab_{state + head * heads.key_dim * heads.value_dim + first_, heads.value_dim},
        memory_(memory) {
    float* place = memory_ + 2 * heads_.key_dim * kColumns;
    for (float** row : {&k_, &q_, &decays_, &keys_, &queries_}) {
      *row = place;
      place += heads.key_dim + kLanes;
    }
    states_ = place;
  }

  int64_t first() const { return first_; }
  int64_t count() const { return count_; }

  Columns slab() const { return slab_; }
  // What the state is before and after the certain tokens: the slab itself, or, of fewer columns, a
  // copy with zeros after them.
  Columns state() const { return is_whole() ? slab_ : Columns{memory_, kColumns}; }
  Columns work() const { return {memory_ + heads_.key_dim * kColumns, kColumns}; }
  Columns state_of_tree(int64_t number) const {
    return {states_ + number * heads_.key_dim * kColumns, kColumns};
  }

  void begin(bool is_zero) const {
    for (int64_t row = 0; row < heads_.key_dim; ++row) {
      float* in_slab = slab_.data + row * slab_.stride;
      if (is_zero) std::memset(in_slab, 0, count_ * sizeof(float));
      if (is_whole()) continue;
      float* copy = state().at(row, 0);
      std::memset(copy, 0, kColumns * sizeof(float));
      std::memcpy(copy, in_slab, count_ * sizeof(float));
    }
  }
  void end() const {
    if (is_whole()) return;
    for (int64_t row = 0; row < heads_.key_dim; ++row)
      std::memcpy(slab_.data + row * slab_.stride, state().at(row, 0), count_ * sizeof(float));
  }

  // Asks for what a token is: tokens may lie in pages of their own.
  void prefetch(const TreeRecurrence& a, int64_t token) const {
    const int64_t key_head = heads_.key_head(head_);
    specc::prefetch(a.k, token, key_head, 0, heads_.key_dim);
    specc::prefetch(a.q, token, key_head, 0, heads_.key_dim);
    specc::prefetch(a.v, token, head_, first_, count_);
  }

  Inputs of_token(const TreeRecurrence& a, int64_t token) const {
    const int64_t key_head = heads_.key_head(head_), rows = heads_.key_dim;
    const float* q = specc::of_token(a.q, token, key_head, 0, rows, q_);
    Inputs in;
    set_keys(in, specc::of_token(a.k, token, key_head, 0, rows, k_),
             specc::of_token(a.g, token, head_, 0, heads_.decays(), decays_));
    in.queries = decayed(q, queries_);
    in.key_query = vec::sum_of(rows, [&](int64_t i, auto some) {
      return load16(in.k + i, some) * load16(q + i, some);
    });
    float narrow[kColumns];
    set_values(in, specc::of_token(a.v, token, head_, first_, count_, narrow));
    in.beta = heads_.has_beta ? *specc::of_token(a.beta, token, head_, 0, 1, narrow) : 0;
    return in;
  }
  // Of a replay row, whose token reads nothing.
  Inputs of_row(const float* row) const {
    Inputs in;
    set_keys(in, row + heads_.k_place(head_), row + heads_.g_place(head_));
    in.queries = nullptr;
    in.key_query = 0;
    set_values(in, row + heads_.v_place(head_) + first_);
    in.beta = heads_.has_beta ? row[heads_.beta_place(head_)] : 0;
    return in;
  }

  // This head's part of a replay row.
  void write_row(const TreeRecurrence& a, int64_t token, float* row) const {
    float narrow[kColumns];
    copy(specc::of_token(a.v, token, head_, first_, count_, narrow), count_,
         row + heads_.v_place(head_) + first_);
    if (first_ > 0) return;
    const int64_t key_head = heads_.key_head(head_);
    if (key_head * (heads_.heads / heads_.key_heads) == head_)
      copy(specc::of_token(a.k, token, key_head, 0, heads_.key_dim, k_), heads_.key_dim,
           row + heads_.k_place(head_));
    copy(specc::of_token(a.g, token, head_, 0, heads_.decays(), decays_), heads_.decays(),
         row + heads_.g_place(head_));
    if (heads_.has_beta)
      copy(specc::of_token(a.beta, token, head_, 0, 1, narrow), 1, row + heads_.beta_place(head_));
  }

 private:
  bool is_whole() const { return count_ == kColumns; }

  static void copy(const float* from, int64_t count, float* to) {
    std::memcpy(to, from, count * sizeof(float));
  }

  void set_values(Inputs& in, const float* v) const {
    if (is_whole()) return copy(v, kColumns, in.v);
    copy(v, count_, in.v);
    std::memset(in.v + count_, 0, (kColumns - count_) * sizeof(float));
  }

  void set_keys(Inputs& in, const float* k, const float* g) const {
    vec::by_sixteen(heads_.decays(), [&](int64_t i, auto some) {
      store16(decays_ + i, recurrence::exponential(load16(g + i, some)), some);
    });
    in.k = k;
    in.decays = decays_;
    in.keys = decayed(k, keys_);
  }

  // Times the decays of rows.
  const float* decayed(const float* x, float* to) const {
    vec::by_sixteen(heads_.key_dim, [&](int64_t i, auto some) {
      const Sixteen value = load16(x + i, some);
      store16(to + i,
              heads_.decays_rows ? value * load16(decays_ + i, some) : value * decays_[0], some);
    });
    return to;
  }

  const RecurrentHeads& heads_;
  const int64_t head_, first_, count_;
  const Columns slab_;
  float* const memory_;
  float *k_, *q_, *decays_, *keys_, *queries_, *states_;
};

// unit(i, next, memory) for all units, on threads that the work is worth; next is what the thread
// takes after it, mostly; memory has so many floats.
template <class Unit>
void share_units(int64_t units, int64_t elements, int64_t floats, int num_threads,
                 const Unit& unit) {
  const int64_t most = std::min<int64_t>(std::max(num_threads, 1), units);
  if (most == 0) return;
  const auto threads =
      static_cast<int>(std::clamp<int64_t>(elements / kElementsPerThread, 1, most));
  floats = (floats + kLanes - 1) / kLanes * kLanes;
  static thread_local RowMemory of_threads;
  float* memory = of_threads.row(threads * floats + kLanes);
  // whole lines of the cache
  memory += -(reinterpret_cast<uintptr_t>(memory) / sizeof(float)) % kLanes;
  Shares shares(threads);
  shares.deal(units, threads);
  in_parallel(threads, [&](int64_t thread, int64_t, const auto&) {
    for (int64_t i, end; shares.take(static_cast<int>(thread), 1, i, end);)
      unit(i, std::min(i + 1, units - 1), memory + thread * floats);
  });
}

// All tokens of a sequence, in some columns of a head.
class Unit {
 public:
  Unit(const TreeRecurrence& a, const StateSequence& sequence, const StateWalk& walk,
       const HeadColumns& columns, int64_t head, const Columns& ahead)
      : a_(a),
        sequence_(sequence),
        walk_(walk),
        columns_(columns),
        head_(head),
        ahead_(ahead),
        rows_(a.rows + sequence.place * a.tokens.num_rows * a.heads.columns()),
        read_(Turn::of<true>(a.heads.decays_rows, a.heads.has_beta)),
        skip_(Turn::of<false>(a.heads.decays_rows, a.heads.has_beta)) {}

  void run() const {
    columns_.begin(sequence_.begins);
    const Columns state = columns_.state(), work = columns_.work();
    const auto& certain = sequence_.certain;
    for (size_t i = 0; i < certain.size(); ++i) {
      const bool is_first = i == 0, is_last = i + 1 == certain.size();
      if (!is_last) columns_.prefetch(a_, certain[i + 1]);
      take(certain[i], is_first ? state : work, is_last ? &state : &work,
           is_first ? ahead_ : work);
    }
    columns_.end();
    for (const auto& [node, token] : sequence_.uncertain) columns_.write_row(a_, token, row(node));
    for (const StateWalk::Step& step : walk_.steps()) {
      const Columns from = step.from < 0 ? state : columns_.state_of_tree(step.from);
      const Columns to = columns_.state_of_tree(std::max<int64_t>(step.to, 0));
      if (step.token >= 0)
        take(step.token, from, step.to < 0 ? nullptr : &to, from);
      else
        replay(row(step.node), from, to);
    }
  }

 private:
  float* row(int64_t node) const { return rows_ + node * a_.heads.columns(); }

  void take(int64_t token, const Columns& from, const Columns* to, const Columns& ahead) const {
    const Inputs in = columns_.of_token(a_, token);
    float delta[kColumns], out[kColumns];
    read_.look_up(a_.heads.key_dim, in, from, ahead, delta, out);
    if (to != nullptr) read_.update(a_.heads.key_dim, in, delta, from, *to);
    const int64_t place =
        (token * a_.heads.heads + head_) * a_.heads.value_dim + columns_.first();
    if (a_.out_dtype == DType::kFloat32)
      store(out, static_cast<float*>(a_.out) + place);
    else
      store(out, static_cast<BFloat16*>(a_.out) + place);
  }

  void replay(const float* row, const Columns& from, const Columns& to) const {
    const Inputs in = columns_.of_row(row);
    float delta[kColumns];
    skip_.look_up(a_.heads.key_dim, in, from, from, delta, nullptr);
    skip_.update(a_.heads.key_dim, in, delta, from, to);
  }

  template <class T>
  void store(const float* from, T* to) const {
    vec::by_sixteen(columns_.count(), [&](int64_t i, auto some) {
      store16(to + i, load16(from + i), some);
    });
  }

  const TreeRecurrence& a_;
  const StateSequence& sequence_;
  const StateWalk& walk_;
  const HeadColumns columns_;
  const int64_t head_;
  const Columns ahead_;  // what a thread takes next
  float* const rows_;
  const Turn read_, skip_;
};

// Outputs of tokens that are dead, or that no sequence owns.
void clear_dead(const TreeRecurrence& a) {
  const int64_t item = a.out_dtype == DType::kFloat32 ? 4 : 2;
  const int64_t bytes = a.heads.heads * a.heads.value_dim * item;
  for (int64_t t = 0; t < a.tokens.num_tokens; ++t)
    if (a.tokens.slot[t] < 0 || t >= a.tokens.q_start[a.tokens.batch])
      std::memset(static_cast<char*>(a.out) + t * bytes, 0, bytes);
}

}  // namespace

void tree_recurrence(const TreeRecurrence& a, int num_threads) {
  const std::vector<StateSequence> sequences = find_sequences(a.tokens);
  std::vector<StateWalk> walks;
  int64_t steps = 0, num_states = 0;
  for (const StateSequence& each : sequences) {
    walks.emplace_back(a.tokens, each);
    steps += static_cast<int64_t>(each.certain.size() + walks.back().steps().size());
    num_states = std::max(num_states, walks.back().num_states());
  }
  clear_dead(a);
  const int64_t blocks = HeadColumns::blocks(a.heads), of_sequence = a.heads.heads * blocks;
  const int64_t state_size = a.heads.heads * a.heads.key_dim * a.heads.value_dim;
  const auto columns_of = [&](int64_t unit, float* memory) {
    float* state = a.state + sequences[unit / of_sequence].place * state_size;
    return HeadColumns(a.heads, unit % of_sequence / blocks, unit % blocks, state, memory);
  };
  share_units(static_cast<int64_t>(sequences.size()) * of_sequence, steps * state_size,
              HeadColumns::floats(a.heads, num_states), num_threads,
              [&](int64_t unit, int64_t next, float* memory) {
                const int64_t index = unit / of_sequence, head = unit % of_sequence / blocks;
                Unit(a, sequences[index], walks[index], columns_of(unit, memory), head,
                     columns_of(next, memory).slab())
                    .run();
              });
}

void fold_recurrence(const FoldRecurrence& a, int num_threads) {
  const std::vector<AcceptedNodes> sequences = find_accepted(a.paths);
  const int64_t blocks = HeadColumns::blocks(a.heads), of_sequence = a.heads.heads * blocks;
  const int64_t of_layer = static_cast<int64_t>(sequences.size()) * of_sequence;
  const int64_t state_size = a.heads.heads * a.heads.key_dim * a.heads.value_dim;
  int64_t steps = 0;
  for (const AcceptedNodes& each : sequences) steps += static_cast<int64_t>(each.nodes.size());
  const Turn turn = Turn::of<false>(a.heads.decays_rows, a.heads.has_beta);
  const auto place_of = [&](int64_t unit) {
    return unit / of_layer * a.paths.num_states + sequences[unit % of_layer / of_sequence].place;
  };
  const auto columns_of = [&](int64_t unit, float* memory) {
    return HeadColumns(a.heads, unit % of_sequence / blocks, unit % blocks,
                       a.state + place_of(unit) * state_size, memory);
  };
  share_units(a.layers * of_layer, a.layers * steps * state_size, HeadColumns::floats(a.heads, 0),
              num_threads, [&](int64_t unit, int64_t next, float* memory) {
                const std::vector<int64_t>& nodes =
                    sequences[unit % of_layer / of_sequence].nodes;
                const HeadColumns columns = columns_of(unit, memory);
                const Columns state = columns.state(), work = columns.work();
                const float* rows =
                    a.rows + place_of(unit) * a.paths.num_rows * a.heads.columns();
                columns.begin(false);
                for (size_t i = 0; i < nodes.size(); ++i) {
                  const bool is_first = i == 0, is_last = i + 1 == nodes.size();
                  const Inputs in = columns.of_row(rows + nodes[i] * a.heads.columns());
                  const Columns from = is_first ? state : work;
                  float delta[kColumns];
                  turn.look_up(a.heads.key_dim, in, from,
                               is_first ? columns_of(next, memory).slab() : work, delta, nullptr);
                  turn.update(a.heads.key_dim, in, delta, from, is_last ? state : work);
                }
                columns.end();
              });
}

}  // namespace specc
