// As bounds.cpp, for what sampling reads.
#include "filters.h"
#include "refusal.h"
#include "sampling.h"

namespace specc {
namespace {

// The history of sequences that have penalties.
void check_counted(const SamplingRows& sampling, const History& history, int64_t b) {
  const Options options(sampling.values + b * kNumValues, sampling.words + b * kNumWords);
  if (options.has_penalties()) check_history(history, b);
}

void check_rules(const SamplingRows& sampling, const int32_t* cache_len, int64_t batch) {
  for (int64_t b = 0; b < batch; ++b) {
    const Options options(sampling.values + b * kNumValues, sampling.words + b * kNumWords);
    if (cache_len[b] < 0 || !options.is_sampled()) continue;
    if (options.rule < 0 || options.rule >= kNumRules)
      refuse("rule " + std::to_string(options.rule) + " of sequence " + std::to_string(b),
             up_to(kNumRules - 1));
  }
}

}  // namespace

void check_bounds(const DraftChildren& a) {
  check_rules(a.sampling, a.cache_len, a.batch);
  for (int64_t f = 0; f < a.logits.rows_per_sequence; ++f)
    if (a.columns[f] < 0) refuse(indexed("columns", f, a.columns[f]), "0 or more");
}

void check_bounds(const Accept& a) {
  check_rules(a.sampling, a.history.cache_len, a.history.batch);
  int64_t draft_rows = 0;
  for (const Logits& draft : a.drafts) draft_rows += draft.rows_per_sequence;
  // without a sequence, nothing says how many rows each would have
  const bool has_q_rows = a.q_rows != nullptr && a.history.batch > 0;
  for (int64_t t = 0; has_q_rows && t < a.num_columns; ++t)
    if (a.q_rows[t] >= draft_rows)
      refuse(indexed("q_rows", t, a.q_rows[t]),
             "less than " + std::to_string(draft_rows) + ", or -1: rows of draft_logits");
  for (int64_t b = 0; b < a.history.batch; ++b) {
    if (a.history.cache_len[b] < 0) continue;
    for (int64_t t = 0; a.image != nullptr && t < a.num_columns; ++t)
      if (const int32_t node = a.image[b * a.image_stride + t]; node >= a.num_nodes)
        refuse(indexed("image[" + std::to_string(b) + "]", t, node),
               "-1 … " + std::to_string(a.num_nodes - 1));
    check_counted(a.sampling, a.history, b);
  }
}

void check_bounds(const NodeWinners& a) {
  check_rules(a.sampling, a.history.cache_len, a.history.batch);
  for (int64_t b = 0; b < a.history.batch; ++b)
    if (a.history.cache_len[b] >= 0) check_counted(a.sampling, a.history, b);
}

}  // namespace specc
