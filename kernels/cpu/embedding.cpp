// Rows of a weight that lies in blocks of outputs, as `linear` reads it: what an embedding that is
// tied to the output projection looks up. An operator of its own, since Inductor would gather the
// same row again in each loop that reads it.

#include <cstring>
#include <stdexcept>

#include "kernels.h"

namespace specc {
namespace {

// One output of all units of a block; a bfloat16 unit is two columns, the last one may be half.
void copy_row(const uint32_t* value, char* out, int64_t bytes) {
  const int64_t whole = bytes / 4;
  for (int64_t i = 0; i < whole; ++i) std::memcpy(out + 4 * i, value + i * kLinearBlock, 4);
  if (bytes % 4 != 0) std::memcpy(out + 4 * whole, value + whole * kLinearBlock, 2);
}

}  // namespace

void embedding(const Embedding& a) {
  for (int64_t t = 0; t < a.num_tokens; ++t)
    if (a.tokens[t] < 0 || a.tokens[t] >= a.n)
      throw std::runtime_error("specc: a token outside of the embedding");
  const int64_t element = a.dtype == DType::kFloat32 ? 4 : 2, bytes = a.k * element;
  const int64_t units = (bytes + 3) / 4;
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t block = a.tokens[t] / kLinearBlock, row = a.tokens[t] % kLinearBlock;
    const auto* w = static_cast<const uint32_t*>(a.w) + block * units * kLinearBlock;
    copy_row(w + row, static_cast<char*>(a.out) + t * bytes, bytes);
  }
}

}  // namespace specc
