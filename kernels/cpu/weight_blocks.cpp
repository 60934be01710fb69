// Rows of a weight into the blocks that `linear` reads: what specc/artifact/weight_layout.py does
// when an engine is compiled, for matrices that are known in a pass only.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace specc {
namespace {

constexpr int64_t kUnitBytes = 4;  // a float, or a pair of bfloat16
// units of an output that are written before those of the next: a line of its row
constexpr int64_t kStep = 16;
// below this many bytes a barrier costs more than the copy
constexpr int64_t kPackedAlone = 1 << 18;

int64_t parts_of(int64_t x, int64_t size) { return x / size + (x % size != 0); }

}  // namespace

int64_t bytes_of_blocks(DType dtype, int64_t n, int64_t k) {
  const int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  return parts_of(n, kLinearBlock) * parts_of(k * item, kUnitBytes) * kLinearBlock * kUnitBytes;
}

void pack_blocks(const PackBlocks& a, int num_threads) {
  const int64_t item = a.dtype == DType::kFloat32 ? 4 : 2, row_bytes = a.k * item;
  const int64_t blocks = parts_of(a.n, kLinearBlock), units = parts_of(row_bytes, kUnitBytes);
  const bool is_long = a.n * row_bytes > kPackedAlone;
#pragma omp parallel for num_threads(std::max(num_threads, 1)) if (is_long)
  for (int64_t block = 0; block < blocks; ++block) {
    auto* to = static_cast<uint32_t*>(a.blocks) + block * units * kLinearBlock;
    const int64_t outputs = std::min<int64_t>(kLinearBlock, a.n - block * kLinearBlock);
    const char* rows =
        static_cast<const char*>(a.rows) + block * kLinearBlock * a.row_stride * item;
    if (outputs < kLinearBlock) std::fill(to, to + units * kLinearBlock, 0);
    for (int64_t first = 0; first < units; first += kStep)
      for (int64_t i = 0; i < outputs; ++i) {
        const char* row = rows + i * a.row_stride * item;
        for (int64_t u = first; u < std::min(first + kStep, units); ++u) {
          uint32_t value = 0;  // the last unit may be a column short
          const int64_t bytes = std::min(kUnitBytes, row_bytes - u * kUnitBytes);
          std::memcpy(&value, row + u * kUnitBytes, bytes);
          to[u * kLinearBlock + i] = value;
        }
      }
  }
}

}  // namespace specc
