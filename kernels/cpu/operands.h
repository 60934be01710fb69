// What operators of rows and elements read of their tensors.
#pragma once

#include <algorithm>

#include "operator.h"
#include "strided_rows.h"

namespace specc {

// An argument that says nothing to a CPU: a device, a layout, a memory format.
struct Unread {};
namespace boxing {
template <>
struct Unbox<Unread> {
  static Unread get(const Value&) { return {}; }
};
}  // namespace boxing

inline std::span<const int64_t> sizes_of(const Tensor& x) {
  return {x.sizes, static_cast<size_t>(x.dim)};
}

inline Tensor empty_as(const Tensor& x) { return empty(sizes_of(x), x.dtype); }

inline bool has_same_sizes(const Tensor& x, const Tensor& y) {
  return x.dim == y.dim && std::equal(x.sizes, x.sizes + x.dim, y.sizes);
}

// Rows of the last dimension, which lies in one piece.
inline StridedRows rows_of(const Tensor& x) {
  check(x.is_dense_row(), "a tensor has a last dimension, which is contiguous");
  StridedRows rows;
  if (x.count() == 0) {  // strides may be anything
    rows.count = 0;
    return rows;
  }
  for (int32_t d = 0; d + 1 < x.dim; ++d) rows.add(x.sizes[d], x.strides[d]);
  return rows;
}

}  // namespace specc
