// No filter sorts a row: bounds that a pass of maxima gives leave few tokens to select from.
#include "filters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "exact_math.h"
#include "vec.h"

namespace specc {
namespace {

using vec::Float;
using vec::Int;
using vec::kWidth;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// registers that are computed in step
constexpr int kTogether = 4;
using Block = vec::Many<kTogether>;
constexpr int64_t kBlock = kTogether * kWidth;
static_assert(kBlock <= RowMemory::kPadding);
// sums of more blocks than this go on in double
constexpr int64_t kRun = 16 * kBlock;

// p[0 … count - 1], then -inf.
template <typename T>
Block load_block(const T* p, int64_t count) {
  Block block;
  if (count >= kBlock) {
    for (int j = 0; j < kTogether; ++j) block.at[j] = vec::load(p + j * kWidth);
    return block;
  }
  for (int64_t i = 0; i < kBlock; ++i)
    block.at[i / kWidth][i % kWidth] = i < count ? vec::to_float(p[i]) : -kInfinity;
  return block;
}

// Calls visit(first token, s) for every block of tokens first … last - 1.
template <typename T, typename Visit>
void for_each_block(const Row& row, int64_t first, int64_t last, Visit&& visit) {
  const T* logits = static_cast<const T*>(row.logits);
  for (last = std::min(last, row.vocab); first < last; first += kBlock)
    visit(first, load_block(logits + first, last - first) * row.factor);
}

template <typename Visit>
void for_each_block(const Row& row, int64_t first, int64_t last, Visit&& visit) {
  row.dtype == DType::kFloat32 ? for_each_block<float>(row, first, last, visit)
                               : for_each_block<vec::BFloat16>(row, first, last, visit);
}

// Whether any s reaches the lowest.
bool reaches(const Block& s, float lowest) {
  Int mask{};
  for (const Float& x : s.at) mask |= x >= lowest;
  return lanes_of(mask) != 0;
}

float exp_of(float x) { return vec::exp_of_nonpositive(vec::splat(x))[0]; }

// Appends lanes of x to a list that has kWidth places left or more; returns their number.
int64_t append(float* list, Float x, uint32_t lanes) {
#ifdef __AVX512F__
  const auto packed = _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), (__m512)x);
  vec::store(list, (Float)packed);
  return __builtin_popcount(lanes);
#else
  int64_t count = 0;
  for (; lanes; lanes &= lanes - 1) list[count++] = x[__builtin_ctz(lanes)];
  return count;
#endif
}

// Writes the s >= lowest of a row, in any order; returns how many they are. NaN is left out.
int64_t gather(const Row& row, float lowest, float* out) {
  int64_t count = 0;
  for_each_block(row, 0, row.vocab, [&](int64_t, const Block& s) {
    if (!reaches(s, lowest)) return;
    for (const Float& x : s.at) count += append(out + count, x, lanes_of(x >= lowest));
  });
  return count;
}

Block weights_of(const Block& s, float best) {
  return vec::exp_of_nonpositive(vec::each(s, [best](Float x) { return x - best; }));
}

Float sum_of(const Block& block) {
  Float sum{};
  for (const Float& x : block.at) sum += x;
  return sum;
}

double sum_of_weights(const float* s, int64_t count, float best) {
  double sum = 0;
  for (int64_t first = 0; first < count;) {
    Float run{};
    for (const int64_t last = std::min(count, first + kRun); first < last; first += kBlock)
      run += sum_of(weights_of(load_block(s + first, count - first), best));
    sum += vec::sum(run);
  }
  return sum;
}

// Lowest and highest of a list.
std::pair<float, float> extremes(const float* s, int64_t count) {
  Float low = vec::splat(s[0]), high = low;
  auto widen = [&](Float x) {
    low = x < low ? x : low;
    high = x > high ? x : high;
  };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) widen(vec::load(s + i));
  for (; i < count; ++i) widen(vec::splat(s[i]));
  return {-vec::max(-low), vec::max(high)};
}

// The s at which the weights of s[0 … count - 1], from the highest on, first sum up to `needed`:
// the list is dealt into buckets by s, and only the one in which that happens is looked at again.
float descend(float* s, int64_t count, float best, double needed) {
  constexpr int kBuckets = 256, kTables = 4, kFew = 48;
  while (count > kFew) {
    const auto [low, high] = extremes(s, count);
    const float scale = kBuckets / (high - low);
    // all are equal, or next to each other, or infinitely far apart
    if (!(scale > 0.0f && scale < kInfinity)) break;
    auto buckets_of = [high = high, scale](Float x) {
      const Float bucket = (high - x) * scale, last = vec::splat(kBuckets - 1);
      return __builtin_convertvector(bucket > last ? last : bucket, Int);
    };
    // neighbors go to different tables, so that one does not wait for the other
    double mass[kTables][kBuckets] = {};
    for (int64_t first = 0; first < count; first += kBlock) {
      const Block block = load_block(s + first, count - first);
      const Block weights = weights_of(block, best);
      // -inf after the end weighs nothing
      for (int j = 0; j < kTogether; ++j) {
        const Int buckets = buckets_of(block.at[j]);
        for (int i = 0; i < kWidth; ++i) mass[i % kTables][buckets[i]] += weights.at[j][i];
      }
    }
    int chosen = 0;
    for (; chosen < kBuckets - 1; ++chosen) {
      double sum = 0;
      for (const auto& table : mass) sum += table[chosen];
      if (sum >= needed) break;
      needed -= sum;
    }
    int64_t left = 0;
    for (int64_t first = 0; first < count; first += kBlock) {
      const Block block = load_block(s + first, count - first);
      for (const Float& x : block.at)
        left += append(s + left, x, lanes_of((buckets_of(x) == chosen) & (x >= low)));
    }
    count = left;
  }
  std::sort(s, s + count, std::greater<float>());
  double sum = 0;
  int64_t i = 0;
  for (; i < count - 1; ++i)
    if ((sum += exp_of(s[i] - best)) >= needed) break;
  return s[i];
}

// The lowest s whose weight is min_p or more.
float cut_of_min_p(float best, float min_p) {
  // floats in their order as integers
  auto to_float = [](int64_t rank) {
    const int32_t bits = static_cast<int32_t>(rank < 0 ? (rank ^ 0x7FFFFFFF) : rank);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  auto to_rank = [](float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return int64_t{bits < 0 ? bits ^ 0x7FFFFFFF : bits};
  };
  int64_t low = to_rank(-kInfinity), high = to_rank(best);
  // the best itself stays, whatever min_p is
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (exp_of(to_float(middle) - best) >= min_p)
      high = middle;
    else
      low = middle + 1;
  }
  return to_float(high);
}

float select_kth(float* s, int64_t count, int64_t k) {
  if (count < k) return -kInfinity;
  std::nth_element(s, s + k - 1, s + count, std::greater<float>());
  return s[k - 1];
}

// Maxima of every kBlock-th token: of tokens first … last - 1, -inf where there is none.
template <typename T>
Block maxima_of(const Row& row, int64_t first, int64_t last) {
  const T* logits = static_cast<const T*>(row.logits);
  Block maxima;
  for (Float& x : maxima.at) x = vec::splat(-kInfinity);
  for (; first < last; first += kBlock)
    maxima = vec::each(load_block(logits + first, last - first), maxima,
                       [](Float x, Float best) { return x > best ? x : best; });
  // the factor is positive, and rounding keeps the order
  return maxima * row.factor;
}

// The lowest s of the shortest prefix, by descending s, that has the share top_p of all that the
// row keeps so far.
float cut_of_top_p(const Filtered& filtered, float top_p, float* scratch) {
  // another filter has left few
  const bool is_short = filtered.row.cut > -kInfinity;
  const Row& row = filtered.row;
  float lowest = row.cut;
  double total = 0;
  if (!is_short) {
    total = weigh(filtered, nullptr);
    // together, tokens of less than this weight are less than what top_p drops
    const double least = 0.5 * (1.0 - double{top_p}) * total / static_cast<double>(row.vocab);
    lowest = std::max(lowest, filtered.best + static_cast<float>(std::log(least)) - 1e-3f);
  }
  // -inf weighs nothing
  lowest = std::max(lowest, -std::numeric_limits<float>::max());
  const int64_t count = gather(row, lowest, scratch);
  if (is_short) total = sum_of_weights(scratch, count, filtered.best);
  if (count == 0) return row.cut;
  return descend(scratch, count, filtered.best, double{top_p} * total);
}

}  // namespace

float near_kth(const Row& row, int64_t k, float* scratch) {
  // parts of the row, each with its maximum: four for each of the k
  const int64_t runs = k == 1 ? 1 : (4 * k + kBlock - 1) / kBlock;
  const int64_t run = std::max(kBlock, (row.vocab / runs + kBlock - 1) / kBlock * kBlock);
  int64_t count = 0;
  for (int64_t first = 0; first < row.vocab; first += run) {
    const int64_t last = k == 1 ? row.vocab : std::min(first + run, row.vocab);
    const Block maxima = row.dtype == DType::kFloat32
                             ? maxima_of<float>(row, first, last)
                             : maxima_of<vec::BFloat16>(row, first, last);
    if (k == 1) {
      Float best = maxima.at[0];
      for (const Float& x : maxima.at) best = vec::max(best, x);
      return vec::max(best);
    }
    // a part without a token has no maximum
    const int64_t filled = std::min(last - first, kBlock);
    for (int64_t i = 0; i < filled; ++i) scratch[count++] = maxima.at[i / kWidth][i % kWidth];
  }
  return select_kth(scratch, count, k);
}

Filtered filter(DType dtype, const void* logits, int64_t vocab, const Options& options,
                float* scratch) {
  Filtered result{{dtype, logits, vocab, 1.0f / options.temperature}, 0.0f};
  Row& row = result.row;
  float cut = -kInfinity;
  int64_t count = 0;
  if (0 < options.top_k && options.top_k < vocab) {
    count = gather(row, near_kth(row, options.top_k, scratch), scratch);
    cut = select_kth(scratch, count, options.top_k);
  }
  result.best = count > 0 ? *std::max_element(scratch, scratch + count) : near_kth(row, 1, scratch);
  if (options.min_p > 0.0f) cut = std::max(cut, cut_of_min_p(result.best, options.min_p));
  row.cut = cut;
  if (options.top_p < 1.0f) row.cut = std::max(cut, cut_of_top_p(result, options.top_p, scratch));
  return result;
}

double weigh(const Filtered& filtered, float* out) {
  const Row& row = filtered.row;
  const float floor = std::max(row.cut, filtered.best + vec::kLeastExponent);
  double sum = 0;
  for (int64_t first = 0; first < row.vocab; first += kRun) {
    Float run{};
    for_each_block(row, first, first + kRun, [&](int64_t token, const Block& s) {
      Block weights{};
      if (reaches(s, floor)) {
        weights = vec::each(weights_of(s, filtered.best), s, [&row](Float weight, Float x) {
          return x < row.cut ? Float{} : weight;
        });
        run += sum_of(weights);
      }
      if (out == nullptr) return;
      const int64_t count = std::min(kBlock, row.vocab - token);
      if (count == kBlock)
        for (int j = 0; j < kTogether; ++j) vec::store(out + token + j * kWidth, weights.at[j]);
      else
        for (int64_t i = 0; i < count; ++i) out[token + i] = weights.at[i / kWidth][i % kWidth];
    });
    sum += vec::sum(run);
  }
  return sum;
}

float value_of(const Row& row, int64_t token) {
  const float logit = row.dtype == DType::kFloat32
                          ? static_cast<const float*>(row.logits)[token]
                          : vec::to_float(static_cast<const vec::BFloat16*>(row.logits)[token]);
  const float s = logit * row.factor;
  return s < row.cut ? -kInfinity : s;
}

}  // namespace specc
