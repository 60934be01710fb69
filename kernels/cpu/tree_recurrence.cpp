// specc::tree_recurrence and specc::fold_recurrence. Columns of a head's state do not depend on each
// other, so a thread takes some of them at a time, which its first-level cache holds for all tokens
// of a sequence.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "recurrence.h"
#include "row_memory.h"
#include "shares.h"
#include "state_walk.h"
#include "strided_rows.h"

namespace specc {
namespace {

using vec::BFloat16;
using vec::kLanes;
using vec::load16;
using vec::Sixteen;
using vec::splat16;
using vec::store16;

// columns of a state that are taken at a time, and registers of sixteen that hold a row of them
constexpr int64_t kColumns = 32;
constexpr int kParts = kColumns / kLanes;
// sums over the rows of a state are those of even and of odd rows, so that additions need not wait
// for each other
constexpr int kSums = 2;

// A number in all lanes, as it is loaded: from a register it would take the place of a product.
inline vec::Float broadcast(const float* p) {
#if defined(__AVX512F__)
  return (vec::Float)_mm512_broadcastss_ps(_mm_load_ss(p));
#else
  return vec::splat(*p);
#endif
}

inline void multiply_add(Sixteen& sum, const Sixteen& x, vec::Float y) {
  for (int j = 0; j < kLanes / vec::kWidth; ++j) vec::multiply_add(sum.at[j], x.at[j], y);
}
inline Sixteen scaled(const float* x, vec::Float y) {
  return each(load16(x), [&](vec::Float a) { return a * y; });
}

// e^x; NaN stays NaN.
inline Sixteen exponential(const Sixteen& x) {
  const Sixteen e = vec::exp_of_nonpositive(
      each(x, [](vec::Float a) { return a > 0.0f ? -a : a; }));
  return each(x, e, [](vec::Float a, vec::Float b) { return a > 0.0f ? 1.0f / b : b; });
}

// Rows of some columns of a state.
struct Columns {
  float* data;
  int64_t stride;

  float* at(int64_t row, int part) const { return data + row * stride + part * kLanes; }
};

// What a token is to some columns of a head's state.
struct Inputs {
  const float* k;      // [DK]
  const float* q;      // [DK], or null: nothing is read
  const float* decay;  // factors: [DK], or one
  float beta;
  float v[kColumns];
};

struct RowSums {
  Sixteen of[kSums][kParts];

  RowSums() {
    for (auto& sum : of)
      for (Sixteen& part : sum) part = splat16(0);
  }
  Sixteen total(int part) const { return of[0][part] + of[1][part]; }
};

// each(row, sum) for all rows; the sum of a row says to which of the sums it belongs.
template <class Each>
inline void by_row(int64_t rows, const Each& each) {
  int64_t row = 0;
  for (; row + kSums <= rows; row += kSums) {
    each(row, 0);
    each(row + 1, 1);
  }
  if (row < rows) each(row, 0);
}

// A token's turn: from one state to another, by way of a third where keys are looked up in what is
// decayed; the three may be one. Meanwhile rows that come next are asked for, a few at a time.
template <bool kDecaysRows, bool kHasBeta, bool kReads>
void take_token(int64_t rows, const Inputs& in, Columns from, Columns between, Columns to,
                Columns ahead, float* out) {
  RowSums looked_up, read;
  Sixteen delta[kParts];
  for (int p = 0; p < kParts; ++p) delta[p] = load16(in.v + p * kLanes);
  // what stores might change would be loaded anew for each row
  const float *const keys = in.k, *const queries = in.q, *const decays = in.decay;
  const vec::Float of_head = broadcast(decays);
  const auto decay_of = [=](int64_t row) { return kDecaysRows ? broadcast(decays + row) : of_head; };
  if constexpr (kHasBeta) {
    by_row(rows, [&](int64_t row, int sum) {
      const vec::Float decay = decay_of(row), k = broadcast(keys + row);
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        __builtin_prefetch(ahead.at(row, p), 1, 2);
        const Sixteen s = scaled(from.at(row, p), decay);
        store16(between.at(row, p), s);
        multiply_add(looked_up.of[sum][p], s, k);
      }
    });
    for (int p = 0; p < kParts; ++p) delta[p] = (delta[p] - looked_up.total(p)) * in.beta;
  }
  by_row(rows, [&](int64_t row, int sum) {
    const vec::Float k = broadcast(keys + row), q = kReads ? broadcast(queries + row) : k;
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
      Sixteen s;
      if constexpr (kHasBeta) {
        s = load16(between.at(row, p));
      } else {
        __builtin_prefetch(ahead.at(row, p), 1, 2);
        s = scaled(from.at(row, p), decay_of(row));
      }
      multiply_add(s, delta[p], k);
      store16(to.at(row, p), s);
      if constexpr (kReads) multiply_add(read.of[sum][p], s, q);
    }
  });
  if constexpr (kReads)
    for (int p = 0; p < kParts; ++p) store16(out + p * kLanes, read.total(p));
}

using TakeToken = void (*)(int64_t, const Inputs&, Columns, Columns, Columns, Columns, float*);

template <bool kReads>
TakeToken take_token_of(const RecurrentHeads& heads) {
  if (heads.decays_rows)
    return heads.has_beta ? take_token<true, true, kReads> : take_token<true, false, kReads>;
  return heads.has_beta ? take_token<false, true, kReads> : take_token<false, false, kReads>;
}

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
    return (num_states + 2) * heads.key_dim * kColumns + 3 * (heads.key_dim + kLanes) + kLanes;
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
    const int64_t size = heads.key_dim + kLanes;
    q_ = memory_ + 2 * heads_.key_dim * kColumns;
    k_ = q_ + size;
    decay_ = k_ + size;
    states_ = decay_ + size;
  }

  int64_t first() const { return first_; }
  int64_t count() const { return count_; }

  Columns slab() const { return slab_; }
  // What the state is before and after the certain tokens: the slab itself, or a copy of a part of a
  // register.
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
    Inputs in;
    in.q = specc::of_token(a.q, token, key_head, 0, rows, q_);
    in.k = specc::of_token(a.k, token, key_head, 0, rows, k_);
    in.decay = decays(specc::of_token(a.g, token, head_, 0, heads_.decays(), decay_));
    float narrow[kColumns];
    set_values(in, specc::of_token(a.v, token, head_, first_, count_, narrow));
    in.beta = heads_.has_beta ? *specc::of_token(a.beta, token, head_, 0, 1, narrow) : 0;
    return in;
  }
  // Of a replay row, whose token reads nothing.
  Inputs of_row(const float* row) const {
    Inputs in;
    in.q = nullptr;
    in.k = row + heads_.k_place(head_);
    in.decay = decays(row + heads_.g_place(head_));
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
    copy(specc::of_token(a.g, token, head_, 0, heads_.decays(), decay_), heads_.decays(),
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

  const float* decays(const float* g) const {
    vec::by_sixteen(heads_.decays(), [&](int64_t i, auto some) {
      store16(decay_ + i, exponential(load16(g + i, some)), some);
    });
    return decay_;
  }

  const RecurrentHeads& heads_;
  const int64_t head_, first_, count_;
  const Columns slab_;
  float* const memory_;
  float *q_, *k_, *decay_, *states_;
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
        read_(take_token_of<true>(a.heads)),
        skip_(take_token_of<false>(a.heads)) {}

  void run() const {
    columns_.begin(sequence_.begins);
    const Columns state = columns_.state(), work = columns_.work();
    const auto& certain = sequence_.certain;
    for (size_t i = 0; i < certain.size(); ++i) {
      const bool is_first = i == 0, is_last = i + 1 == certain.size();
      if (!is_last) columns_.prefetch(a_, certain[i + 1]);
      take(certain[i], is_first ? state : work, work, is_last ? state : work,
           is_first ? ahead_ : work);
    }
    columns_.end();
    for (const auto& [node, token] : sequence_.uncertain) columns_.write_row(a_, token, row(node));
    for (const StateWalk::Step& step : walk_.steps()) {
      const Columns to = columns_.state_of_tree(step.to);
      const Columns from = step.from < 0 ? state : columns_.state_of_tree(step.from);
      if (step.token >= 0)
        take(step.token, from, to, to, to);
      else
        skip_(a_.heads.key_dim, columns_.of_row(row(step.node)), from, to, to, to, nullptr);
    }
  }

 private:
  float* row(int64_t node) const { return rows_ + node * a_.heads.columns(); }

  void take(int64_t token, const Columns& from, const Columns& between, const Columns& to,
            const Columns& ahead) const {
    float out[kColumns];
    read_(a_.heads.key_dim, columns_.of_token(a_, token), from, between, to, ahead, out);
    const int64_t place =
        (token * a_.heads.heads + head_) * a_.heads.value_dim + columns_.first();
    if (a_.out_dtype == DType::kFloat32)
      store(out, static_cast<float*>(a_.out) + place);
    else
      store(out, static_cast<BFloat16*>(a_.out) + place);
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
  const TakeToken read_, skip_;
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
  const TakeToken take = take_token_of<false>(a.heads);
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
                  take(a.heads.key_dim, columns.of_row(rows + nodes[i] * a.heads.columns()),
                       is_first ? state : work, work, is_last ? state : work,
                       is_first ? columns_of(next, memory).slab() : work, nullptr);
                }
                columns.end();
              });
}

}  // namespace specc
