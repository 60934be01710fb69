// From a row of logits to a distribution: temperature and the filters min-p, top-k and top-p. A
// filter drops what is below some s, so that all of them together are one number, Row::cut.
#pragma once

#include <cstdint>

#include "noise.h"
#include "row_memory.h"

namespace specc {

// The reciprocal of less may not be finite, and sampling is argmax in all but name.
constexpr float kMinTemperature = 1e-5f;

enum class Rule : int64_t { kCoupled, kDelta, kMss, kSwor };

// A sequence's rows of sampling_values and sampling_words; specc/sampling/rows.py has the columns.
struct Options {
  float temperature, top_p, min_p, repetition, presence, frequency;
  int64_t seed, top_k, rule, num_prompt;

  Options(const float* values, const int64_t* words)
      : temperature(values[0]), top_p(values[1]), min_p(values[2]), repetition(values[3]),
        presence(values[4]), frequency(values[5]), seed(words[0]), top_k(words[1]),
        rule(words[2]), num_prompt(words[3]) {}

  bool is_sampled() const { return temperature >= kMinTemperature; }
  bool is_sampled_by(Rule other) const {
    return is_sampled() && rule == static_cast<int64_t>(other);
  }
  bool has_penalties() const {
    return repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  }
};
constexpr int64_t kNumValues = 6, kNumWords = 4, kNumRules = 4;

// Below, `scratch` is a row of RowMemory.

// Not above the k-th best s of a row, and close to it; the best itself for k = 1. NaN is passed
// over; -inf where fewer than k numbers are left.
float near_kth(const Row& row, int64_t k, float* scratch);

// A row after its filters.
struct Filtered {
  Row row;
  float best;  // the highest s
};
Filtered filter(DType dtype, const void* logits, int64_t vocab, const Options& options,
                float* scratch);

// out[token] = e^(s - best), 0 for dropped tokens; returns the sum. `out` may be null.
double weigh(const Filtered& filtered, float* out);

// s of a token, -inf where it is dropped.
float value_of(const Row& row, int64_t token);

}  // namespace specc
