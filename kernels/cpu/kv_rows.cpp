// How caches of int8 hold a row: codes, then the scale that makes values of them. Rounded as it is
// written (kernels/native.py, _EXACT_SOURCES), so that a row has the same bytes as the oracle's,
// kernels/reference/kv_rows.py.
#include <cmath>
#include <cstring>
#include <limits>

#include "kv_rows.h"

namespace specc {
namespace {

constexpr float kMost = 127;
constexpr float kLeast = 1e-30f;  // below this a row is one of zeros: its factor would be infinite

template <class T>
void store(const T* row, int64_t dim, int8_t* to) {
  float most = 0;
  bool is_finite = true, is_nan = false;
  for (int64_t d = 0; d < dim; ++d) {
    const float x = std::fabs(vec::to_float(row[d]));
    is_nan |= x != x;
    is_finite &= x <= std::numeric_limits<float>::max();
    most = x > most ? x : most;
  }
  const bool is_zero = is_finite && most < kLeast;
  const float factor = is_zero || !is_finite ? 0 : kMost / most;
  for (int64_t d = 0; d < dim; ++d) {
    // of a row with NaN or infinity, codes are 0
    const float code = factor == 0 ? 0 : std::nearbyint(vec::to_float(row[d]) * factor);
    to[d] = static_cast<int8_t>(code > kMost ? kMost : code < -kMost ? -kMost : code);
  }
  float scale = is_zero ? 0 : most / kMost;
  if (is_nan) scale = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(to + dim, &scale, sizeof scale);
}

}  // namespace

void store_row(const float* row, int64_t dim, int8_t* to) { store(row, dim, to); }
void store_row(const vec::BFloat16* row, int64_t dim, int8_t* to) { store(row, dim, to); }

}  // namespace specc
