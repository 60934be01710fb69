// Views: other sizes, strides and places of the same memory.
#include <algorithm>
#include <optional>
#include <vector>

#include "aten_copies.h"
#include "aten_loops.h"

namespace specc::aten {
namespace {

Tensor view(const Tensor& x, Ints sizes) {
  Tensor made;
  check(viewed(x, sizes, made), "a view has no sizes that take a copy");
  return made;
}
Tensor permute(const Tensor& x, Ints order) {
  check(static_cast<int64_t>(order.size()) == x.dim, "an order of all dimensions");
  Tensor made = x;
  uint32_t seen = 0;
  for (int32_t d = 0; d < x.dim; ++d) {
    const int32_t from = dim_of(order[d], x.dim);
    check(!(seen >> from & 1), "an order has each dimension once");
    seen |= 1u << from;
    made.sizes[d] = x.sizes[from];
    made.strides[d] = x.strides[from];
  }
  return made;
}
Tensor transpose(const Tensor& x, int64_t one, int64_t other) {
  if (x.dim == 0) return x;
  const int32_t a = dim_of(one, x.dim), b = dim_of(other, x.dim);
  Tensor made = x;
  std::swap(made.sizes[a], made.sizes[b]);
  std::swap(made.strides[a], made.strides[b]);
  return made;
}
Tensor turned(const Tensor& x) {
  check(x.dim <= 2, "a matrix or less");
  return x.dim < 2 ? x : transpose(x, 0, 1);
}
Tensor slice(const Tensor& x, int64_t along, std::optional<int64_t> start,
             std::optional<int64_t> end, int64_t step) {
  return sliced(x, along, start, end, step);
}
Tensor narrow(const Tensor& x, int64_t along, int64_t start, int64_t length) {
  const int32_t dim = dim_of(along, x.dim);
  if (start < 0) start += x.sizes[dim];
  check(start >= 0 && length >= 0 && start <= x.sizes[dim] && length <= x.sizes[dim] - start,
        "a part of a dimension lies in it");
  return part_of(x, dim, start, length);
}
Tensor select(const Tensor& x, int64_t along, int64_t index) {
  const int32_t dim = dim_of(along, x.dim);
  const int64_t size = x.sizes[dim];
  check(-size <= index && index < size, "an entry of a dimension lies in it");
  return entry_of(x, dim, index < 0 ? index + size : index);
}
Tensor squeeze_dims(const Tensor& x, Ints dims) {
  Tensor made = x;
  uint32_t gone = 0;
  for (int64_t dim : dims)
    if (x.dim > 0) gone |= 1u << dim_of(dim, x.dim);
  for (int32_t d = x.dim - 1; d >= 0; --d)
    if ((gone >> d & 1) && x.sizes[d] == 1) made = without_dim(made, d);
  return made;
}
Tensor squeeze_dim(const Tensor& x, int64_t dim) { return squeeze_dims(x, {&dim, 1}); }
Tensor squeeze(const Tensor& x) {
  std::vector<int64_t> all(x.dim);
  for (int32_t d = 0; d < x.dim; ++d) all[d] = d;
  return squeeze_dims(x, all);
}
Tensor unsqueeze(const Tensor& x, int64_t along) {
  const int32_t dim = dim_of(along, x.dim + 1);
  return with_dim(x, dim, 1, dim < x.dim ? x.sizes[dim] * x.strides[dim] : 1);
}
Tensor expand(const Tensor& x, Ints sizes, Unread) {
  const auto dim = static_cast<int32_t>(sizes.size());
  check(dim <= kMostDims && dim >= x.dim, "a tensor has 8 dimensions or fewer, and loses none");
  Tensor made = x;
  made.dim = dim;
  for (int32_t d = 0; d < dim; ++d) {
    const int32_t from = d - (dim - x.dim);
    const bool keeps = from >= 0 && (sizes[d] == -1 || sizes[d] == x.sizes[from]);
    check(keeps || (sizes[d] >= 0 && (from < 0 || x.sizes[from] == 1)),
          "a dimension of 1 becomes one of any size, others stay");
    made.sizes[d] = keeps ? x.sizes[from] : sizes[d];
    made.strides[d] = keeps ? x.strides[from] : 0;
  }
  return made;
}
Tensor unflatten(const Tensor& x, int64_t along, Ints sizes) {
  const int32_t dim = dim_of(along, x.dim);
  std::vector<int64_t> all(x.sizes, x.sizes + dim);
  int64_t known = 1;
  for (int64_t size : sizes)
    check(size == -1 || (size >= 0 && !__builtin_mul_overflow(known, size, &known)),
          "a size is 0 or more, or -1");
  for (int64_t size : sizes) {
    check(size != -1 || known > 0, "the sizes do not fit the elements");
    all.push_back(size == -1 ? x.sizes[dim] / known : size);
  }
  all.insert(all.end(), x.sizes + dim + 1, x.sizes + x.dim);
  return view(x, all);
}
Tensor same(const Tensor& x) { return x; }

SPECC_VIEW_OPERATOR("aten::view", view);
SPECC_VIEW_OPERATOR("aten::permute", permute);
SPECC_VIEW_OPERATOR("aten::transpose.int", transpose);
SPECC_VIEW_OPERATOR("aten::t", turned);
SPECC_VIEW_OPERATOR("aten::slice.Tensor", slice);
SPECC_VIEW_OPERATOR("aten::narrow", narrow);
SPECC_VIEW_OPERATOR("aten::select.int", select);
SPECC_VIEW_OPERATOR("aten::squeeze", squeeze);
SPECC_VIEW_OPERATOR("aten::squeeze.dim", squeeze_dim);
SPECC_VIEW_OPERATOR("aten::squeeze.dims", squeeze_dims);
SPECC_VIEW_OPERATOR("aten::unsqueeze", unsqueeze);
SPECC_VIEW_OPERATOR("aten::expand", expand);
SPECC_VIEW_OPERATOR("aten::unflatten.int", unflatten);
SPECC_VIEW_OPERATOR("aten::detach", same);
SPECC_VIEW_OPERATOR("aten::alias", same);

// ---- several views at once

void put_parts(Call& call, const Tensor& x, int32_t dim, Ints sizes) {
  check(sizes.size() <= kMostResults, "an operator has more results than a call takes");
  int64_t at = 0;
  call.num_results = 0;
  for (int64_t size : sizes) {
    check(size >= 0 && size <= x.sizes[dim] - at, "parts of a dimension lie in it");
    call.results[call.num_results++] = part_of(x, dim, at, size);
    at += size;
  }
  check(at == x.sizes[dim], "parts of a dimension are all of it");
}
std::vector<int64_t> parts_of_size(int64_t whole, int64_t size) {
  check(size > 0 || whole == 0, "parts have a size");
  std::vector<int64_t> sizes;
  check(size == 0 || whole / size <= static_cast<int64_t>(kMostResults),
        "an operator has more results than a call takes");
  for (int64_t at = 0; at < whole; at += size) sizes.push_back(std::min(size, whole - at));
  if (sizes.empty()) sizes.push_back(0);
  return sizes;
}
template <class T>
T argument(const Call& call, size_t index) {
  return boxing::Unbox<T>::get(call.argument(index));
}
void split(Call& call) {
  const Tensor& x = argument<const Tensor&>(call, 0);
  const int32_t dim = dim_of(argument<int64_t>(call, 2), x.dim);
  put_parts(call, x, dim, parts_of_size(x.sizes[dim], argument<int64_t>(call, 1)));
}
void split_with_sizes(Call& call) {
  const Tensor& x = argument<const Tensor&>(call, 0);
  put_parts(call, x, dim_of(argument<int64_t>(call, 2), x.dim), argument<Ints>(call, 1));
}
void chunk(Call& call) {
  const Tensor& x = argument<const Tensor&>(call, 0);
  const int32_t dim = dim_of(argument<int64_t>(call, 2), x.dim);
  const int64_t count = argument<int64_t>(call, 1);
  check(count > 0, "a dimension has 1 part or more");
  const int64_t size = x.sizes[dim] / count + (x.sizes[dim] % count != 0);
  put_parts(call, x, dim, parts_of_size(x.sizes[dim], size));
}
void unbind(Call& call) {
  const Tensor& x = argument<const Tensor&>(call, 0);
  const int32_t dim = dim_of(argument<int64_t>(call, 1), x.dim);
  check(x.sizes[dim] <= static_cast<int64_t>(kMostResults),
        "an operator has more results than a call takes");
  call.num_results = 0;
  for (int64_t i = 0; i < x.sizes[dim]; ++i)
    call.results[call.num_results++] = entry_of(x, dim, i);
}

const Registration of_split({"aten::split.Tensor", split, true, 3});
const Registration of_split_with_sizes({"aten::split_with_sizes", split_with_sizes, true, 3});
const Registration of_split_sizes({"aten::split.sizes", split_with_sizes, true, 3});
const Registration of_chunk({"aten::chunk", chunk, true, 3});
const Registration of_unbind({"aten::unbind.int", unbind, true, 2});

}  // namespace
}  // namespace specc::aten
