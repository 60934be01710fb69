// How many threads a kernel may use, apart from what OpenMP gives to everybody else.
#pragma once

#include <omp.h>

namespace specc {

// 0: as OpenMP says.
inline thread_local int kernel_threads_override = 0;

inline int kernel_threads() {
  return kernel_threads_override > 0 ? kernel_threads_override : omp_get_max_threads();
}

// A pass of few rows: the element-wise loops that Inductor generated take less time than one
// barrier, so they run on one thread, while the kernels that read weights and caches keep theirs.
class NarrowPass {
 public:
  NarrowPass() : outer_(kernel_threads_override == 0) {
    if (!outer_) return;
    kernel_threads_override = omp_get_max_threads();
    omp_set_num_threads(1);
  }
  ~NarrowPass() {
    if (!outer_) return;
    omp_set_num_threads(kernel_threads_override);
    kernel_threads_override = 0;
  }
  NarrowPass(const NarrowPass&) = delete;
  NarrowPass& operator=(const NarrowPass&) = delete;

 private:
  bool outer_;
};

}  // namespace specc
