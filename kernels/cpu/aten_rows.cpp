// Look-ups: rows and elements that integers name, all of which are checked before one is read; and
// tensors that are made of a number.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "aten_copies.h"
#include "aten_loops.h"
#include "refusal.h"
#include "strided_rows.h"
#include "threads.h"
#include "vec.h"

namespace specc::aten {
namespace {

// Indices as int64, in one piece, each one checked: 0 … size - 1, or from -size on where they count
// from the end.
std::vector<int64_t> indices_of(const Tensor& x, int64_t size, bool from_end) {
  require(x.dtype == Element::kInt64 || x.dtype == Element::kInt32, "indices of int64 or int32");
  const Tensor dense = contiguous_of(x);
  std::vector<int64_t> found(dense.count());
  for (size_t i = 0; i < found.size(); ++i) {
    int64_t index = dense.dtype == Element::kInt64 ? dense.as<int64_t>()[i] : dense.as<int32_t>()[i];
    if (index < (from_end ? -size : 0) || index >= size)
      refuse(indexed("index", static_cast<int64_t>(i), index), up_to(size - 1));
    found[i] = index < 0 ? index + size : index;
  }
  return found;
}

// Entries of a dimension of x → entries of `to`, one for each index.
void take(const Tensor& x, int32_t dim, const std::vector<int64_t>& indices, const Tensor& to,
          int32_t to_dim) {
  if (to.count() == 0) return;
  const auto count = static_cast<int64_t>(indices.size());
  const Tensor one = without_dim(x, dim);
  Tensor target = without_dim(to, to_dim);
  const int64_t item = bytes_of(x.dtype), bytes = one.count() * item;
  if (one.is_contiguous() && target.is_contiguous()) {
    const char* from = static_cast<const char*>(x.data);
    char* out = static_cast<char*>(to.data);
    share_rows(count, std::max<int64_t>(bytes / 4, 1), kernel_threads(),
               [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        std::memcpy(out + i * to.strides[to_dim] * item, from + indices[i] * x.strides[dim] * item,
                    bytes);
    });
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    copy(entry_of(x, dim, indices[i]), entry_of(to, to_dim, i));
}

Tensor index_select(const Tensor& x, int64_t along, const Tensor& index) {
  const int32_t dim = dim_of(along, x.dim);
  check(index.dim <= 1, "index is a row of numbers");
  const std::vector<int64_t> indices = indices_of(index, x.sizes[dim], false);
  Tensor shape = x;
  shape.sizes[dim] = static_cast<int64_t>(indices.size());
  const Tensor made = empty_as(shape);
  take(x, dim, indices, made, dim);
  return made;
}

// Rows of x by the indices' own sizes.
Tensor rows_by(const Tensor& x, const Tensor& index, bool from_end) {
  check(x.dim >= 1 && index.dim + x.dim - 1 <= kMostDims, "a result has 8 dimensions or fewer");
  const std::vector<int64_t> indices = indices_of(index, x.sizes[0], from_end);
  std::vector<int64_t> sizes(index.sizes, index.sizes + index.dim);
  sizes.insert(sizes.end(), x.sizes + 1, x.sizes + x.dim);
  const Tensor made = empty(sizes, x.dtype);
  Tensor flat = x;
  flat.sizes[0] = static_cast<int64_t>(indices.size());
  int64_t step = 1;
  for (int32_t d = x.dim - 1; d >= 0; --d) flat.strides[d] = step, step *= flat.sizes[d];
  flat.data = made.data;
  take(x, 0, indices, flat, 0);
  return made;
}
Tensor embedding(const Tensor& weight, const Tensor& index, int64_t, bool, bool) {
  check(weight.dim == 2, "a table of rows");
  return rows_by(weight, index, false);
}

const Tensor& only_index(Tensors indices) {
  require(indices.size() == 1 && indices[0].dtype != Element::kBool, "one tensor of indices");
  return indices[0];
}
Tensor index_tensor(const Tensor& x, Tensors indices) {
  return rows_by(x, only_index(indices), true);
}

// Values at rows of x that a tensor of indices names, the later one where a row is named twice.
void put(const Tensor& x, Tensors indices, const Tensor& values, bool accumulates) {
  require(!accumulates, "indices that put, not add");
  const Tensor& index = only_index(indices);
  check(x.dim >= 1 && index.dim + x.dim - 1 <= kMostDims, "values have 8 dimensions or fewer");
  check(values.dtype == x.dtype, "values have the dtype of what they are put into");
  const std::vector<int64_t> rows = indices_of(index, x.sizes[0], true);
  // values as [indices, rest], broadcast
  std::vector<int64_t> sizes(index.sizes, index.sizes + index.dim);
  sizes.insert(sizes.end(), x.sizes + 1, x.sizes + x.dim);
  check(values.dim <= static_cast<int32_t>(sizes.size()), "values fit the indices");
  Tensor spread = values;
  while (spread.dim < static_cast<int32_t>(sizes.size())) spread = with_dim(spread, 0, 1, 0);
  for (int32_t d = 0; d < spread.dim; ++d) {
    check(spread.sizes[d] == sizes[d] || spread.sizes[d] == 1, "values fit the indices");
    if (spread.sizes[d] != sizes[d]) spread.sizes[d] = sizes[d], spread.strides[d] = 0;
  }
  StridedRows places;
  Tensor row = spread;
  for (int32_t d = 0; d < index.dim; ++d) {
    places.add(index.sizes[d], spread.strides[d]);
    row = without_dim(row, 0);
  }
  if (spread.count() == 0) return;
  RowCursor at(places, 0);
  for (int64_t to : rows) {
    row.data = static_cast<char*>(values.data) + at.offset() * bytes_of(x.dtype);
    copy(row, entry_of(x, 0, to));
    at.next();
  }
}
Tensor copied(const Tensor& x) {
  Tensor made;
  loop_of(made, x.dtype, {&x});
  copy(x, made);
  return made;
}
Tensor index_put(const Tensor& x, Tensors indices, const Tensor& values, bool accumulates) {
  const Tensor made = copied(x);
  put(made, indices, values, accumulates);
  return made;
}
Tensor index_put_here(const Tensor& x, Tensors indices, const Tensor& values, bool accumulates) {
  check_apart(x, {&only_index(indices), &values});
  put(x, indices, values, accumulates);
  return x;
}

// each(place of x's row, place of the index, index) for every index of gather and scatter.
template <class Each>
void for_each_index(const Tensor& x, int32_t dim, const Tensor& index, const Each& each) {
  check(index.dtype == Element::kInt64, "index is int64");
  check(index.dim == x.dim, "index has the dimensions of the tensor");
  StridedRows of_x, of_index;
  for (int32_t d = 0; d < x.dim; ++d) {
    check(d == dim || index.sizes[d] <= x.sizes[d], "index is no larger than the tensor");
    // dimensions of x that the index names have no place of their own
    of_x.sizes[d] = of_index.sizes[d] = index.sizes[d];
    of_x.strides[d] = d == dim ? 0 : x.strides[d];
    of_index.strides[d] = index.strides[d];
  }
  of_x.dim = of_index.dim = x.dim;
  const int64_t count = index.count();
  if (count == 0) return;
  for (const bool only_checks : {true, false}) {
    RowCursor place(of_x, 0), at(of_index, 0);
    for (int64_t i = 0; i < count; ++i, place.next(), at.next()) {
      const int64_t value = index.as<int64_t>()[at.offset()];
      if (only_checks && (value < 0 || value >= x.sizes[dim]))
        refuse(indexed("index", i, value), up_to(x.sizes[dim] - 1));
      if (!only_checks) each(i, place.offset() + value * x.strides[dim]);
    }
  }
}

Tensor gather(const Tensor& x, int64_t along, const Tensor& index, bool) {
  const int32_t dim = dim_of(along, x.dim);
  const Tensor made = empty(sizes_of(index), x.dtype);
  const int64_t item = bytes_of(x.dtype);
  for_each_index(x, dim, index, [&](int64_t i, int64_t place) {
    std::memcpy(static_cast<char*>(made.data) + i * item,
                static_cast<const char*>(x.data) + place * item, item);
  });
  return made;
}
// a number as an element
void put_number(const Number& value, Element dtype, void* to) {
  const auto real = static_cast<float>(value.real);
  if (dtype == Element::kFloat32)
    std::memcpy(to, &real, sizeof real);
  else if (dtype == Element::kBFloat16)
    vec::from_float(real, static_cast<vec::BFloat16*>(to));
  else if (dtype == Element::kBool)
    *static_cast<uint8_t*>(to) = value.real != 0;
  else {
    require(is_whole(dtype), "numbers of float32, bfloat16 and integers");
    check(!value.is_real || std::abs(value.real) < 9.2e18, "a number that an integer holds");
    const int64_t whole = value.is_real ? static_cast<int64_t>(value.real) : value.integer;
    std::memcpy(to, &whole, bytes_of(dtype));  // the low bytes come first
  }
}
Tensor scatter_value(const Tensor& x, int64_t along, const Tensor& index, Number value) {
  const Tensor made = copied(x);
  const int64_t item = bytes_of(x.dtype);
  char number[8];
  put_number(value, x.dtype, number);
  for_each_index(made, dim_of(along, x.dim), index, [&](int64_t, int64_t place) {
    std::memcpy(static_cast<char*>(made.data) + place * item, number, item);
  });
  return made;
}
Tensor scatter_source(const Tensor& x, int64_t along, const Tensor& index, const Tensor& source) {
  check(source.dtype == x.dtype && source.dim == index.dim, "source has the dtype of the tensor");
  Tensor used = source;
  for (int32_t d = 0; d < index.dim; ++d) {
    check(index.sizes[d] <= source.sizes[d], "index is no larger than the source");
    used.sizes[d] = index.sizes[d];
  }
  const Tensor values = contiguous_of(used), made = copied(x);
  const int64_t item = bytes_of(x.dtype);
  for_each_index(made, dim_of(along, x.dim), index, [&](int64_t i, int64_t place) {
    std::memcpy(static_cast<char*>(made.data) + place * item,
                static_cast<const char*>(values.data) + i * item, item);
  });
  return made;
}

// ---- tensors of a number

Tensor filled(Ints sizes, Element dtype, const Number& value) {
  const Tensor made = empty(sizes, dtype);
  const int64_t item = bytes_of(dtype), count = made.count();
  char number[8] = {};
  put_number(value, dtype, number);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(static_cast<char*>(made.data) + i * item, number, item);
  return made;
}
using Dtype = std::optional<int64_t>;
Element chosen(Dtype dtype, Element otherwise) {
  return dtype.has_value() ? static_cast<Element>(*dtype) : otherwise;
}
Element dtype_of(const Number& x) {
  return x.is_real ? Element::kFloat32 : x.is_bool ? Element::kBool : Element::kInt64;
}
Tensor full(Ints sizes, Number value, Dtype dtype, Unread, Unread, Unread) {
  return filled(sizes, chosen(dtype, dtype_of(value)), value);
}
Tensor full_like(const Tensor& x, Number value, Dtype dtype, Unread, Unread, Unread, Unread) {
  return filled(sizes_of(x), chosen(dtype, x.dtype), value);
}
template <int kValue>
Tensor constant(Ints sizes, Dtype dtype, Unread, Unread, Unread) {
  return filled(sizes, chosen(dtype, Element::kFloat32), {false, false, kValue, kValue});
}
template <int kValue>
Tensor constant_like(const Tensor& x, Dtype dtype, Unread, Unread, Unread, Unread) {
  return filled(sizes_of(x), chosen(dtype, x.dtype), {false, false, kValue, kValue});
}
Tensor empty_like(const Tensor& x, Dtype dtype, Unread, Unread, Unread, Unread) {
  return empty(sizes_of(x), chosen(dtype, x.dtype));
}

Tensor range(const Number& start, const Number& end, const Number& step, Dtype dtype) {
  const bool is_real_range = start.is_real || end.is_real || step.is_real;
  const Element kind = chosen(dtype, is_real_range ? Element::kFloat32 : Element::kInt64);
  require(!is_real_range && (kind == Element::kInt64 || kind == Element::kInt32 ||
                             kind == Element::kFloat32), "ranges of integers");
  const int64_t first = start.integer, last = end.integer, by = step.integer;
  check(by != 0, "a range has a step");
  check(first == static_cast<int32_t>(first) && last == static_cast<int32_t>(last) &&
            by == static_cast<int32_t>(by), "a range of 32 bits");
  check(by > 0 ? last >= first : last <= first, "a range goes where its step goes");
  const int64_t count = (last - first + by - (by > 0 ? 1 : -1)) / by;
  const Tensor made = empty({count}, kind);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t value = first + i * by;
    if (kind == Element::kInt64) made.as<int64_t>()[i] = value;
    else if (kind == Element::kInt32) made.as<int32_t>()[i] = static_cast<int32_t>(value);
    else made.as<float>()[i] = static_cast<float>(value);
  }
  return made;
}
constexpr Number kZero{false, false, 0, 0}, kOne{false, false, 1, 1};
Tensor arange(Number end, Dtype dtype, Unread, Unread, Unread) {
  return range(kZero, end, kOne, dtype);
}
Tensor arange_start(Number start, Number end, Dtype dtype, Unread, Unread, Unread) {
  return range(start, end, kOne, dtype);
}
Tensor arange_step(Number start, Number end, Number step, Dtype dtype, Unread, Unread, Unread) {
  return range(start, end, step, dtype);
}

SPECC_OPERATOR("aten::index_select", index_select);
SPECC_OPERATOR("aten::embedding", embedding);
SPECC_OPERATOR("aten::index.Tensor", index_tensor);
SPECC_OPERATOR("aten::index_put", index_put);
SPECC_VIEW_OPERATOR("aten::index_put_", index_put_here);
SPECC_OPERATOR("aten::gather", gather);
SPECC_OPERATOR("aten::scatter.value", scatter_value);
SPECC_OPERATOR("aten::scatter.src", scatter_source);
SPECC_OPERATOR("aten::full", full);
SPECC_OPERATOR("aten::full_like", full_like);
SPECC_OPERATOR("aten::zeros", constant<0>);
SPECC_OPERATOR("aten::zeros_like", constant_like<0>);
SPECC_OPERATOR("aten::ones", constant<1>);
SPECC_OPERATOR("aten::ones_like", constant_like<1>);
SPECC_OPERATOR("aten::empty_like", empty_like);
SPECC_OPERATOR("aten::arange", arange);
SPECC_OPERATOR("aten::arange.start", arange_start);
SPECC_OPERATOR("aten::arange.start_step", arange_step);

}  // namespace
}  // namespace specc::aten
