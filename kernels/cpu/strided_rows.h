// Where the rows of a tensor lie, whatever the strides of its leading dimensions, and how threads
// share them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"

namespace specc {

// Leading dimensions, those that follow each other in memory as one; strides count elements.
struct StridedRows {
  static constexpr int kMost = 8;
  int dim = 0;
  int64_t sizes[kMost] = {}, strides[kMost] = {};
  int64_t count = 1;

  void add(int64_t size, int64_t stride) {
    count *= size;
    if (size == 1) return;
    if (dim > 0 && strides[dim - 1] == size * stride) {
      sizes[dim - 1] *= size;
      strides[dim - 1] = stride;
    } else {
      sizes[dim] = size;
      strides[dim++] = stride;
    }
  }
};

// Goes over rows in their order.
class RowCursor {
 public:
  RowCursor(const StridedRows& rows, int64_t first) : rows_(rows) {
    if (rows.count == 0) return;
    for (int d = rows.dim - 1; d >= 0; --d) {
      index_[d] = first % rows.sizes[d];
      first /= rows.sizes[d];
      offset_ += index_[d] * rows.strides[d];
    }
  }
  // of the row's first element
  int64_t offset() const { return offset_; }
  void next() {
    for (int d = rows_.dim - 1; d >= 0; --d) {
      offset_ += rows_.strides[d];
      if (++index_[d] < rows_.sizes[d]) return;
      offset_ -= index_[d] * rows_.strides[d];
      index_[d] = 0;
    }
  }

 private:
  const StridedRows& rows_;
  int64_t index_[StridedRows::kMost] = {};
  int64_t offset_ = 0;
};

// Elements of cheap work for which another thread is worth waking: some 10 microseconds.
constexpr int64_t kElementsPerThread = 1 << 15;

// work(first, last) on threads that share `rows`, each of so many elements' work.
template <class Work>
void share_rows(int64_t rows, int64_t elements, int num_threads, const Work& work) {
  if (rows == 0) return;  // of which no cursor would have a first one
  const int64_t most = std::min<int64_t>(std::max(num_threads, 1), rows);
  const int64_t wanted = rows * std::max<int64_t>(elements, 1) / kElementsPerThread;
  const auto threads = static_cast<int>(std::clamp<int64_t>(wanted, 1, most));
  in_parallel(threads, [&](int64_t thread, int64_t count, const auto&) {
    work(rows * thread / count, rows * (thread + 1) / count);
  });
}

}  // namespace specc
