// Walks a tree from its root under a sequence's rule. Rows off the path are not read.
#include <algorithm>
#include <cmath>
#include <vector>

#include "exact_math.h"
#include "sampling.h"
#include "target_rows.h"
#include "vec.h"

namespace specc {
namespace {

using vec::Float;
using vec::kWidth;

struct Memory {
  TargetMemory target;
  RowMemory draft;
};
thread_local Memory acceptance_memory;

// Weights of a row and their sum: probabilities are quotients.
struct Weights {
  float* values;  // [vocab]
  double sum;

  float probability(int64_t token) const {
    return sum > 0 ? values[token] / static_cast<float>(sum) : 0.0f;
  }
};

// P = max(P - Q, 0), of probabilities; both are summed again.
void subtract(Weights& p, Weights& q, int64_t vocab) {
  const float p_sum = static_cast<float>(p.sum), q_sum = static_cast<float>(q.sum);
  constexpr int64_t kRun = 32 * kWidth;
  p.sum = q.sum = 0;
  int64_t i = 0;
  while (i + kWidth <= vocab) {
    Float p_run{}, q_run{};
    for (const int64_t last = std::min(i + kRun, vocab - kWidth + 1); i < last; i += kWidth) {
      const Float weights = vec::load(q.values + i);
      const Float left = vec::load(p.values + i) / p_sum - weights / q_sum;
      const Float kept = left > 0.0f ? left : Float{};
      vec::store(p.values + i, kept);
      p_run += kept;
      q_run += weights;
    }
    p.sum += vec::sum(p_run);
    q.sum += vec::sum(q_run);
  }
  for (; i < vocab; ++i) {
    const float left = p.values[i] / p_sum - q.values[i] / q_sum;
    p.values[i] = left > 0.0f ? left : 0.0f;
    p.sum += p.values[i];
    q.sum += q.values[i];
  }
}

double sum_of(const float* values, int64_t count) {
  constexpr int64_t kRun = 32 * kWidth;
  double sum = 0;
  int64_t i = 0;
  while (i + kWidth <= count) {
    Float run{};
    for (const int64_t last = std::min(i + kRun, count - kWidth + 1); i < last; i += kWidth)
      run += vec::load(values + i);
    sum += vec::sum(run);
  }
  for (; i < count; ++i) sum += values[i];
  return sum;
}

void log_of_row(float* values, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    vec::store(values + i, vec::log_of_probability(vec::load(values + i)));
  for (; i < count; ++i) values[i] = vec::log_of_probability(vec::splat(values[i]))[0];
}

// The walk of one sequence.
class Walk {
 public:
  Walk(const Accept& a, int64_t b)
      : a_(a), b_(b), rows_(a.sampling, a.history, b, a.vocab, acceptance_memory.target),
        options_(rows_.options), tokens_(a.tokens + b * a.token_stride), parents_(a.parents + b * a.parent_stride),
        image_(a.image == nullptr ? nullptr : a.image + b * a.image_stride) {}

  void run(int32_t* path, int32_t* num_accepted, int64_t* output) {
    *num_accepted = 0;
    path[0] = 0;
    for (depth_ = 0, node_ = 0;; ++depth_) {
      rows_.add(tokens_[node_], depth_);
      const int64_t child = step(output + depth_);
      if (child < 0) return;
      node_ = child;
      path[depth_ + 1] = static_cast<int32_t>(child);
      ++*num_accepted;
    }
  }

 private:
  // Writes the token that follows node_; returns the child that carries it, or -1.
  int64_t step(int64_t* token) {
    const TargetRows::LogitRow row =
        rows_.penalized({a_.logits.dtype, a_.logits.row(b_ * a_.num_nodes + node_)});
    if (options_.is_sampled_by(Rule::kMss) || options_.is_sampled_by(Rule::kSwor))
      return try_children(rows_.filtered(row), token);
    *token = rows_.winner(row, depth_);
    if (depth_ == a_.max_depth) return -1;
    for (int64_t child = 1; child < a_.num_nodes; ++child)
      if (parents_[child] == node_ && tokens_[child] == *token) return child;
    return -1;
  }

  int64_t column_child(int64_t column) const {
    const int64_t child = image_ == nullptr ? column : image_[column];
    return child > 0 && parents_[child] == node_ ? child : -1;
  }

  // MSS, and SWOR where tokens that were tried leave q.
  int64_t try_children(const Filtered& filtered, int64_t* token) {
    Weights p{nullptr, 0}, q{nullptr, 0};
    int64_t row_of_q = -1;
    bool is_residual = false;
    tried_.clear();
    for (int64_t t = 0; depth_ < a_.max_depth && t < a_.num_columns; ++t) {
      const int64_t child = column_child(t);
      if (child < 0) continue;
      const int64_t x = tokens_[child];
      if (x < 0 || x >= a_.vocab) continue;
      if (p.values == nullptr) {
        p.values = memory_.target.target.row(a_.vocab);
        p.sum = weigh(filtered, p.values);
      }
      const int64_t q_row = a_.q_rows == nullptr ? -1 : a_.q_rows[t];
      if (q_row >= 0 && q_row != row_of_q) {
        q = weights_of_draft(q_row);
        row_of_q = q_row;
      }
      const float q_of_x = q_row < 0 ? 1.0f : q.probability(x);
      if (q_of_x == 0.0f) continue;
      *token = x;
      if (uniform(rows_.noise(depth_, acceptance(t))) * q_of_x <= p.probability(x)) return child;
      is_residual = true;
      if (q_row < 0) {
        p.values[x] = 0.0f;
        p.sum = sum_of(p.values, a_.vocab);
      } else {
        reject(p, q, x, options_.rule == static_cast<int64_t>(Rule::kSwor));
        tried_.push_back({q_row, x});
      }
      // rounding: nothing is left of a P that x had all of
      if (p.sum == 0) return child;
    }
    if (!is_residual) {
      *token = rows_.sample(filtered, depth_);
    } else {
      log_of_row(p.values, a_.vocab);
      const Row logs{DType::kFloat32, p.values, a_.vocab};
      *token = rows_.sample({logs, near_kth(logs, 1, nullptr)}, depth_);
    }
    return -1;
  }

  void reject(Weights& p, Weights& q, int64_t x, bool leaves) {
    if (!leaves) return subtract(p, q, a_.vocab);
    const float left = std::max(p.probability(x) - q.probability(x), 0.0f);
    p.values[x] = q.values[x] = 0.0f;
    subtract(p, q, a_.vocab);
    p.values[x] = left;
    p.sum += left;
  }

  // Probabilities of a draft's row, without the tokens that were tried.
  Weights weights_of_draft(int64_t q_row) {
    int64_t row = q_row;
    const Logits* draft = a_.drafts.data();
    for (; row >= draft->rows_per_sequence; ++draft) row -= draft->rows_per_sequence;
    float* values = memory_.draft.row(a_.vocab);
    const Filtered filtered = filter(draft->dtype, draft->row(b_ * draft->rows_per_sequence + row),
                                     a_.vocab, options_, values);
    Weights q{values, weigh(filtered, values)};
    if (options_.rule != static_cast<int64_t>(Rule::kSwor)) return q;
    bool has_tried = false;
    for (const Tried& tried : tried_) {
      if (tried.q_row != q_row) continue;
      values[tried.token] = 0.0f;
      has_tried = true;
    }
    if (has_tried) q.sum = sum_of(values, a_.vocab);
    return q;
  }

  struct Tried {
    int64_t q_row, token;
  };

  const Accept& a_;
  const int64_t b_;
  TargetRows rows_;
  const Options& options_;
  const int64_t* tokens_;
  const int32_t* parents_;
  const int32_t* image_;
  int64_t node_ = 0, depth_ = 0;
  std::vector<Tried> tried_;
  Memory& memory_ = acceptance_memory;
};

}  // namespace

void accept(const Accept& a) {
  const int64_t width = a.max_depth + 1;
  for (int64_t b = 0; b < a.history.batch; ++b) {
    int32_t* path = a.path + b * width;
    int64_t* output = a.output_tokens + b * width;
    std::fill(path, path + width, -1);
    std::fill(output, output + width, -1);
    if (a.history.cache_len[b] >= 0) {
      Walk(a, b).run(path, a.num_accepted + b, output);
    } else {
      path[0] = 0, output[0] = 0, a.num_accepted[b] = 0;
    }
  }
}

}  // namespace specc
