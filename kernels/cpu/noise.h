// Random numbers by counters: a pure function of (seed, purpose, offset, token), those of
// kernels/reference/sampling.py to the last bit.
#pragma once

#include <cstdint>
#include <limits>

#include "best_of_row.h"
#include "kernels.h"

namespace specc {

// What a number is for: the second word of the counter.
constexpr uint32_t kTokenNoise = 0;
constexpr uint32_t draw_noise(int64_t column) { return static_cast<uint32_t>(1 + 8 * column); }
constexpr uint32_t acceptance(int64_t column) { return static_cast<uint32_t>(2 + 8 * column); }

struct Noise {
  int64_t seed;
  int64_t offset;  // position of the token that is to be drawn
  uint32_t purpose;
};

// A row of logits as the rules read it: s = logit * factor; tokens with s below `cut` are dropped.
struct Row {
  DType dtype;
  const void* logits;  // [vocab]
  int64_t vocab;
  float factor = 1.0f;
  float cut = -std::numeric_limits<float>::infinity();
  int64_t first = 0;  // token of the first logit: the noise is that of tokens
};

// In (0, 1): the first word of the first counter.
float uniform(const Noise& noise);

// The k <= vocab best of s + noise, like best_of_row; dropped tokens rank last. `least`: k tokens
// or more have an s that is not below it. Noise of what cannot be among the best is not computed.
void best_with_noise(const Row& row, const Noise& noise, float least, int64_t k, Best* best);

// out[token - first] = s + noise, -inf for dropped tokens.
void add_noise(const Row& row, const Noise& noise, float* out);

}  // namespace specc
