// Values of a tensor, whatever its strides, in one piece.
#pragma once

#include <algorithm>

#include "tensor.h"

namespace specc {

// to: memory of count() elements.
inline void copy_strided(const Tensor& from, void* to) {
  const int64_t item = bytes_of(from.dtype), count = from.count();
  if (count == 0) return;
  const char* source = static_cast<const char*>(from.data);
  char* target = static_cast<char*>(to);
  if (from.is_contiguous()) {
    std::copy_n(source, count * item, target);
    return;
  }
  const int32_t last = from.dim - 1;
  int64_t place[kMostDims] = {}, offset = 0;
  const int64_t row = from.sizes[last], stride = from.strides[last] * item;
  for (int64_t done = 0; done < count; done += row) {
    const char* at = source + offset * item;
    for (int64_t i = 0; i < row; ++i, target += item, at += stride) std::copy_n(at, item, target);
    for (int32_t d = last - 1; d >= 0; --d) {
      offset += from.strides[d];
      if (++place[d] < from.sizes[d]) break;
      offset -= from.strides[d] * from.sizes[d];
      place[d] = 0;
    }
  }
}

}  // namespace specc
