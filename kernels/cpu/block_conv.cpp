// specc::block_conv: rows of a block are added up, each channel by itself, by factors of the row.
#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "row_memory.h"
#include "strided_rows.h"
#include "tensors.h"
#include "threads.h"

namespace specc {
namespace {

using vec::BFloat16;
using vec::by_sixteen;
using vec::load16;
using vec::splat16;
using vec::store16;

// What it reads and writes; semantics: kernels/operators/block_conv.py.
struct BlockConv {
  DType dtype;
  int64_t num_tokens, channels, taps, groups;
  const void* x;        // [Nt, d]
  const void* base;     // [T, d]
  const void* factors;  // [Nt, T, G]
  const int32_t* places;
  int64_t x_stride, base_stride, token_stride, tap_stride, group_stride, place_stride;
  void* out;  // [Nt, d], contiguous
};

template <class T>
void add_tap(const BlockConv& a, int64_t token, int64_t tap, float* factors, float* sums) {
  const int64_t size = a.channels / a.groups;
  const T* own = static_cast<const T*>(a.factors) + token * a.token_stride + tap * a.tap_stride;
  for (int64_t g = 0; g < a.groups; ++g)
    std::fill_n(factors + g * size, size, vec::to_float(own[g * a.group_stride]));
  const T* base = static_cast<const T*>(a.base) + tap * a.base_stride;
  const T* row = static_cast<const T*>(a.x) + (token - tap) * a.x_stride;
  by_sixteen(a.channels, [&](int64_t i, auto count) {
    const auto factor = load16(base + i, count) + load16(factors + i, count);
    store16(sums + i, load16(sums + i, count) + factor * load16(row + i, count), count);
  });
}

template <class T>
void convolve(const BlockConv& a, int num_threads) {
  share_rows(a.num_tokens, a.taps * a.channels, num_threads, [&](int64_t first, int64_t last) {
    static thread_local RowMemory of_factors, of_sums;
    float *factors = of_factors.row(a.channels), *sums = of_sums.row(a.channels);
    for (int64_t t = first; t < last; ++t) {
      std::fill_n(sums, a.channels, 0.0f);
      // of padding the number says nothing
      const int64_t number = -1 - static_cast<int64_t>(a.places[t * a.place_stride]);
      const int64_t before = std::min({number, a.taps - 1, t});
      for (int64_t tap = 0; tap <= before; ++tap) add_tap<T>(a, t, tap, factors, sums);
      T* out = static_cast<T*>(a.out) + t * a.channels;
      by_sixteen(a.channels, [&](int64_t i, auto count) {
        store16(out + i, load16(sums + i, count), count);
      });
    }
  });
}

}  // namespace
}  // namespace specc

namespace specc::operators {
namespace {

Tensor block_conv(const Tensor& x, const Tensor& base, const Tensor& factors,
                  const Tensor& places) {
  check(x.dim == 2 && x.is_dense_row(), "x is [Nt, d], rows contiguous");
  check(base.dim == 2 && base.is_dense_row() && base.dtype == x.dtype &&
            base.sizes[1] == x.sizes[1],
        "base is [T, d] in the dtype of x, rows contiguous");
  check(factors.dim == 3 && factors.dtype == x.dtype && factors.sizes[0] == x.sizes[0] &&
            factors.sizes[1] == base.sizes[0],
        "factors is [Nt, T, G] in the dtype of x");
  check(factors.sizes[2] >= 1 && x.sizes[1] % factors.sizes[2] == 0, "G divides d");
  check(places.dim == 2 && places.dtype == kInt32 && places.sizes[0] == x.sizes[0] &&
            places.sizes[1] == 1,
        "places is [Nt, 1] int32");
  const Tensor out(empty({x.sizes[0], x.sizes[1]}, x.dtype));
  BlockConv a{};
  a.dtype = to_dtype(x);
  a.num_tokens = x.sizes[0];
  a.channels = x.sizes[1];
  a.taps = base.sizes[0];
  a.groups = factors.sizes[2];
  a.x = x.data;
  a.base = base.data;
  a.factors = factors.data;
  a.places = places.as<int32_t>();
  a.x_stride = x.strides[0];
  a.base_stride = base.strides[0];
  a.token_stride = factors.strides[0];
  a.tap_stride = factors.strides[1];
  a.group_stride = factors.strides[2];
  a.place_stride = places.strides[0];
  a.out = out.data;
  if (a.dtype == DType::kFloat32)
    convolve<float>(a, kernel_threads());
  else
    convolve<BFloat16>(a, kernel_threads());
  return out;
}

}  // namespace

SPECC_OPERATOR("specc::block_conv", block_conv);

}  // namespace specc::operators
