// specc::tree_conv and specc::fold_conv. Channels do not depend on each other, so a thread takes
// some of them for all tokens.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "activations.h"
#include "lanes.h"
#include "recurrence.h"
#include "row_memory.h"
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

// channels that are taken at a time: factors of theirs stay in the first-level cache
constexpr int64_t kChannels = 256;

// Moves a state of rows by `count` inputs, of which input(i) is one.
template <class Input>
void move_state(char* state, int64_t kept, int64_t stride, int64_t bytes, int64_t count,
                const Input& input) {
  for (int64_t row = 0; row < kept; ++row) {
    const int64_t from = count + row;
    const char* source = from < kept ? state + from * stride : input(from - kept);
    std::memcpy(state + row * stride, source, bytes);
  }
}

// Inputs that a token's sum reads, oldest first, without itself: rows of tensors.
template <class T>
struct Window {
  int64_t token;
  std::vector<const T*> before;
};

// What a pass reads and writes of one sequence.
template <class T>
struct SequenceOfConv {
  const StateSequence* sequence;
  T *state, *rows;
  std::vector<Window<T>> certain, uncertain;
};

template <class T>
class Convolution {
 public:
  explicit Convolution(const TreeConv& a)
      : a_(a), found_(find_sequences(a.tokens)), kept_(a.width - 1) {
    for (const StateSequence& each : found_) sequences_.push_back(of_sequence(each));
  }

  void run(int num_threads) const {
    clear_dead();
    const int64_t pieces = (a_.channels + kChannels - 1) / kChannels;
    share_rows(pieces, (a_.tokens.num_tokens + 1) * kChannels * a_.width, num_threads,
               [&](int64_t begin, int64_t end) {
                 static thread_local RowMemory of_thread;
                 float* factors = of_thread.row(a_.width * kChannels);
                 for (int64_t i = begin; i < end; ++i)
                   take(i * kChannels, std::min(kChannels, a_.channels - i * kChannels), factors);
               });
  }

 private:
  const T* x(int64_t token) const {
    return static_cast<const T*>(a_.x) + token * a_.x_stride;
  }

  SequenceOfConv<T> of_sequence(const StateSequence& sequence) const {
    const StateTokens& tokens = a_.tokens;
    SequenceOfConv<T> made{
        &sequence, static_cast<T*>(a_.state) + sequence.place * kept_ * a_.channels,
        static_cast<T*>(a_.rows) + sequence.place * tokens.num_rows * a_.channels, {}, {}};
    const auto& certain = sequence.certain;
    for (int64_t i = 0; i < static_cast<int64_t>(certain.size()); ++i) {
      Window<T> window{certain[i], {}};
      for (int64_t place = i; place < i + kept_; ++place)
        window.before.push_back(place < kept_ ? made.state + place * a_.channels
                                              : x(certain[place - kept_]));
      made.certain.push_back(std::move(window));
    }
    for (const auto& [node, token] : sequence.uncertain) {
      Window<T> window{token, std::vector<const T*>(kept_)};
      const TokenPath path = path_of(tokens, sequence.b, token);
      int64_t left = kept_, before = path.last_before(node);
      for (; left > 0 && before >= 0; before = path.last_before(before))
        window.before[--left] = made.rows + before * a_.channels;
      // the last inputs of the state
      for (int64_t row = kept_; left > 0;) window.before[--left] = made.state + --row * a_.channels;
      made.uncertain.push_back(std::move(window));
    }
    return made;
  }

  void clear_dead() const {
    const int64_t bytes = a_.channels * sizeof(T);
    for (int64_t t = 0; t < a_.tokens.num_tokens; ++t)
      if (a_.tokens.slot[t] < 0 || t >= a_.tokens.q_start[a_.tokens.batch])
        std::memset(static_cast<char*>(a_.out) + t * bytes, 0, bytes);
  }

  // Some channels of all tokens.
  void take(int64_t first, int64_t count, float* factors) const {
    switch (a_.width) {
      case 3: set_factors<3>(first, count, factors); break;
      case 4: set_factors<4>(first, count, factors); break;
      default: set_factors<0>(first, count, factors);
    }
    const int64_t bytes = count * sizeof(T);
    for (const SequenceOfConv<T>& each : sequences_) {
      const auto& certain = each.sequence->certain;
      if (each.sequence->begins)
        for (int64_t row = 0; row < kept_; ++row)
          std::memset(each.state + row * a_.channels + first, 0, bytes);
      for (const Window<T>& window : each.certain) convolve(window, first, count, factors);
      if (!certain.empty())
        move_state(reinterpret_cast<char*>(each.state + first), kept_, a_.channels * sizeof(T),
                   bytes, static_cast<int64_t>(certain.size()), [&](int64_t i) {
                     return reinterpret_cast<const char*>(x(certain[i]) + first);
                   });
      for (const auto& [node, token] : each.sequence->uncertain)
        std::memcpy(each.rows + node * a_.channels + first, x(token) + first, bytes);
      for (const Window<T>& window : each.uncertain) convolve(window, first, count, factors);
    }
  }

  // Columns of the weight [C, K] of some channels, one after the other.
  template <int kWidth>
  void set_factors(int64_t first, int64_t count, float* factors) const {
    const int64_t width = kWidth > 0 ? kWidth : a_.width;
    const T* weight = static_cast<const T*>(a_.weight) + first * width;
    for (int64_t c = 0; c < count; ++c)
      for (int64_t j = 0; j < width; ++j)
        factors[j * kChannels + c] = vec::to_float(weight[c * width + j]);
  }

  void convolve(const Window<T>& window, int64_t first, int64_t count, const float* factors) const {
    const T* own = x(window.token) + first;
    T* out = static_cast<T*>(a_.out) + window.token * a_.channels + first;
    const T* bias = static_cast<const T*>(a_.bias);
    vec::by_sixteen(count, [&](int64_t i, auto some) {
      Sixteen sum = splat16(0);
      for (int64_t j = 0; j < kept_; ++j)
        add_product(sum, load16(window.before[j] + first + i, some), factors + j * kChannels + i);
      add_product(sum, load16(own + i, some), factors + kept_ * kChannels + i);
      if (bias != nullptr) sum = sum + load16(bias + first + i, some);
      store16(out + i, a_.is_silu ? vec::silu(sum) : sum, some);
    });
  }

  static void add_product(Sixteen& sum, const Sixteen& x, const float* factors) {
    const Sixteen y = load16(factors);
    for (int j = 0; j < kLanes / vec::kWidth; ++j) vec::multiply_add(sum.at[j], x.at[j], y.at[j]);
  }

  const TreeConv& a_;
  const std::vector<StateSequence> found_;
  const int64_t kept_;
  std::vector<SequenceOfConv<T>> sequences_;
};

}  // namespace

void tree_conv(const TreeConv& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    Convolution<float>(a).run(num_threads);
  else
    Convolution<BFloat16>(a).run(num_threads);
}

void fold_conv(const FoldConv& a, int num_threads) {
  const std::vector<AcceptedNodes> sequences = find_accepted(a.paths);
  const auto count = static_cast<int64_t>(sequences.size());
  share_rows(a.layers * count, a.kept * a.row_bytes / 4, num_threads,
             [&](int64_t first, int64_t last) {
               for (int64_t i = first; i < last; ++i) {
                 const AcceptedNodes& each = sequences[i % count];
                 const int64_t place = i / count * a.paths.num_states + each.place;
                 const char* rows =
                     static_cast<const char*>(a.rows) + place * a.paths.num_rows * a.row_bytes;
                 move_state(static_cast<char*>(a.state) + place * a.kept * a.row_bytes, a.kept,
                            a.row_bytes, a.row_bytes, static_cast<int64_t>(each.nodes.size()),
                            [&](int64_t node) { return rows + each.nodes[node] * a.row_bytes; });
               }
             });
}

}  // namespace specc
