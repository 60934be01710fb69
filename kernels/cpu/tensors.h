// What operators check of their tensors, and read of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "kernels.h"
#include "operator.h"

// Operators have the names of the kernels that they call: `linear` here is an operator of tensors,
// `specc::linear` a kernel of pointers.
namespace specc::operators {

using enum Element;

// [B, N] of a dtype, each row in one piece
inline bool is_rows(const Tensor& x, Element dtype) {
  return x.dim == 2 && x.dtype == dtype && x.is_dense_row();
}

// of two dimensions
inline bool is_same_shape(const Tensor& one, const Tensor& other) {
  return one.sizes[0] == other.sizes[0] && one.sizes[1] == other.sizes[1];
}

inline DType to_dtype(const Tensor& x) {
  if (x.dtype == kFloat32) return DType::kFloat32;
  if (x.dtype == kBFloat16) return DType::kBFloat16;
  fail("the CPU kernels take float32 and bfloat16");
}

inline void check_index(const Tensor& x, int64_t dim, Element dtype, const char* what) {
  check(x.dim == dim && x.dtype == dtype && x.is_contiguous(), what);
}

// Where runs of rows end, one for each expert of a mixture.
inline void check_ends(const Tensor& ends) {
  check_index(ends, 1, kInt32, "ends are [E] int32, contiguous");
  // else no weight says how many outputs there can be
  check(ends.sizes[0] > 0, "a mixture has 1 expert or more");
}

// run(expert, first, rows, out) for each expert that has rows of `rows`; `out` is where its results
// begin, of rows of so many bytes. Results of rows after the last run become zeros.
template <class Run>
void for_each_run(const Tensor& ends, void* results, int64_t rows, int64_t row_bytes,
                  const Run& run) {
  auto* out = static_cast<char*>(results);
  int64_t first = 0;
  for (int64_t expert = 0; expert < ends.sizes[0]; ++expert) {
    const int64_t last = ends.as<int32_t>()[expert];
    check(last >= first && last <= rows, "ends are rows of x, in order");
    if (last > first) run(expert, first, last - first, out + first * row_bytes);
    first = last;
  }
  if (row_bytes > 0 && rows > first)
    std::memset(out + first * row_bytes, 0, static_cast<size_t>((rows - first) * row_bytes));
}

// Levels, nodes and tokens that a number asks room for, and no tensor: an engine has plans of 1024
// nodes at most (specc/speculation/tree.py), out of 4 times as many candidates.
constexpr int64_t kMaxCount = 65536;

inline void check_count(int64_t count, int64_t least, const char* name) {
  if (count < least || count > kMaxCount)
    fail(std::string(name) + " is " + std::to_string(least) + " … " + std::to_string(kMaxCount));
}

inline bool is_i32(int64_t value) { return value == static_cast<int32_t>(value); }

}  // namespace specc::operators
