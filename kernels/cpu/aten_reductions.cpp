// Sums, extremes and orders along dimensions. A sum adds in an order of the sizes alone.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "aten_copies.h"
#include "aten_loops.h"
#include "lanes.h"
#include "strided_rows.h"
#include "threads.h"

namespace specc::aten {
namespace {

using vec::BFloat16;
using vec::load16;

using Dtype = std::optional<int64_t>;

// What is left of a tensor's dimensions, and what goes.
struct Reduction {
  std::vector<int64_t> sizes;       // of the result
  StridedRows kept, gone;
  bool is_last = false;             // the last dimension goes alone, and lies in one piece
};

Reduction reduction_of(const Tensor& x, Ints dims, bool keeps) {
  uint32_t gone = 0;
  if (dims.empty()) gone = (1u << x.dim) - 1;
  for (int64_t dim : dims) {
    if (x.dim == 0) continue;
    const uint32_t bit = 1u << dim_of(dim, x.dim);
    check(!(gone & bit), "a dimension is reduced once");
    gone |= bit;
  }
  Reduction made;
  for (int32_t d = 0; d < x.dim; ++d) {
    const bool goes = gone >> d & 1;
    (goes ? made.gone : made.kept).add(x.sizes[d], x.strides[d]);
    if (!goes) made.sizes.push_back(x.sizes[d]);
    else if (keeps) made.sizes.push_back(1);
  }
  made.is_last = x.dim > 0 && gone == 1u << (x.dim - 1) && x.is_dense_row();
  return made;
}

template <class T>
void sum_last(const Tensor& x, const Reduction& r, float* out) {
  const int64_t n = x.sizes[x.dim - 1];
  share_rows(r.kept.count, n, kernel_threads(), [&](int64_t first, int64_t last) {
    RowCursor at(r.kept, first);
    for (int64_t i = first; i < last; ++i, at.next()) {
      const T* row = x.as<const T>() + at.offset();
      out[i] = vec::sum_of(n, [&](int64_t j, auto count) { return load16(row + j, count); });
    }
  });
}
// one after the other, side by side where what is kept lies so
template <class T>
void sum_strided(const Tensor& x, const Reduction& r, float* out) {
  const bool is_dense = r.kept.dim > 0 && r.kept.strides[r.kept.dim - 1] == 1;
  const int64_t width = is_dense ? r.kept.sizes[r.kept.dim - 1] : 1;
  StridedRows outer = r.kept;
  if (is_dense) outer.count /= width, --outer.dim;
  share_rows(outer.count, width * r.gone.count, kernel_threads(), [&](int64_t first, int64_t last) {
    RowCursor at(outer, first);
    for (int64_t i = first; i < last; ++i, at.next()) {
      float* to = out + i * width;
      std::fill(to, to + width, 0.0f);
      RowCursor term(r.gone, 0);
      for (int64_t k = 0; k < r.gone.count; ++k, term.next()) {
        const T* row = x.as<const T>() + at.offset() + term.offset();
        vec::by_sixteen(width, [&](int64_t j, auto count) {
          vec::store16(to + j, load16(to + j, count) + load16(row + j, count), count);
        });
      }
    }
  });
}
std::vector<float> float_sums(const Tensor& x, const Reduction& r) {
  std::vector<float> sums(r.kept.count);
  if (r.kept.count == 0 || r.gone.count == 0) return sums;
  const bool is_float = x.dtype == Element::kFloat32;
  if (r.is_last) is_float ? sum_last<float>(x, r, sums.data()) : sum_last<BFloat16>(x, r, sums.data());
  else is_float ? sum_strided<float>(x, r, sums.data()) : sum_strided<BFloat16>(x, r, sums.data());
  return sums;
}

int64_t integer_at(const Tensor& x, int64_t place) {
  int64_t value;
  as_integers(static_cast<const char*>(x.data) + place * bytes_of(x.dtype), 0, x.dtype, 1, &value);
  return value;
}

Tensor sum_of_dims(const Tensor& x, std::optional<Ints> dims, bool keeps, Dtype dtype) {
  const Reduction r = reduction_of(x, dims.value_or(Ints()), keeps);
  if (is_real(x.dtype)) {
    require(is_float_here(x.dtype), "sums of float32 and bfloat16");
    const Element kind = dtype.has_value() ? static_cast<Element>(*dtype) : x.dtype;
    require(is_float_here(kind), "sums of float32 and bfloat16");
    const Tensor made = empty(r.sizes, kind);
    const std::vector<float> sums = float_sums(x, r);
    put_floats(sums.data(), r.kept.count, kind, static_cast<char*>(made.data));
    return made;
  }
  const Element kind = dtype.has_value() ? static_cast<Element>(*dtype) : Element::kInt64;
  require(is_whole(kind) && kind != Element::kBool, "sums of integers");
  const Tensor made = empty(r.sizes, kind);
  if (r.kept.count == 0) return made;
  std::vector<int64_t> sums(r.kept.count, 0);
  if (r.gone.count > 0) {
    RowCursor at(r.kept, 0);
    for (int64_t& sum : sums) {
      RowCursor term(r.gone, 0);
      uint64_t total = 0;
      for (int64_t k = 0; k < r.gone.count; ++k, term.next())
        total += static_cast<uint64_t>(integer_at(x, at.offset() + term.offset()));
      sum = static_cast<int64_t>(total);
      at.next();
    }
  }
  put_integers(sums.data(), r.kept.count, kind, static_cast<char*>(made.data));
  return made;
}
Tensor sum_of_all(const Tensor& x, Dtype dtype) {
  return sum_of_dims(x, std::nullopt, false, dtype);
}

Tensor mean(const Tensor& x, std::optional<Ints> dims, bool keeps, Dtype dtype) {
  const Element kind = dtype.has_value() ? static_cast<Element>(*dtype) : x.dtype;
  require(is_float_here(x.dtype) && is_float_here(kind), "means of float32 and bfloat16");
  const Reduction r = reduction_of(x, dims.value_or(Ints()), keeps);
  const Tensor made = empty(r.sizes, kind);
  std::vector<float> sums = float_sums(x, r);
  for (float& sum : sums) {
    if (kind == Element::kBFloat16) {
      // torch rounds the sum before it divides
      BFloat16 narrow;
      vec::from_float(sum, &narrow);
      sum = vec::to_float(narrow);
    }
    sum /= static_cast<float>(r.gone.count);
  }
  put_floats(sums.data(), r.kept.count, kind, static_cast<char*>(made.data));
  return made;
}

Tensor cumsum(const Tensor& x, int64_t along, Dtype dtype) {
  require(is_whole(x.dtype), "running sums of integers");
  const int32_t dim = dim_of(along, std::max(x.dim, 1));
  const Element kind = dtype.has_value() ? static_cast<Element>(*dtype) : Element::kInt64;
  require(is_whole(kind) && kind != Element::kBool, "running sums of integers");
  const Tensor made = empty(sizes_of(x), kind);
  if (made.count() == 0) return made;
  StridedRows rows, out_rows;
  for (int32_t d = 0; d < x.dim; ++d)
    if (d != dim) rows.add(x.sizes[d], x.strides[d]), out_rows.add(x.sizes[d], made.strides[d]);
  const int64_t n = x.dim == 0 ? 1 : x.sizes[dim], step = x.dim == 0 ? 0 : x.strides[dim];
  const int64_t out_step = x.dim == 0 ? 0 : made.strides[dim];
  RowCursor from(rows, 0), to(out_rows, 0);
  for (int64_t r = 0; r < rows.count; ++r, from.next(), to.next()) {
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
      total += static_cast<uint64_t>(integer_at(x, from.offset() + i * step));
      const auto value = static_cast<int64_t>(total);
      put_integers(&value, 1, kind,
                   static_cast<char*>(made.data) + (to.offset() + i * out_step) * bytes_of(kind));
    }
  }
  return made;
}

// ---- extremes and orders

// Rows along a dimension, each as numbers that compare as its elements do: NaN above all.
class Lanes {
 public:
  Lanes(const Tensor& x, int64_t along) : x_(x), dim_(dim_of(along, std::max(x.dim, 1))) {
    require(is_whole(x.dtype) || is_float_here(x.dtype), "orders of float32, bfloat16, integers");
    n_ = x.dim == 0 ? 1 : x.sizes[dim_];
    step_ = x.dim == 0 ? 0 : x.strides[dim_];
    for (int32_t d = 0; d < x.dim; ++d)
      if (d != dim_) rows_.add(x.sizes[d], x.strides[d]);
  }
  int32_t dim() const { return dim_; }
  int64_t size() const { return n_; }
  int64_t count() const { return rows_.count; }

  // each(row number, keys) for all rows
  template <class Each>
  void run(const Each& each) const {
    if (rows_.count == 0) return;
    std::vector<int64_t> keys(n_);
    std::vector<float> values(n_);
    RowCursor at(rows_, 0);
    for (int64_t r = 0; r < rows_.count; ++r, at.next()) {
      const int64_t item = bytes_of(x_.dtype);
      const char* from = static_cast<const char*>(x_.data) + at.offset() * item;
      if (is_whole(x_.dtype)) {
        for (int64_t i = 0; i < n_; ++i) keys[i] = integer_at(x_, at.offset() + i * step_);
      } else {
        const float* row = as_floats(from, step_ * item, x_.dtype, n_, values.data());
        for (int64_t i = 0; i < n_; ++i) keys[i] = key_of(row[i]);
      }
      each(r, keys, at.offset());
    }
  }
  void copy_element(int64_t row_offset, int64_t index, const Tensor& to, int64_t place) const {
    const int64_t item = bytes_of(x_.dtype);
    std::memcpy(static_cast<char*>(to.data) + place * item,
                static_cast<const char*>(x_.data) + (row_offset + index * step_) * item, item);
  }
  // Where the row of this number begins in a result whose dimension has another size.
  StridedRows rows_in(const Tensor& result, bool keeps) const {
    StridedRows rows;
    for (int32_t d = 0, at = 0; d < x_.dim; ++d) {
      if (d == dim_) {
        at += keeps;
        continue;
      }
      rows.add(result.sizes[at], result.strides[at]);
      ++at;
    }
    return rows;
  }

 private:
  static int64_t key_of(float value) {
    if (value != value) return std::numeric_limits<int64_t>::max();
    if (value == 0) value = 0;  // zeros are equal
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? int64_t{std::numeric_limits<int32_t>::min()} - bits : bits;
  }

  const Tensor& x_;
  int32_t dim_;
  int64_t n_, step_;
  StridedRows rows_;
};

// The first `count` in order, equal ones as they come.
std::tuple<Tensor, Tensor> ordered(const Tensor& x, int64_t along, int64_t count, bool descends) {
  const Lanes lanes(x, along);
  check(0 <= count && count <= lanes.size(), "as many as a dimension has, or fewer");
  Tensor shape = x;
  if (x.dim > 0) shape.sizes[lanes.dim()] = count;
  const Tensor values = empty_as(shape), places = empty(sizes_of(shape), Element::kInt64);
  if (values.count() == 0) return {values, places};
  const int64_t step = x.dim == 0 ? 0 : values.strides[lanes.dim()];
  const StridedRows rows = lanes.rows_in(values, true);
  RowCursor to(rows, 0);
  std::vector<int64_t> order(lanes.size());
  lanes.run([&](int64_t, const std::vector<int64_t>& keys, int64_t row) {
    std::iota(order.begin(), order.end(), 0);
    const auto comes_before = [&](int64_t a, int64_t b) {
      if (keys[a] != keys[b]) return descends ? keys[a] > keys[b] : keys[a] < keys[b];
      return a < b;
    };
    if (count < lanes.size())
      std::partial_sort(order.begin(), order.begin() + count, order.end(), comes_before);
    else
      std::sort(order.begin(), order.end(), comes_before);
    for (int64_t i = 0; i < count; ++i) {
      lanes.copy_element(row, order[i], values, to.offset() + i * step);
      places.as<int64_t>()[to.offset() + i * step] = order[i];
    }
    to.next();
  });
  return {values, places};
}
std::tuple<Tensor, Tensor> sort(const Tensor& x, int64_t along, bool descends) {
  return ordered(x, along, x.dim == 0 ? 1 : x.sizes[dim_of(along, x.dim)], descends);
}
std::tuple<Tensor, Tensor> sort_stable(const Tensor& x, Unread, int64_t along, bool descends) {
  return sort(x, along, descends);
}
std::tuple<Tensor, Tensor> topk(const Tensor& x, int64_t count, int64_t along, bool largest, bool) {
  return ordered(x, along, count, largest);
}

// The first of the largest (or smallest); NaN is both.
std::tuple<Tensor, Tensor> extreme(const Tensor& x, int64_t along, bool keeps, bool largest) {
  const Lanes lanes(x, along);
  check(lanes.size() > 0, "an extreme of some elements");
  Tensor shape = x;
  if (x.dim > 0) {
    shape.sizes[lanes.dim()] = 1;
    if (!keeps) shape = without_dim(shape, lanes.dim());
  }
  const Tensor values = empty_as(shape), places = empty(sizes_of(shape), Element::kInt64);
  if (values.count() == 0) return {values, places};
  constexpr int64_t kNaN = std::numeric_limits<int64_t>::max();
  const bool has_nan = is_real(x.dtype);
  lanes.run([&](int64_t r, const std::vector<int64_t>& keys, int64_t row) {
    int64_t best = 0;
    for (int64_t i = 1; i < lanes.size(); ++i) {
      if (has_nan && keys[best] == kNaN) break;
      const bool is_better = largest ? keys[i] > keys[best]
                                     : keys[i] < keys[best] || (has_nan && keys[i] == kNaN);
      if (is_better) best = i;
    }
    lanes.copy_element(row, best, values, r);
    places.as<int64_t>()[r] = best;
  });
  return {values, places};
}
std::tuple<Tensor, Tensor> max_of_dim(const Tensor& x, int64_t along, bool keeps) {
  return extreme(x, along, keeps, true);
}
std::tuple<Tensor, Tensor> min_of_dim(const Tensor& x, int64_t along, bool keeps) {
  return extreme(x, along, keeps, false);
}
Tensor argmax(const Tensor& x, std::optional<int64_t> along, bool keeps) {
  require(along.has_value(), "the largest of a dimension");
  return std::get<1>(extreme(x, *along, keeps, true));
}
Tensor amax(const Tensor& x, Ints dims, bool keeps) {
  require(dims.size() == 1, "the largest of a dimension");
  return std::get<0>(extreme(x, dims[0], keeps, true));
}

SPECC_OPERATOR("aten::sum", sum_of_all);
SPECC_OPERATOR("aten::sum.dim_IntList", sum_of_dims);
SPECC_OPERATOR("aten::mean.dim", mean);
SPECC_OPERATOR("aten::cumsum", cumsum);
SPECC_OPERATOR("aten::sort", sort);
SPECC_OPERATOR("aten::sort.stable", sort_stable);
SPECC_OPERATOR("aten::topk", topk);
SPECC_OPERATOR("aten::max.dim", max_of_dim);
SPECC_OPERATOR("aten::min.dim", min_of_dim);
SPECC_OPERATOR("aten::argmax", argmax);
SPECC_OPERATOR("aten::amax", amax);

}  // namespace
}  // namespace specc::aten
