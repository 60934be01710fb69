"""How many products a core makes a second, measured in registers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from attention_kernels import FLAGS

from specc.system.cxx_compiler import find_compiler

# billions of products a second, of floats and of what bfloat16 is multiplied in
PRODUCTS = """
#include <time.h>
#include "vec.h"
using namespace specc::vec;
// of this thread, which other jobs may interrupt
double seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}
template <class V>
double rate(V one, int products) {
  constexpr int kSums = 12, kTurns = 2000000;  // more sums than a product takes cycles
  Float sums[kSums] = {};
  const double start = seconds();
  for (int i = 0; i < kTurns; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) {
      multiply_add(sums[j], one, one);
      keep(sums[j]);  // else the compiler would make one sum of all
    }
  }
  const double taken = seconds() - start;
  Float total = {};
#pragma GCC unroll 12
  for (int j = 0; j < kSums; ++j) total += sums[j];
  // what is not used is not computed
  return 1e-9 * products * kSums * kTurns / taken + 1e-30 * sum(total);
}
extern "C" double rate_of_floats() { return rate(splat(1.0f), kWidth); }
extern "C" double rate_of_pairs() {
  if constexpr (kHasPairs) return rate(splat(Pair{0x3f803f80}), 2 * kWidth);
  return rate_of_floats();
}
"""


class Products:
    """How fast a core multiplies in registers, and how fast it could read K and V by that."""

    def __init__(self, sources: Path, scratch: Path) -> None:
        source, library = scratch / "products.cpp", scratch / "products.so"
        source.write_text(PRODUCTS, encoding="utf-8")
        command = [find_compiler(), *FLAGS, "-I", str(sources), "-shared", str(source)]
        subprocess.run([*command, "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.rate_of_floats.restype = loaded.rate_of_pairs.restype = ctypes.c_double
        self.floats = max(loaded.rate_of_floats() for _ in range(5))
        self.pairs = max(loaded.rate_of_pairs() for _ in range(5))

    def bound(self, rows: int, dtype: torch.dtype, threads: int) -> float:
        """GB/s of K and V at which the products alone keep the threads busy.

        Args:
            rows: query rows that share a KV head.
            dtype: of K, V and queries, torch.float32 or torch.bfloat16.
            threads: each as fast as one alone.
        """
        of_keys = self.floats if dtype == torch.float32 else self.pairs
        seconds = rows / of_keys + rows / self.floats  # of 1e9 elements of K and as many of V
        return threads * 2 * dtype.itemsize / seconds
