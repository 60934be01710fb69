// Rows times a Hadamard matrix; semantics: hadamard_reference of kernels/reference/kv_rows.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "vec.h"

namespace specc {

// Of `dim` columns, as many at a time as the largest power of two that divides them; `to` may be
// the row itself.
template <class T>
void hadamard_row(const T* row, int64_t dim, T* to) {
  static thread_local std::vector<float> of_thread;
  std::vector<float>& values = of_thread;
  if (static_cast<int64_t>(values.size()) < dim) values.resize(dim);
  for (int64_t i = 0; i < dim; ++i) values[i] = vec::to_float(row[i]);
  const int64_t size = dim & -dim;
  for (int64_t distance = 1; distance < size; distance *= 2)
    for (int64_t first = 0; first < dim; first += 2 * distance) {
      float* one = values.data() + first;
      float* other = one + distance;
      for (int64_t i = 0; i < distance; ++i) {
        const float sum = one[i] + other[i];
        other[i] = one[i] - other[i];
        one[i] = sum;
      }
    }
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  for (int64_t i = 0; i < dim; ++i) vec::from_float(values[i] * factor, to + i);
}

}  // namespace specc
