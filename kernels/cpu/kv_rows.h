// Rows of K and V in caches of int8, [D] codes and a float32 scale; kernels/reference/kv_rows.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace specc {

constexpr int64_t kScaleBytes = 4;
// sums of products with a row's codes stay below 2^31 up to here
constexpr int64_t kMostInt8Columns = 1024;

void store_row(const float* row, int64_t dim, int8_t* to);
void store_row(const vec::BFloat16* row, int64_t dim, int8_t* to);

inline float scale_of(const int8_t* row, int64_t dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

// values[d] = codes[d] * scale, as the oracle rounds them.
inline void read_row(const int8_t* row, int64_t dim, float* values) {
  const float scale = scale_of(row, dim);
  for (int64_t d = 0; d < dim; ++d) values[d] = static_cast<float>(row[d]) * scale;
}
inline void read_row(const float* row, int64_t dim, float* values) {
  std::memcpy(values, row, dim * sizeof(float));
}
inline void read_row(const vec::BFloat16* row, int64_t dim, float* values) {
  for (int64_t d = 0; d < dim; ++d) values[d] = vec::to_float(row[d]);
}

}  // namespace specc
