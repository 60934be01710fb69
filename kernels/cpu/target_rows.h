// What a sequence makes of the target's logits after a node: penalties of the tokens down to it,
// filters, noise. Semantics: kernels/reference/accept.py. Wherever this is included, the last bit
// decides (kernels/native.py, _EXACT_SOURCES).
#pragma once

#include <algorithm>
#include <cstdint>

#include "best_of_row.h"
#include "filters.h"
#include "noise.h"
#include "penalties.h"
#include "row_memory.h"
#include "sampling.h"

namespace specc {

// Two rows of floats, and the counts of one sequence's tokens.
struct TargetMemory {
  RowMemory penalized, target;
  TokenCounts counts;
};

class TargetRows {
 public:
  // A row of logits of either dtype.
  struct LogitRow {
    DType dtype;
    const void* data;  // [vocab]
  };

  TargetRows(const SamplingRows& sampling, const History& history, int64_t b, int64_t vocab,
             TargetMemory& memory)
      : options(sampling.values + b * kNumValues, sampling.words + b * kNumWords),
        length(history.cache_len[b]), vocab_(vocab), memory_(memory) {
    if (options.has_penalties()) count_history(history, b);
  }

  const Options options;
  const int64_t length;  // committed rows: the position of the root

  // A token of the tree, which stands `depth` after the root.
  void add(int64_t token, int64_t depth) {
    if (options.has_penalties()) memory_.counts.add(token, is_output(depth));
  }
  void remove(int64_t token, int64_t depth) {
    if (options.has_penalties()) memory_.counts.remove(token, is_output(depth));
  }

  // Overwrites what it returned last, as `filtered` does.
  LogitRow penalized(const LogitRow& row) {
    if (!options.has_penalties()) return row;
    float* out = memory_.penalized.row(vocab_);
    memory_.counts.penalize(row.dtype, row.data, options, out);
    return {DType::kFloat32, out};
  }
  Filtered filtered(const LogitRow& row) {
    return filter(row.dtype, row.data, vocab_, options, memory_.target.row(vocab_));
  }

  // The target's own token after a node, of a row after penalties.
  int64_t winner(const LogitRow& row, int64_t depth) {
    if (options.is_sampled()) return sample(filtered(row), depth);
    Best best;
    best_of_row(row.dtype, row.data, vocab_, 1, &best);
    return best.token;
  }
  int64_t sample(const Filtered& row, int64_t depth) const {
    Best best;
    best_with_noise(row.row, noise(depth, kTokenNoise), row.best, 1, &best);
    return best.token;
  }
  // Of the position after a node.
  Noise noise(int64_t depth, uint32_t purpose) const {
    return {options.seed, length + depth + 1, purpose};
  }

 private:
  bool is_output(int64_t depth) const { return length + depth >= options.num_prompt; }

  void count_history(const History& h, int64_t b) {
    const int32_t* table = h.block_table + b * h.blocks_per_sequence;
    memory_.counts.begin(vocab_);
    for (int64_t position = 0; position < length;) {
      const int32_t* block = h.tokens + table[position / h.block_size] * h.block_size;
      const int64_t last = std::min(length, position + h.block_size);
      for (int64_t i = 0; position < last; ++i, ++position)
        memory_.counts.add(block[i], position >= options.num_prompt);
    }
  }

  const int64_t vocab_;
  TargetMemory& memory_;
};

}  // namespace specc
