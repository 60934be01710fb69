// Loops of aten's operators, once for all of them.
#include "aten_loops.h"

#include <algorithm>
#include <cstring>

#include "lanes.h"
#include "strided_rows.h"
#include "threads.h"

namespace specc::aten {
namespace {

// 1: dim `a` is slower than `b`, as ATen orders them; 0: nothing says so.
int compare(const std::vector<std::vector<int64_t>>& strides,
                   std::span<const int64_t> sizes, int a, int b) {
  for (const std::vector<int64_t>& item : strides) {
    const int64_t x = item[a], y = item[b];
    if (x == 0 || y == 0) continue;
    if (x != y) return x < y ? -1 : 1;
    if (sizes[a] > sizes[b]) return 1;
  }
  return 0;
}

}  // namespace

std::vector<int64_t> broadcast_sizes(std::initializer_list<const Tensor*> operands) {
  int dim = 0;
  for (const Tensor* x : operands) dim = std::max<int>(dim, x->dim);
  std::vector<int64_t> sizes(dim, 1);
  for (const Tensor* x : operands)
    for (int d = 0; d < x->dim; ++d) {
      int64_t& size = sizes[dim - x->dim + d];
      check(size == x->sizes[d] || size == 1 || x->sizes[d] == 1,
            "sizes of operands cannot be broadcast");
      if (size == 1) size = x->sizes[d];
    }
  return sizes;
}

Loop loop_of(Tensor& out, Element dtype, std::initializer_list<const Tensor*> operands,
             bool contiguous) {
  const std::vector<int64_t> sizes = broadcast_sizes(operands);
  const int dim = static_cast<int>(sizes.size());
  std::vector<std::vector<int64_t>> strides;
  for (const Tensor* x : operands) {
    std::vector<int64_t> own(dim, 0);
    for (int d = 0; d < x->dim; ++d) {
      const int at = dim - x->dim + d;
      own[at] = x->sizes[d] == 1 && sizes[at] != 1 ? 0 : x->strides[d] * bytes_of(x->dtype);
    }
    strides.push_back(std::move(own));
  }
  int order[kMostDims];
  check(dim <= kMostDims, "a tensor has 8 dimensions or fewer");
  for (int i = 0; i < dim; ++i) order[i] = dim - 1 - i;
  for (int i = 1; i < dim && !contiguous; ++i)
    for (int at = i, before = i - 1; before >= 0; --before) {
      const int found = compare(strides, sizes, order[before], order[at]);
      if (found > 0) std::swap(order[before], order[at]), at = before;
      if (found < 0) break;
    }
  out = empty(sizes, dtype);
  int64_t step = 1;
  for (int i = 0; i < dim; ++i) {
    out.strides[order[i]] = step;
    step *= sizes[order[i]];
  }
  Loop loop;
  loop.num = 1 + static_cast<int>(operands.size());
  check(loop.num <= kMostOperands, "an operator has three operands or fewer");
  loop.count = out.count();
  loop.data[0] = static_cast<char*>(out.data);
  loop.types[0] = dtype;
  int k = 1;
  for (const Tensor* x : operands) {
    loop.data[k] = static_cast<char*>(x->data);
    loop.types[k++] = x->dtype;
  }
  for (int i = 0; i < dim; ++i) {
    const int d = order[i];
    if (sizes[d] == 1) continue;
    int64_t of_dim[kMostOperands] = {out.strides[d] * bytes_of(dtype)};
    for (k = 1; k < loop.num; ++k) of_dim[k] = strides[k - 1][d];
    bool follows = loop.dim > 0;
    for (k = 0; follows && k < loop.num; ++k)
      follows = of_dim[k] == loop.strides[loop.dim - 1][k] * loop.sizes[loop.dim - 1];
    if (follows) {
      loop.sizes[loop.dim - 1] *= sizes[d];
      continue;
    }
    std::copy(of_dim, of_dim + kMostOperands, loop.strides[loop.dim]);
    loop.sizes[loop.dim++] = sizes[d];
  }
  return loop;
}

void for_each_run(const Loop& loop, int64_t cost, RunBody body) {
  if (loop.count == 0) return;
  static constexpr int64_t kNoStrides[kMostOperands] = {};
  const int64_t inner = loop.inner(), pieces = (inner + kChunk - 1) / kChunk;
  const int64_t* strides = loop.dim == 0 ? kNoStrides : loop.strides[0];
  const int64_t runs = loop.count / inner * pieces;
  share_rows(runs, std::min(inner, kChunk) * cost, kernel_threads(),
             [&](int64_t first, int64_t last) {
    int64_t index[kMostDims] = {}, outer = first / pieces;
    char* at[kMostOperands];
    std::copy(loop.data, loop.data + kMostOperands, at);
    for (int d = 1; d < loop.dim; ++d) {
      index[d] = outer % loop.sizes[d];
      outer /= loop.sizes[d];
      for (int k = 0; k < loop.num; ++k) at[k] += index[d] * loop.strides[d][k];
    }
    int64_t piece = first % pieces;
    for (int64_t run = first; run < last; ++run) {
      const int64_t begin = piece * kChunk;
      char* from[kMostOperands];
      for (int k = 0; k < loop.num; ++k) from[k] = at[k] + begin * strides[k];
      body(from, strides, std::min(inner - begin, kChunk));
      if (++piece < pieces) continue;
      piece = 0;
      for (int d = 1; d < loop.dim; ++d) {
        for (int k = 0; k < loop.num; ++k) at[k] += loop.strides[d][k];
        if (++index[d] < loop.sizes[d]) break;
        for (int k = 0; k < loop.num; ++k) at[k] -= index[d] * loop.strides[d][k];
        index[d] = 0;
      }
    }
  });
}

namespace {

template <class To, class From, class Convert>
inline void spread(const char* from, int64_t stride, int64_t n, To* to, const Convert& convert) {
  if (stride == 0) {
    const To value = convert(*reinterpret_cast<const From*>(from));
    for (int64_t i = 0; i < n; ++i) to[i] = value;
  } else if (stride == static_cast<int64_t>(sizeof(From))) {
    const From* values = reinterpret_cast<const From*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = convert(values[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = convert(*reinterpret_cast<const From*>(from + i * stride));
  }
}

}  // namespace

namespace {

template <class Use>
void with_whole(Element dtype, const Use& use) {
  switch (dtype) {
    case Element::kBool:
    case Element::kUInt8:
      return use(uint8_t{});
    case Element::kInt8:
      return use(int8_t{});
    case Element::kInt16:
      return use(int16_t{});
    case Element::kInt32:
      return use(int32_t{});
    case Element::kInt64:
      return use(int64_t{});
    default:
      throw NotNative("a kernel of whole numbers");
  }
}

}  // namespace

const float* as_floats(const char* from, int64_t stride, Element dtype, int64_t n,
                              float* memory) {
  if (dtype == Element::kFloat32) {
    if (stride == 4) return reinterpret_cast<const float*>(from);
    spread<float, float>(from, stride, n, memory, [](float x) { return x; });
  } else if (dtype == Element::kBFloat16) {
    using vec::BFloat16;
    if (stride == 2) {
      const BFloat16* values = reinterpret_cast<const BFloat16*>(from);
      vec::by_sixteen(n, [&](int64_t i, auto count) {
        vec::store16(memory + i, vec::load16(values + i, count), count);
      });
    } else {
      spread<float, BFloat16>(from, stride, n, memory,
                                     [](BFloat16 x) { return vec::to_float(x); });
    }
  } else {
    with_whole(dtype, [&](auto kind) {
      using From = decltype(kind);
      spread<float, From>(from, stride, n, memory,
                                 [](From x) { return static_cast<float>(x); });
    });
  }
  return memory;
}

const int64_t* as_integers(const char* from, int64_t stride, Element dtype, int64_t n,
                                  int64_t* memory) {
  if (dtype == Element::kInt64 && stride == 8) return reinterpret_cast<const int64_t*>(from);
  with_whole(dtype, [&](auto kind) {
    using From = decltype(kind);
    spread<int64_t, From>(from, stride, n, memory,
                                 [](From x) { return static_cast<int64_t>(x); });
  });
  return memory;
}

void put_floats(const float* values, int64_t n, Element dtype, char* to) {
  if (dtype == Element::kFloat32) {
    if (to != reinterpret_cast<const char*>(values)) std::memcpy(to, values, n * sizeof(float));
    return;
  }
  vec::BFloat16* out = reinterpret_cast<vec::BFloat16*>(to);
  vec::by_sixteen(n, [&](int64_t i, auto count) {
    vec::store16(out + i, vec::load16(values + i, count), count);
  });
}
void put_integers(const int64_t* values, int64_t n, Element dtype, char* to) {
  if (dtype == Element::kBool) {
    for (int64_t i = 0; i < n; ++i) to[i] = values[i] != 0;
    return;
  }
  with_whole(dtype, [&](auto kind) {
    using To = decltype(kind);
    To* out = reinterpret_cast<To*>(to);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<To>(values[i]);
  });
}

}  // namespace specc::aten
