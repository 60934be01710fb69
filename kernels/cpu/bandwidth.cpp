// The yardstick of everything that is bound by reading weights.
#include <omp.h>

#include <cstdint>

#include "kernels.h"
#include "vec.h"

namespace specc {
namespace {

// Four sums, so that none waits for another's addition.
float sum_range(const float* data, int64_t count) {
  constexpr int64_t kStep = 4 * vec::kWidth;
  vec::Float sums[4] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep)
    for (int j = 0; j < 4; ++j) sums[j] += vec::load(data + i + j * vec::kWidth);
  float rest = 0;
  for (; i < count; ++i) rest += data[i];
  return rest + vec::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace

float sum_floats(const float* data, int64_t count, int num_threads) {
  float sum = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : sum)
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
    sum += sum_range(data + begin, end - begin);
  }
  return sum;
}

}  // namespace specc
