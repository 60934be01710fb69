// What specc::tree_attention makes of a tile's scores: weights of an online softmax.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tree_attention_bits.h"
#include "tree_attention_view.h"
#include "vec.h"

namespace specc::attention {

// No score comes near these; -inf would make NaN of a difference.
constexpr float kNothing = -1e30f;  // maximum of no scores
constexpr float kMasked = -3e38f;   // score of a key that is masked: 2^(kMasked - kNothing) is 0

// Raises a row's maximum to `best`, if that is more: its sum of weights is multiplied by what then
// multiplies the row's other sums, too.
inline bool raise(float best, float* max, vec::Float* sum, float* alpha) {
  if (!(best > *max)) return false;
  const vec::Float decay = vec::exp2_of_nonpositive(vec::splat(*max - best));
  *max = best;
  *alpha = decay[0];
  *sum *= decay;
  return true;
}

// Replaces a row's kTile scores by weights 2^(score - max), 0 where its bit is not set, whatever
// the score; updates the row's maximum and its sum of weights by lane. True if the maximum grew, so
// that what was added before is to be multiplied by alpha.
inline bool softmax(float* scores, uint64_t bits, float factor, float* max, float* sum,
                    float* alpha) {
  using namespace vec;
  constexpr int kCount = kTile / kWidth;
  const Float scale = splat(factor * 1.44269504088896f);  // log2(e): weights are powers of two
  Float x[kCount], best = splat(kNothing);
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) {
    x[j] = load(scores + j * kWidth) * scale;
    keep(x[j]);  // rounded before the maximum is taken off, as in softmax_of_parts
  }
  if (bits != ~uint64_t{0}) {
#pragma GCC unroll 16
    for (int j = 0; j < kCount; ++j) x[j] = select(bits >> (j * kWidth), x[j], splat(kMasked));
  }
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) best = vec::max(best, x[j]);
  Float total = load(sum);
  const bool grows = raise(vec::max(best), max, &total, alpha);
  const float most = *max;
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) {
    x[j] = exp2_of_nonpositive(x[j] - most);
    total += x[j];
    store(scores + j * kWidth, x[j]);
  }
  store(sum, total);
  return grows;
}

// A row's keys in one part of a tile, as View has them.
struct RowPart {
  float* scores;
  uint64_t bits;
  float factor;
  int64_t place, prefix;
};

// As softmax, of a row whose keys lie in several parts, or elsewhere than in plain decoding. The
// maximum is that of all parts, and weights are added in the lanes where plain decoding has them.
inline bool softmax_of_parts(const RowPart* parts, int64_t count, float* max, float* sum,
                             float* alpha) {
  using namespace vec;
  Float best = splat(kNothing);
  for (const RowPart* part = parts; part < parts + count; ++part) {
    if (!part->bits) continue;
    const Float scale = splat(part->factor * 1.44269504088896f);
    for (int j = 0; j < kTile; j += kWidth) {
      const Float x = select(part->bits >> j, load(part->scores + j) * scale, splat(kMasked));
      store(part->scores + j, x);
      best = vec::max(best, x);
    }
  }
  Float total = load(sum);
  const bool grows = raise(vec::max(best), max, &total, alpha);
  const float most = *max;
  alignas(64) float weights[kTile] = {};  // by column of the tile
  for (const RowPart* part = parts; part < parts + count; ++part) {
    if (!part->bits) {
      std::memset(part->scores, 0, kTile * sizeof(float));
      continue;
    }
    const bool moves = part->place != kInPlace;
    const uint64_t in_place = part->bits & range_bits(0, 0, moves ? part->prefix : kTile);
    for (int j = 0; j < kTile; j += kWidth) {
      const Float x = exp2_of_nonpositive(load(part->scores + j) - most);
      store(part->scores + j, x);
      if (in_place) store(weights + j, select(in_place >> j, x, splat(0)));
    }
    int64_t place = part->place;
    for (uint64_t rest = part->bits & ~in_place; rest; rest &= rest - 1)
      weights[place++] = part->scores[__builtin_ctzll(rest)];
  }
  for (int j = 0; j < kTile; j += kWidth) total += load(weights + j);
  store(sum, total);
  return grows;
}

// Replaces a row's kTile scores by score * factor + slope * (key - token), of positions of keys.
inline void add_distances(float* scores, float factor, float slope, const float* keys,
                          float token) {
  using namespace vec;
  for (int j = 0; j < kTile; j += kWidth) {
    const Float distance = load(keys + j) - splat(token);
    store(scores + j, load(scores + j) * splat(factor) + splat(slope) * distance);
  }
}

inline vec::Float rounded_to_bfloat16(vec::Float x) {
  using namespace vec;
  const UInt bits = reinterpret_cast<UInt>(x);
  return reinterpret_cast<Float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// As add_distances, of positions and products that are rounded to bfloat16, and then scaled.
inline void add_rounded_distances(float* scores, float factor, float slope, float scale,
                                  const float* keys, float token) {
  using namespace vec;
  const Float own = rounded_to_bfloat16(splat(slope) * rounded_to_bfloat16(splat(token)));
  for (int j = 0; j < kTile; j += kWidth) {
    const Float place = rounded_to_bfloat16(load(keys + j));
    const Float of_key = rounded_to_bfloat16(splat(slope) * place);
    store(scores + j, load(scores + j) * splat(factor) + (of_key - own) * splat(scale));
  }
}

// Replaces a row's kTile scores by tanh(score * factor).
inline void squash(float* scores, float factor) {
  using namespace vec;
  constexpr float kTwoLog2E = 2.88539008177793f;  // of e^(-2|x|)
  for (int j = 0; j < kTile; j += kWidth) {
    const Float x = load(scores + j) * splat(factor);
    const Float size = vec::max(x, -x);
    const Float e = exp2_of_nonpositive(size * splat(-kTwoLog2E));
    const Float y = (1.0f - e) / (1.0f + e);
    store(scores + j, x < 0.0f ? -y : y);
  }
}

}  // namespace specc::attention
