// The target's own token among some columns of its logits, and how good it is: what a rank knows of a
// vocabulary that is cut.
#include <algorithm>
#include <limits>

#include "filters.h"
#include "sampling.h"

namespace specc {
namespace {

thread_local RowMemory column_memory;

}  // namespace

void column_winners(const ColumnWinners& a) {
  const int64_t count = std::clamp<int64_t>(a.vocab_size - a.first, 0, a.num_columns);
  for (int64_t r = 0; r < a.num_rows; ++r) {
    Best best{-std::numeric_limits<float>::infinity(), a.vocab_size};
    const float values[kNumValues] = {a.temperature[r], 1.0f, 0.0f, 1.0f, 0.0f, 0.0f};
    const int64_t words[kNumWords] = {a.seeds[r], 0, 0, 0};
    const Options options(values, words);
    const void* logits = a.logits.row(r);
    if (count > 0 && options.is_sampled()) {
      Filtered row = filter(a.logits.dtype, logits, count, options, column_memory.row(count));
      row.row.first = a.first;
      best_with_noise(row.row, {options.seed, a.positions[r], kTokenNoise}, row.best, 1, &best);
    } else if (count > 0) {
      best_of_row(a.logits.dtype, logits, count, 1, &best);
      best.token += a.first;
    }
    a.scores[r] = best.value;
    a.tokens[r] = best.token;
  }
}

}  // namespace specc
