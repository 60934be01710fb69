// Low-rank terms of adapters beside a product: out = base + scale * B (A x) of each token's own.
//
// Tokens of one adapter are taken together, a few at a time, so that its rows are read once for
// them. Neither which tokens these are nor how many enters the order of summation: A x is summed
// along the lanes of a register, then across them, then what is left of a row; B z is added to base
// in the order of ranks. So a token has the same bits alone and among others, whatever adapters
// these have.
#include "lora.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "team.h"
#include "vec.h"

namespace specc {
namespace lora {
namespace {

using vec::BFloat16;
using vec::Float;
using vec::kWidth;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 4;  // 4 x 4 accumulators
#else
constexpr int kRows = 2;  // 2 x 4 accumulators of 16 registers
#endif
constexpr int kRanks = 4;                   // rows of A at a time
constexpr int kVectors = 4;                 // registers of outputs at a time
constexpr int64_t kColumns = 256;           // outputs that a thread takes at a time
constexpr int64_t kSerialWork = 1 << 15;    // products that cost less than waking a second thread

// Some tokens of one adapter, by one of its pieces.
struct Tile {
  const LoraPiece* piece;
  float scale;
  int64_t up;            // where its B begins
  const int32_t* token;  // `rows` of them
  int rows;
  int64_t z;             // where their A x is, [rows, rank]
};

// What a thread takes: rows of A, or outputs, begin ... end - 1.
struct Part {
  int64_t tile, begin, end;
};

template <class T>
class Lora {
 public:
  explicit Lora(const AddLora& a) : a_(a) {
    std::vector<int64_t> up(a.num_pieces);
    for (int64_t p = 0, at = 0; p < a.num_pieces; ++p) {
      up[p] = at;
      at += int64_t{a.pieces[p].rank} * a.pieces[p].columns;
    }
    for (int64_t t = 0; t < a.tokens; ++t)
      if (a.adapters[t] >= 0) order_.push_back(static_cast<int32_t>(t));
    const auto adapter = [&](int32_t token) { return a.adapters[token]; };
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int32_t i, int32_t j) { return adapter(i) < adapter(j); });
    for (size_t first = 0, last; first < order_.size(); first = last) {
      const int32_t own = adapter(order_[first]);
      for (last = first; last < order_.size() && adapter(order_[last]) == own;) ++last;
      for (int64_t p = 0; p < a.num_pieces; ++p)
        if (a.pieces[p].adapter == own) add(a.pieces[p], a.scales[p], up[p], first, last);
    }
    z_.resize(num_z_);
  }

  int64_t work() const { return work_; }

  template <class Barrier>
  void run(int64_t thread, int64_t of, const Barrier& barrier) {
    const int64_t first = a_.tokens * thread / of, last = a_.tokens * (thread + 1) / of;
    for (int64_t t = first; t < last; ++t)
      std::memcpy(out(t), static_cast<const T*>(a_.base) + t * a_.base_stride, a_.n * sizeof(T));
    each(downs_, thread, of, [&](const Part& part) { multiply_down(part); });
    barrier();
    each(ups_, thread, of, [&](const Part& part) { multiply_up(part); });
  }

 private:
  void add(const LoraPiece& piece, float scale, int64_t up, size_t first, size_t last) {
    for (size_t at = first; at < last; at += kRows) {
      const int rows = static_cast<int>(std::min<size_t>(kRows, last - at));
      const auto tile = static_cast<int64_t>(tiles_.size());
      tiles_.push_back({&piece, scale, up, order_.data() + at, rows, num_z_});
      num_z_ += int64_t{rows} * piece.rank;
      for (int64_t r = 0; r < piece.rank; r += kRanks)
        downs_.push_back({tile, r, std::min<int64_t>(piece.rank, r + kRanks)});
      for (int64_t n = 0; n < piece.columns; n += kColumns)
        ups_.push_back({tile, n, std::min<int64_t>(piece.columns, n + kColumns)});
      work_ += int64_t{rows} * piece.rank * (a_.k + piece.columns);
    }
  }

  template <class Do>
  static void each(const std::vector<Part>& parts, int64_t thread, int64_t of, const Do& work) {
    const auto count = static_cast<int64_t>(parts.size());
    for (int64_t i = count * thread / of; i < count * (thread + 1) / of; ++i) work(parts[i]);
  }

  const T* x(int64_t token) const { return static_cast<const T*>(a_.x) + token * a_.x_stride; }
  T* out(int64_t token) const { return static_cast<T*>(a_.out) + token * a_.n; }

  void multiply_down(const Part& part) {
    const Tile& tile = tiles_[part.tile];
    const auto ranks = static_cast<int>(part.end - part.begin);
    const T* rows[kRows];
    for (int m = 0; m < tile.rows; ++m) rows[m] = x(tile.token[m]);
    const T* down = static_cast<const T*>(a_.down) + (tile.piece->row + part.begin) * a_.k;
    float* z = z_.data() + tile.z + part.begin;
    if (tile.rows == kRows && ranks == kRanks) {
      dots<kRows, kRanks>(rows, down, tile, z);
      return;
    }
    for (int m = 0; m < tile.rows; ++m, z += tile.piece->rank) {
      if (ranks == kRanks) {
        dots<1, kRanks>(rows + m, down, tile, z);
        continue;
      }
      for (int r = 0; r < ranks; ++r) dots<1, 1>(rows + m, down + r * a_.k, tile, z + r);
    }
  }

  // z[m, r] = scale * (x[m] . down[r])
  template <int rows, int ranks>
  void dots(const T* const* x, const T* down, const Tile& tile, float* z) const {
    Float sums[rows][ranks] = {};
    const int64_t whole = a_.k / kWidth * kWidth;
    for (int64_t k = 0; k < whole; k += kWidth) {
      Float w[ranks];
      for (int r = 0; r < ranks; ++r) w[r] = vec::load(down + r * a_.k + k);
      for (int m = 0; m < rows; ++m) {
        const Float value = vec::load(x[m] + k);
        for (int r = 0; r < ranks; ++r) vec::multiply_add(sums[m][r], value, w[r]);
      }
    }
    for (int m = 0; m < rows; ++m)
      for (int r = 0; r < ranks; ++r) {
        float sum = vec::sum(sums[m][r]);
        for (int64_t k = whole; k < a_.k; ++k)
          sum += vec::to_float(x[m][k]) * vec::to_float(down[r * a_.k + k]);
        z[int64_t{m} * tile.piece->rank + r] = tile.scale * sum;
      }
  }

  void multiply_up(const Part& part) {
    const Tile& tile = tiles_[part.tile];
    if (tile.rows == kRows) return columns<kRows>(tile, 0, part);
    for (int m = 0; m < tile.rows; ++m) columns<1>(tile, m, part);
  }

  // out[first + m] += z[m] . up, of columns of the part
  template <int rows>
  void columns(const Tile& tile, int first, const Part& part) {
    constexpr int64_t kStep = kVectors * kWidth;
    const float* z = z_.data() + tile.z + int64_t{first} * tile.piece->rank;
    T* out[rows];
    for (int m = 0; m < rows; ++m)
      out[m] = this->out(tile.token[first + m]) + tile.piece->column;
    int64_t n = part.begin;
    for (; n + kStep <= part.end; n += kStep) vectors<rows, kVectors>(tile, z, out, n);
    for (; n + kWidth <= part.end; n += kWidth) vectors<rows, 1>(tile, z, out, n);
    const T* up = static_cast<const T*>(a_.up) + tile.up;
    for (; n < part.end; ++n)
      for (int m = 0; m < rows; ++m) {
        float sum = vec::to_float(out[m][n]);
        for (int64_t r = 0; r < tile.piece->rank; ++r)
          sum += z[m * tile.piece->rank + r] * vec::to_float(up[r * tile.piece->columns + n]);
        vec::from_float(sum, out[m] + n);
      }
  }

  template <int rows, int count>
  void vectors(const Tile& tile, const float* z, T* const* out, int64_t n) const {
    const T* up = static_cast<const T*>(a_.up) + tile.up + n;
    Float sums[rows][count];
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < count; ++v) sums[m][v] = vec::load(out[m] + n + v * kWidth);
    for (int64_t r = 0; r < tile.piece->rank; ++r, up += tile.piece->columns) {
      Float w[count];
      for (int v = 0; v < count; ++v) w[v] = vec::load(up + v * kWidth);
      for (int m = 0; m < rows; ++m) {
        const Float value = vec::splat(z[m * tile.piece->rank + r]);
        for (int v = 0; v < count; ++v) vec::multiply_add(sums[m][v], value, w[v]);
      }
    }
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < count; ++v) {
        float lanes[kWidth];
        vec::store(lanes, sums[m][v]);
        for (int i = 0; i < kWidth; ++i) vec::from_float(lanes[i], out[m] + n + v * kWidth + i);
      }
  }

  const AddLora& a_;
  std::vector<int32_t> order_;  // tokens that have an adapter, those of one after each other
  std::vector<Tile> tiles_;
  std::vector<Part> downs_, ups_;
  std::vector<float> z_;
  int64_t num_z_ = 0, work_ = 0;
};

template <class T>
void run(const AddLora& a, int num_threads) {
  Lora<T> lora(a);
  const int threads = lora.work() + a.tokens * a.n / 4 < kSerialWork ? 1 : num_threads;
  in_parallel(threads, [&](int64_t thread, int64_t of, const auto& barrier) {
    lora.run(thread, of, barrier);
  });
}

}  // namespace
}  // namespace lora

void add_lora(const AddLora& a, int num_threads) {
  if (a.dtype == DType::kFloat32)
    lora::run<float>(a, num_threads);
  else
    lora::run<vec::BFloat16>(a, num_threads);
}

}  // namespace specc
