// What specc::tree_attention sums for query rows, and how sums of two pieces become one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tree_attention_softmax.h"
#include "vec.h"

namespace specc::attention {

using namespace vec;

// Softmax numerators so far, and per row the maximum score and the sum of weights by lane.
struct Sums {
  float *values, *max, *sum;
  static int64_t size(int64_t rows, int64_t width) { return rows * (width + 2 * kWidth); }
  Sums(float* storage, int64_t rows, int64_t width)
      : values(storage), max(storage + rows * width), sum(max + rows * kWidth) {}
  // The rows from `row` on.
  Sums from(int64_t row, int64_t width) const {
    Sums to = *this;
    to.values += row * width, to.max += row, to.sum += row * kWidth;
    return to;
  }
  void clear(int64_t rows, int64_t width) const {
    std::memset(values, 0, rows * width * sizeof(float));
    std::memset(sum, 0, rows * kWidth * sizeof(float));
    std::fill(max, max + rows, kNothing);
  }
  // The rows of a later piece are added to these.
  void add(const Sums& piece, int64_t rows, int64_t width) const {
    for (int64_t r = 0; r < rows; ++r) {
      const float most = std::max(max[r], piece.max[r]);
      const Float old_factor = exp2_of_nonpositive(splat(max[r] - most));
      const Float factor = exp2_of_nonpositive(splat(piece.max[r] - most));
      max[r] = most;
      const auto add_at = [&](float* x, const float* y) {
        Float sum = load(x) * old_factor;
        keep(sum);  // the same instructions wherever this is inlined
        multiply_add(sum, load(y), factor);
        store(x, sum);
      };
      add_at(sum + r * kWidth, piece.sum + r * kWidth);
      for (int64_t j = r * width; j < (r + 1) * width; j += kWidth)
        add_at(values + j, piece.values + j);
    }
  }
};

// Where the pieces of a unit are summed, one after the other.
class InOrder {
 public:
  // to: what is wanted; each piece after the first is summed in `piece`, then added.
  InOrder(Sums to, Sums piece, int64_t rows, int64_t width)
      : to_(to), piece_(piece), rows_(rows), width_(width) {}
  Sums next() {
    finish();
    return count_++ == 0 ? to_ : piece_;
  }
  void finish() const {
    if (count_ > 1) to_.add(piece_, rows_, width_);
  }

 private:
  const Sums to_, piece_;
  const int64_t rows_, width_;
  int64_t count_ = 0;
};

}  // namespace specc::attention
