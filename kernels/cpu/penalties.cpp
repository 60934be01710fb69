#include "penalties.h"

#include <cstring>

#include "vec.h"

namespace specc {

void TokenCounts::begin(int64_t vocab) {
  for (const int64_t token : tokens_) counts_[token] = 0;
  tokens_.clear();
  is_first_.clear();
  vocab_ = vocab;
  if (static_cast<int64_t>(counts_.size()) < vocab) counts_.resize(vocab);
}

void TokenCounts::add(int64_t token, bool is_output) {
  if (token < 0 || token >= vocab_) return;
  is_first_.push_back(counts_[token] == 0);
  if (is_first_.back()) {
    tokens_.push_back(token);
    counts_[token] = 1;
  }
  counts_[token] += is_output;
}

void TokenCounts::remove(int64_t token, bool is_output) {
  if (token < 0 || token >= vocab_) return;
  counts_[token] -= is_output;
  if (is_first_.back()) {
    tokens_.pop_back();
    counts_[token] = 0;
  }
  is_first_.pop_back();
}

void TokenCounts::penalize(DType dtype, const void* logits, const Options& options,
                           float* out) const {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, logits, vocab_ * sizeof(float));
  } else {
    const vec::BFloat16* row = static_cast<const vec::BFloat16*>(logits);
    for (int64_t i = 0; i < vocab_; ++i) out[i] = vec::to_float(row[i]);
  }
  for (const int64_t token : tokens_) {
    const int32_t count = counts_[token] - 1;
    float& logit = out[token];
    logit = logit > 0.0f ? logit / options.repetition : logit * options.repetition;
    logit -= options.frequency * static_cast<float>(count) + (count > 0 ? options.presence : 0.0f);
  }
}

}  // namespace specc
