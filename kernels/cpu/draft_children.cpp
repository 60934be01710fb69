// How a frontier's children are chosen: the best of a draft's logits, or of them and noise.
#include <cmath>
#include <vector>

#include "best_of_row.h"
#include "filters.h"
#include "noise.h"
#include "row_memory.h"
#include "sampling.h"

namespace specc {
namespace {

thread_local RowMemory children_memory;

// Draws for one row after another, with one memory.
class Drawing {
 public:
  explicit Drawing(const DraftChildren& a) : a_(a), best_(a.num_children) {}

  // Children of frontier node f of sequence b; scores may be null.
  void draw(int64_t b, int64_t f, int64_t* tokens, float* scores) {
    const Options options(a_.sampling.values + b * kNumValues, a_.sampling.words + b * kNumWords);
    const void* logits = a_.logits.row(b * a_.logits.rows_per_sequence + f);
    offset_ = a_.cache_len[b] + a_.depth + 1;
    const bool is_coupled = options.is_sampled_by(Rule::kCoupled);
    if (!options.is_sampled() || options.is_sampled_by(Rule::kDelta)) {
      best_of_row(a_.logits.dtype, logits, a_.vocab, a_.num_children, best_.data());
      if (scores != nullptr) score({{a_.logits.dtype, logits, a_.vocab}, best_[0].value}, scores);
    } else {
      const Filtered filtered = filter(a_.logits.dtype, logits, a_.vocab, options, memory());
      if (is_coupled && scores != nullptr)
        draw_scored(filtered.row, options.seed, scores);
      else if (options.is_sampled_by(Rule::kMss))
        draw_each(filtered, options.seed, a_.columns[f]);
      else
        draw_all(filtered,
                 {options.seed, offset_, is_coupled ? kTokenNoise : draw_noise(a_.columns[f])});
      if (!is_coupled && scores != nullptr) score(filtered, scores);
    }
    for (int64_t i = 0; i < a_.num_children; ++i) tokens[i] = best_[i].token;
  }

 private:
  float* memory() const { return children_memory.row(a_.vocab); }

  void draw_all(const Filtered& filtered, const Noise& noise) {
    const int64_t k = a_.num_children;
    const float least = k == 1 ? filtered.best : near_kth(filtered.row, k, memory());
    best_with_noise(filtered.row, noise, least, k, best_.data());
  }

  // Children that know nothing of each other.
  void draw_each(const Filtered& filtered, int64_t seed, int64_t column) {
    for (int64_t i = 0; i < a_.num_children; ++i)
      best_with_noise(filtered.row, {seed, offset_, draw_noise(column + i)}, filtered.best, 1,
                      &best_[i]);
  }

  // What is ranked is s and noise, of all tokens.
  void draw_scored(const Row& row, int64_t seed, float* scores) {
    float* noisy = memory();
    add_noise(row, {seed, offset_, kTokenNoise}, noisy);
    best_of_row(noisy, a_.vocab, a_.num_children, best_.data());
    score({{DType::kFloat32, noisy, a_.vocab}, best_[0].value}, scores);
  }

  // log_softmax of the row at the chosen tokens.
  void score(const Filtered& filtered, float* scores) {
    const float log_sum = static_cast<float>(std::log(weigh(filtered, nullptr)));
    for (int64_t i = 0; i < a_.num_children; ++i)
      scores[i] = value_of(filtered.row, best_[i].token) - filtered.best - log_sum;
  }

  const DraftChildren& a_;
  std::vector<Best> best_;
  int64_t offset_ = 0;
};

}  // namespace

void draft_children(const DraftChildren& a) {
  Drawing drawing(a);
  const int64_t frontier = a.logits.rows_per_sequence;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t f = 0; f < frontier; ++f) {
      const int64_t at = (b * frontier + f) * a.num_children;
      float* scores = a.scores == nullptr ? nullptr : a.scores + at;
      if (a.cache_len[b] >= 0) {
        drawing.draw(b, f, a.tokens + at, scores);
        continue;
      }
      // padding: whatever tokens, but tokens
      for (int64_t i = 0; i < a.num_children; ++i) {
        a.tokens[at + i] = i;
        if (scores != nullptr) scores[i] = 0.0f;
      }
    }
  }
}

}  // namespace specc
