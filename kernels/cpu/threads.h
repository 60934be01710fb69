// How many threads a pass uses: the kernels, and the loops that Inductor generated between them.
#pragma once

#include <omp.h>

namespace specc {

// 0: as OpenMP says.
inline thread_local int kernel_threads_override = 0;

inline int kernel_threads() {
  return kernel_threads_override > 0 ? kernel_threads_override : omp_get_max_threads();
}

// Sets both for the calling thread and restores what it found. OpenMP keeps its count per thread,
// so a thread that never asked torch for one would otherwise run with the default of the machine.
class PassThreads {
 public:
  PassThreads(int kernels, int loops)
      : loops_before_(omp_get_max_threads()), kernels_before_(kernel_threads_override) {
    kernel_threads_override = kernels;
    omp_set_num_threads(loops);
  }
  ~PassThreads() {
    omp_set_num_threads(loops_before_);
    kernel_threads_override = kernels_before_;
  }
  PassThreads(const PassThreads&) = delete;
  PassThreads& operator=(const PassThreads&) = delete;

 private:
  int loops_before_, kernels_before_;
};

}  // namespace specc
