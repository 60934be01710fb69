// specc::tree_attention over caches of int8: codes are multiplied as bytes where the machine can,
// else widened to floats tile by tile.

// before any header, as in tree_attention.cpp
#if defined(__clang__)
#pragma clang fp reassociate(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math")
#endif

#include "tree_attention_int8.h"

#include <algorithm>

#include "int8_tile.h"
#include "kernels.h"
#include "kv_rows.h"
#include "tree_attention_worker.h"

namespace specc::attention {
namespace {

// Rows as floats, of which FloatTile makes the rest: on any machine, and the same to rounding.
class WideTile {
 public:
  using Stored = int8_t;

  explicit WideTile(const TileSizes& sizes)
      : tile_(sizes), dim_(sizes.head_dim), value_dim_(sizes.value_dim) {}
  static int64_t row_size(int64_t dim) { return dim + kScaleBytes; }
  static int64_t width(int64_t value_dim) { return FloatTile<float>::width(value_dim); }
  int64_t scratch() const {
    return tile_.scratch() + kTile * round_up(std::max(dim_, value_dim_), 16);
  }
  void bind(float* p) {
    tile_.bind(p);
    floats_ = p + tile_.scratch();
  }
  template <class Q>
  void load_queries(int64_t first, const Q* const* queries, int64_t rows) {
    tile_.load_queries(first, queries, rows);
  }
  int64_t work(int64_t rows, int64_t count) const { return tile_.work(rows, count); }
  void score(int64_t first_row, int64_t rows, const int8_t* const* keys, int64_t count,
             float* scores, Ahead& ahead) {
    widen(keys, round_up(count, kWidth), dim_);
    tile_.score(first_row, rows, rows_, count, scores, ahead);
  }
  void add(const Weighted<int8_t>& keys, int64_t rows, float* sums, Ahead& ahead) {
    widen(keys.values, keys.count, value_dim_);
    tile_.add({keys.weights, rows_, keys.count}, rows, sums, ahead);
  }
  void add_parts(const Weighted<int8_t>* parts, int64_t count, int64_t rows, float* sums,
                 Ahead& ahead) {
    for (int64_t p = 0; p < count; ++p) add(parts[p], rows, sums, ahead);
  }
  int64_t place(int64_t d) const { return tile_.place(d); }

 private:
  void widen(const int8_t* const* rows, int64_t count, int64_t dim) {
    const int64_t stride = round_up(dim, 16);
    for (int64_t i = 0; i < count; ++i) {
      read_row(rows[i], dim, floats_ + i * stride);
      rows_[i] = floats_ + i * stride;
    }
  }

  FloatTile<float> tile_;
  const int64_t dim_, value_dim_;
  float* floats_;
  const float* rows_[kTile];
};

#ifdef SPECC_HAS_BYTE_PRODUCTS
using Int8Tile = ByteTile;
#else
using Int8Tile = WideTile;
#endif

}  // namespace

void tree_attention_int8(const TreeAttention& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    run<float, Int8Tile>(a, num_threads);
  else
    run<BFloat16, Int8Tile>(a, num_threads);
}

}  // namespace specc::attention
