// The search of specc/artifact/rounding.py for scales and zero points of 4 bits. Every sum that
// chooses is of integers that float32 has, so that the bits are those of the search in torch.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "vec.h"

namespace specc {
namespace {

constexpr int64_t kMaxWidth = 128;
constexpr float kTopLevel = 15, kMiddleLevel = 8, kShareUnits = 1 << 13;
constexpr double kFineUnits = 1 << 30;
constexpr float kRangeParts[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};
// quarters of the levels at which the largest |w| is tried
constexpr int kFirstTop = 28, kEndTop = 40;
// the sum of it and of a number below 2^22 has no fraction
constexpr float kRounder = 12582912.0f;

struct ScaleAndZero {
  float scale, zero;
};

// One group in units of its largest |w|. What fills the last register is 0, and adds nothing to
// sums: its level is at the zero point.
class WeightGroup {
 public:
  WeightGroup(const float* values, int64_t width) : width_(width) {
    float largest = 0;
    for (int64_t i = 0; i < width; ++i) largest = std::max(largest, std::fabs(values[i]));
    largest_ = largest;
    const float unit = largest == 0 ? 1.0f : largest;
    end_ = 0;
    for (int64_t i = 0; i < width; ++i) {
      const float share = values[i] / unit;
      if (std::fabs(share) > std::fabs(end_)) end_ = share;
      low_ = std::min(low_, share);
      high_ = std::max(high_, share);
      shares_[i] = share;
      whole_[i] = std::nearbyintf(share * kShareUnits);
    }
    const int64_t padded = (width + vec::kWidth - 1) / vec::kWidth * vec::kWidth;
    for (int64_t i = width; i < padded; ++i) shares_[i] = whole_[i] = 0;
  }

  ScaleAndZero search(bool has_zeros) const {
    ScaleAndZero best{1, 0};
    float most = -1;
    const auto try_pair = [&](float scale, float zero) {
      if (scale == 0) scale = 1;
      if (has_zeros) zero = std::clamp(std::nearbyintf(zero / scale), 0.0f, kTopLevel);
      const float found = gain({scale, zero});
      if (found > most) most = found, best = {scale, zero};
    };
    if (has_zeros) {
      for (float low_part : kRangeParts)
        for (float high_part : kRangeParts) {
          const float least = low_ * low_part;
          try_pair((high_ * high_part - least) / kTopLevel, -least);
        }
    } else {
      for (int quarters = kFirstTop; quarters < kEndTop; ++quarters)
        for (int sign : {-1, 1}) try_pair(end_ / (sign * quarters / 4.0f), kMiddleLevel);
    }
    best.scale = fitting(best);
    // a scale that fits its levels may lie nearer to others
    if (gain(best) > most) best.scale = fitting(best);
    best.scale *= largest_;
    if (has_zeros && best.scale == 0) best.zero = 0;
    return best;
  }

 private:
  // Differences of the levels nearest to shares i … and of the zero point.
  struct Steps {
    explicit Steps(ScaleAndZero pair)
        : inverse(vec::splat(1 / (pair.scale == 0 ? 1.0f : pair.scale))),
          low(vec::splat(-pair.zero)),
          high(vec::splat(kTopLevel - pair.zero)) {}
    vec::Float at(const float* shares) const {
      vec::Float x = vec::load(shares) * inverse;
      x = x < low ? low : x;
      x = x > high ? high : x;
      return (x + kRounder) - kRounder;
    }
    vec::Float inverse, low, high;
  };

  // (Σ w·q)² / Σ q²
  float gain(ScaleAndZero pair) const {
    const Steps steps(pair);
    vec::Float along{}, squares{};
    for (int64_t i = 0; i < width_; i += vec::kWidth) {
      const vec::Float step = steps.at(shares_ + i);
      along += vec::load(whole_ + i) * step;
      squares += step * step;
    }
    const float sum = vec::sum(along);
    return sum * sum / std::max(vec::sum(squares), 1.0f);
  }

  // The scale that leaves the least squared error with the levels of a pair.
  float fitting(ScaleAndZero pair) const {
    const Steps steps(pair);
    double along = 0;
    float squares = 0;
    for (int64_t i = 0; i < width_; i += vec::kWidth) {
      const vec::Float step = steps.at(shares_ + i);
      for (int64_t j = 0; j < vec::kWidth; ++j) {
        along += std::nearbyint(double{shares_[i + j]} * kFineUnits) * step[j];
        squares += step[j] * step[j];
      }
    }
    return static_cast<float>(along / kFineUnits / std::max(squares, 1.0f));
  }

  int64_t width_;
  float largest_, end_, low_ = 0, high_ = 0;
  alignas(64) float shares_[kMaxWidth], whole_[kMaxWidth];
};

}  // namespace

void int4_scales(
    const float* values, int64_t groups, int64_t width, bool has_zeros, int num_threads,
    float* scales, float* zeros) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t g = 0; g < groups; ++g) {
    const ScaleAndZero found = WeightGroup(values + g * width, width).search(has_zeros);
    scales[g] = found.scale;
    zeros[g] = found.zero;
  }
}

}  // namespace specc
