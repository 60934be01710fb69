// specc::add_lora; semantics: kernels/reference/lora.py, add_lora_reference.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace specc {

// A row of `pieces`: a low-rank term of one adapter.
struct LoraPiece {
  int32_t adapter, column, columns, row, rank;
};

struct AddLora {
  DType dtype;              // of base, x, down, up and out
  int64_t tokens, n, k;     // T, N, K
  const void* base;         // [T, N]
  int64_t base_stride;
  const void* x;            // [T, K]
  int64_t x_stride;
  const int32_t* adapters;  // [T]
  const void* down;         // [R, K]
  const void* up;           // [rank, columns] of one piece after the other
  const LoraPiece* pieces;  // [P]
  const float* scales;      // [P]
  int64_t num_pieces;
  void* out;                // [T, N]
};

void add_lora(const AddLora& a, int num_threads);

}  // namespace specc
