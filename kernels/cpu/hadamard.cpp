// specc::hadamard: rows of queries and keys, before keys are rounded for a cache.
#include "hadamard.h"

#include "fused.h"

namespace specc {
namespace {

template <class T>
void rows_of_type(const Hadamard& a, int num_threads) {
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out);
  share_rows(a.rows.count, a.n, num_threads, [&](int64_t first, int64_t last) {
    RowCursor at(a.rows, first);
    for (int64_t r = first; r < last; ++r, at.next()) hadamard_row(x + at.offset(), a.n, out + r * a.n);
  });
}

}  // namespace

void hadamard(const Hadamard& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    rows_of_type<float>(a, num_threads);
  else
    rows_of_type<vec::BFloat16>(a, num_threads);
}

}  // namespace specc
