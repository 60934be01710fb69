// Copies between tensors of the same sizes, and descriptions of parts of a tensor.
#pragma once

#include <algorithm>
#include <optional>

#include "operands.h"

namespace specc::aten {

// Every element; sizes and dtypes are the same, and `to` does not lie in `from`.
void copy(const Tensor& from, const Tensor& to);
// x itself where it is in one piece, or a copy that is.
Tensor contiguous_of(const Tensor& x);

// A dimension counted from the end, or from the front; throws where there is none.
inline int32_t dim_of(int64_t dim, int64_t count) {
  check(-count <= dim && dim < count, "a tensor has no such dimension");
  return static_cast<int32_t>(dim < 0 ? dim + count : dim);
}

inline Tensor offset_by(const Tensor& x, int32_t dim, int64_t index) {
  Tensor made = x;
  // a part without elements lies nowhere
  if (x.count() == 0) return made;
  const int64_t offset = index * x.strides[dim] * bytes_of(x.dtype);
  made.data = static_cast<char*>(x.data) + offset;
  made.bytes -= offset;
  return made;
}
// Entries [first, first + count) of a dimension, which lie in it.
inline Tensor part_of(const Tensor& x, int32_t dim, int64_t first, int64_t count) {
  Tensor made = count > 0 ? offset_by(x, dim, first) : x;
  made.sizes[dim] = count;
  return made;
}
inline Tensor without_dim(const Tensor& x, int32_t dim) {
  Tensor made = x;
  for (int32_t d = dim; d + 1 < x.dim; ++d) {
    made.sizes[d] = x.sizes[d + 1];
    made.strides[d] = x.strides[d + 1];
  }
  --made.dim;
  return made;
}
inline Tensor with_dim(const Tensor& x, int32_t dim, int64_t size, int64_t stride) {
  check(x.dim < kMostDims, "a tensor has 8 dimensions or fewer");
  Tensor made = x;
  for (int32_t d = x.dim; d > dim; --d) {
    made.sizes[d] = x.sizes[d - 1];
    made.strides[d] = x.strides[d - 1];
  }
  made.sizes[dim] = size;
  made.strides[dim] = stride;
  ++made.dim;
  return made;
}
// One entry of a dimension, which is there.
inline Tensor entry_of(const Tensor& x, int32_t dim, int64_t index) {
  return without_dim(offset_by(x, dim, index), dim);
}

// What `begin:end:step` of a dimension is, with Python's rules for ends beyond it.
inline Tensor sliced(const Tensor& x, int64_t along, std::optional<int64_t> begin,
                     std::optional<int64_t> end, int64_t step) {
  const int32_t dim = dim_of(along, x.dim);
  check(step >= 1, "a step of 1 or more");
  const int64_t size = x.sizes[dim];
  const auto bound = [size](int64_t at) {
    return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size);
  };
  const int64_t first = bound(begin.value_or(0));
  const int64_t last = std::max(bound(end.value_or(size)), first);
  const int64_t count = last > first ? 1 + (last - first - 1) / step : 0;
  Tensor made = part_of(x, dim, first, count);
  if (count > 1) made.strides[dim] *= step;
  return made;
}

// x in other sizes (-1: what the others leave) where that is a view; false where it takes a copy.
bool viewed(const Tensor& x, Ints sizes, Tensor& made);

}  // namespace specc::aten
