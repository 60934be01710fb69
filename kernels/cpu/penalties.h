// Penalties of tokens that came before: those of a sequence are few, so they are listed, and a row
// of logits is copied and changed there.
#pragma once

#include <cstdint>
#include <vector>

#include "filters.h"

namespace specc {

// The tokens of a sequence, counted; one object serves sequence after sequence.
class TokenCounts {
 public:
  // Begins a sequence over a vocabulary; what the last one left is removed.
  void begin(int64_t vocab);
  // Tokens that the vocabulary lacks are passed over.
  void add(int64_t token, bool is_output);
  // Takes back what was added last.
  void remove(int64_t token, bool is_output);
  // out = a row of logits with penalties, [vocab] float.
  void penalize(DType dtype, const void* logits, const Options& options, float* out) const;

 private:
  std::vector<int32_t> counts_;  // 0 for tokens that never came, else 1 + times in the output
  std::vector<int64_t> tokens_;  // those that came
  std::vector<bool> is_first_;   // of every addition: its token had not come before
  int64_t vocab_ = 0;
};

}  // namespace specc
