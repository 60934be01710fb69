// Products of small matrices, one for each head: what latents are absorbed and expanded by. A row's
// sums have an order of their own, however many rows there are.
#include <algorithm>

#include "aten_copies.h"
#include "aten_loops.h"
#include "lanes.h"
#include "strided_rows.h"
#include "threads.h"

namespace specc::aten {
namespace {

using vec::BFloat16;
using vec::load16;
using vec::Sixteen;
using vec::store16;

struct Products {
  int64_t batch, rows, k, n;
  const void* x;
  int64_t x_batch, x_row;  // strides; columns lie side by side
  const void* w;
  int64_t w_batch, w_stride;  // of a row of [k, n], or of [n, k]
  void* out;                  // [batch, rows, n]
};

constexpr int64_t kColumns = 32;                      // of a block
constexpr int kAtOnce = vec::kWidth == 16 ? 4 : 2;  // rows whose sums are in registers

void add_product(Sixteen& sum, float a, const Sixteen& b) {
  for (int j = 0; j < vec::kLanes / vec::kWidth; ++j)
    vec::multiply_add(sum.at[j], vec::splat(a), b.at[j]);
}

// kRows rows times up to 32 columns of w, whose rows lie side by side in n.
template <int kRows, class T>
void multiply_block(const Products& a, const T* x, const T* w, int64_t columns, T* out) {
  Sixteen sums[kRows][2];
  for (auto& row : sums) row[0] = row[1] = vec::splat16(0);
  const int64_t first = std::min<int64_t>(columns, vec::kLanes), second = columns - first;
  for (int64_t i = 0; i < a.k; ++i, w += a.w_stride) {
    const bool is_whole = columns == kColumns;
    const Sixteen left = is_whole ? load16(w) : load16(w, first);
    const Sixteen right =
        is_whole ? load16(w + vec::kLanes) : load16(w + vec::kLanes * (second > 0), second);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float value = vec::to_float(x[r * a.x_row + i]);
      add_product(sums[r][0], value, left);
      add_product(sums[r][1], value, right);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store16(out + r * a.n, sums[r][0], first);
    if (second > 0) store16(out + r * a.n + vec::kLanes, sums[r][1], second);
  }
}

template <class T>
void multiply(const Products& a) {
  const int64_t blocks = (a.n + kColumns - 1) / kColumns;
  share_rows(a.batch * blocks, a.rows * a.k * 4, kernel_threads(),
             [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / blocks, column = item % blocks * kColumns;
      const T* x = static_cast<const T*>(a.x) + b * a.x_batch;
      const T* w = static_cast<const T*>(a.w) + b * a.w_batch + column;
      T* out = static_cast<T*>(a.out) + b * a.rows * a.n + column;
      const int64_t columns = std::min(kColumns, a.n - column);
      int64_t row = 0;
      for (; row + kAtOnce <= a.rows; row += kAtOnce)
        multiply_block<kAtOnce>(a, x + row * a.x_row, w, columns, out + row * a.n);
      for (; row < a.rows; ++row)
        multiply_block<1>(a, x + row * a.x_row, w, columns, out + row * a.n);
    }
  });
}

// Where w lies as [n, k]: sums along its rows.
template <class T>
void multiply_transposed(const Products& a) {
  share_rows(a.batch * a.n, a.rows * a.k, kernel_threads(), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / a.n, column = item % a.n;
      const T* x = static_cast<const T*>(a.x) + b * a.x_batch;
      const T* w = static_cast<const T*>(a.w) + b * a.w_batch + column * a.w_stride;
      T* out = static_cast<T*>(a.out) + b * a.rows * a.n + column;
      for (int64_t row = 0; row < a.rows; ++row)
        vec::from_float(vec::sum_of(a.k,
                                    [&](int64_t i, auto count) {
                                      return load16(x + row * a.x_row + i, count) *
                                             load16(w + i, count);
                                    }),
                        out + row * a.n);
    }
  });
}

Tensor bmm(const Tensor& left, const Tensor& right) {
  check(left.dim == 3 && right.dim == 3 && left.sizes[0] == right.sizes[0] &&
            left.sizes[2] == right.sizes[1] && left.dtype == right.dtype,
        "products are of [B, M, K] and [B, K, N], of one dtype");
  require(is_float_here(left.dtype), "products of float32 and bfloat16");
  const Tensor x = left.is_dense_row() ? left : contiguous_of(left);
  const bool is_transposed = right.sizes[1] != 1 && right.strides[1] == 1 && !right.is_dense_row();
  const Tensor w = is_transposed || right.is_dense_row() ? right : contiguous_of(right);
  const Tensor out = empty({x.sizes[0], x.sizes[1], w.sizes[2]}, x.dtype);
  Products a{};
  a.batch = x.sizes[0];
  a.rows = x.sizes[1];
  a.k = x.sizes[2];
  a.n = w.sizes[2];
  a.x = x.data;
  a.x_batch = x.strides[0];
  a.x_row = x.strides[1];
  a.w = w.data;
  a.w_batch = w.strides[0];
  a.w_stride = is_transposed ? w.strides[2] : w.strides[1];
  a.out = out.data;
  if (out.count() == 0) return out;
  if (x.dtype == Element::kFloat32)
    is_transposed ? multiply_transposed<float>(a) : multiply<float>(a);
  else
    is_transposed ? multiply_transposed<BFloat16>(a) : multiply<BFloat16>(a);
  return out;
}

}  // namespace

SPECC_OPERATOR("aten::bmm", bmm);

}  // namespace specc::aten
