// Copies: what makes a tensor one piece, what joins and repeats tensors, and what changes a dtype.
#include "aten_copies.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "aten_loops.h"
#include "strided_rows.h"
#include "threads.h"

namespace specc::aten {
namespace {

template <class T>
void copy_run(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    *reinterpret_cast<T*>(to + i * to_stride) = *reinterpret_cast<const T*>(from + i * from_stride);
}

}  // namespace

void copy(const Tensor& from, const Tensor& to) {
  check(has_same_sizes(from, to) && from.dtype == to.dtype, "a copy has the sizes of its source");
  const int64_t item = bytes_of(from.dtype), count = from.count();
  if (count == 0) return;
  // dimensions by the target's strides, the fastest last
  int order[kMostDims];
  for (int32_t d = 0; d < from.dim; ++d) order[d] = d;
  std::stable_sort(order, order + from.dim,
                   [&](int a, int b) { return to.strides[a] > to.strides[b]; });
  int64_t sizes[kMostDims], of_from[kMostDims], of_to[kMostDims];
  int dim = 0;
  for (int32_t i = 0; i < from.dim; ++i) {
    const int d = order[i];
    if (from.sizes[d] == 1) continue;
    if (dim > 0 && of_from[dim - 1] == from.sizes[d] * from.strides[d] &&
        of_to[dim - 1] == from.sizes[d] * to.strides[d]) {
      sizes[dim - 1] *= from.sizes[d];
      of_from[dim - 1] = from.strides[d];
      of_to[dim - 1] = to.strides[d];
    } else {
      sizes[dim] = from.sizes[d];
      of_from[dim] = from.strides[d];
      of_to[dim++] = to.strides[d];
    }
  }
  const char* source = static_cast<const char*>(from.data);
  char* target = static_cast<char*>(to.data);
  if (dim == 0) {
    std::memcpy(target, source, item);
    return;
  }
  const int64_t n = sizes[dim - 1];
  const int64_t from_stride = of_from[dim - 1] * item, to_stride = of_to[dim - 1] * item;
  const bool is_dense = from_stride == item && to_stride == item;
  StridedRows from_rows, to_rows;
  for (int d = 0; d + 1 < dim; ++d) {
    from_rows.add(sizes[d], of_from[d] * item);
    to_rows.add(sizes[d], of_to[d] * item);
  }
  const int64_t pieces = dim == 1 && is_dense ? (n * item + 65535) / 65536 : 1;
  share_rows(from_rows.count * pieces, std::max<int64_t>(1, n / pieces), kernel_threads(),
             [&](int64_t first, int64_t last) {
    if (pieces > 1) {
      const int64_t begin = n * first / pieces, end = n * last / pieces;
      std::memcpy(target + begin * item, source + begin * item, (end - begin) * item);
      return;
    }
    RowCursor read(from_rows, first), write(to_rows, first);
    for (int64_t r = first; r < last; ++r, read.next(), write.next()) {
      const char* row = source + read.offset();
      char* out = target + write.offset();
      if (is_dense) std::memcpy(out, row, n * item);
      else if (item == 4) copy_run<uint32_t>(row, from_stride, out, to_stride, n);
      else if (item == 2) copy_run<uint16_t>(row, from_stride, out, to_stride, n);
      else if (item == 8) copy_run<uint64_t>(row, from_stride, out, to_stride, n);
      else copy_run<uint8_t>(row, from_stride, out, to_stride, n);
    }
  });
}

Tensor contiguous_of(const Tensor& x) {
  if (x.is_contiguous()) return x;
  const Tensor made = empty_as(x);
  copy(x, made);
  return made;
}

bool viewed(const Tensor& x, Ints sizes, Tensor& made) {
  check(sizes.size() <= kMostDims, "a tensor has 8 dimensions or fewer");
  made = x;
  made.dim = static_cast<int32_t>(sizes.size());
  int64_t known = 1, open = -1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    made.sizes[d] = sizes[d];
    if (sizes[d] == -1) {
      check(open < 0, "one size is what the others leave");
      open = static_cast<int64_t>(d);
    } else {
      check(sizes[d] >= 0 && !__builtin_mul_overflow(known, sizes[d], &known),
            "a size is 0 or more, or -1");
    }
  }
  const int64_t count = x.count();
  if (open >= 0) {
    check(known > 0 && count % known == 0, "the sizes do not fit the elements");
    made.sizes[open] = count / known;
    known *= made.sizes[open];
  }
  check(known == count, "the sizes do not fit the elements");
  if (count == 0 || x.is_contiguous()) {
    int64_t step = 1;
    for (int32_t d = made.dim - 1; d >= 0; --d) {
      made.strides[d] = step;
      // of a tensor without elements, sizes may be of any product
      check(!__builtin_mul_overflow(step, std::max<int64_t>(made.sizes[d], 1), &step),
            "a view has no such sizes");
    }
    return true;
  }
  // Parts of x that are one piece each, from the last: new dimensions must fit into them.
  int32_t at = made.dim - 1;
  int64_t piece = 1, base = x.strides[x.dim - 1], filled = 1;
  for (int32_t d = x.dim - 1; d >= 0; --d) {
    piece *= x.sizes[d];
    const bool ends = d == 0 || (x.sizes[d - 1] != 1 && x.strides[d - 1] != piece * base);
    if (!ends) continue;
    while (at >= 0 && (filled < piece || made.sizes[at] == 1)) {
      made.strides[at] = filled * base;
      filled *= made.sizes[at];
      --at;
    }
    if (filled != piece) return false;
    if (d > 0) base = x.strides[d - 1], piece = filled = 1;
  }
  return at == -1;
}

namespace {

Tensor contiguous(const Tensor& x, Unread) { return contiguous_of(x); }

Tensor reshape(const Tensor& x, Ints sizes) {
  Tensor made;
  if (viewed(x, sizes, made)) return made;
  viewed(contiguous_of(x), sizes, made);
  return made;
}
Tensor flatten(const Tensor& x, int64_t start, int64_t end) {
  if (x.dim == 0) return with_dim(x, 0, 1, 1);
  const int32_t first = dim_of(start, x.dim), last = dim_of(end, x.dim);
  check(first <= last, "dimensions to flatten follow each other");
  std::vector<int64_t> sizes(x.sizes, x.sizes + first + 1);
  for (int32_t d = first + 1; d <= last; ++d)
    check(!__builtin_mul_overflow(sizes[first], x.sizes[d], &sizes[first]),
          "a result has no such size");
  sizes.insert(sizes.end(), x.sizes + last + 1, x.sizes + x.dim);
  return reshape(x, sizes);
}

// another type, in the order of memory of x
Tensor converted(const Tensor& x, Element dtype) {
  for (Element each : {x.dtype, dtype})
    require(is_whole(each) || is_float_here(each), "conversions of float32, bfloat16 and integers");
  Tensor out;
  const Loop loop = loop_of(out, dtype, {&x});
  for_each_run(loop, 1, [&](char* const* at, const int64_t* strides, int64_t n) {
    if (is_whole(x.dtype) && is_whole(dtype)) {
      int64_t memory[kChunk];
      return put_integers(as_integers(at[1], strides[1], x.dtype, n, memory), n, dtype, at[0]);
    }
    float memory[kChunk];
    const float* from = as_floats(at[1], strides[1], x.dtype, n, memory);
    if (is_real(dtype)) return put_floats(from, n, dtype, at[0]);
    int64_t whole[kChunk];
    // beyond 2^63, and of NaN, whatever; but nothing undefined
    for (int64_t i = 0; i < n; ++i)
      whole[i] = dtype == Element::kBool ? from[i] != 0
                 : std::abs(from[i]) < 9.2e18f ? static_cast<int64_t>(from[i]) : INT64_MIN;
    put_integers(whole, n, dtype, at[0]);
  });
  return out;
}
Tensor to_dtype(const Tensor& x, int64_t dtype, Unread, bool copies, Unread) {
  const auto wanted = static_cast<Element>(dtype);
  bytes_of(wanted);  // throws for a number that is none
  return wanted == x.dtype && !copies ? x : converted(x, wanted);
}
Tensor type_as(const Tensor& x, const Tensor& other) {
  return x.dtype == other.dtype ? x : converted(x, other.dtype);
}
Tensor to_copy(const Tensor& x, std::optional<int64_t> dtype, Unread, Unread, Unread, Unread,
               Unread) {
  return converted(x, dtype.has_value() ? static_cast<Element>(*dtype) : x.dtype);
}

// whether an argument is there at all
struct IsGiven {
  bool holds;
};

}  // namespace
}  // namespace specc::aten
namespace specc::boxing {
template <>
struct Unbox<aten::IsGiven> {
  static aten::IsGiven get(const Value& value) { return {value.kind != Value::Kind::kNone}; }
};
}  // namespace specc::boxing
namespace specc::aten {
namespace {

Tensor clone(const Tensor& x, IsGiven format) {
  Tensor made;
  if (format.holds)
    made = empty_as(x);
  else
    loop_of(made, x.dtype, {&x});
  copy(x, made);
  return made;
}

Tensor cat(Tensors parts, int64_t along) {
  check(!parts.empty(), "a tensor to join, or more");
  // torch leaves out tensors [0], whatever the others are
  const auto counts = [](const Tensor& x) { return x.dim != 1 || x.sizes[0] != 0; };
  const auto first = std::find_if(parts.begin(), parts.end(), counts);
  const Tensor& like = first == parts.end() ? parts[0] : *first;
  check(like.dim > 0, "tensors that are joined have dimensions");
  const int32_t dim = dim_of(along, like.dim);
  Tensor shape = like;
  shape.sizes[dim] = 0;
  for (const Tensor& part : parts) {
    require(part.dtype == like.dtype, "joined tensors of one dtype");
    if (!counts(part)) continue;
    check(part.dim == like.dim, "tensors that are joined have the same dimensions");
    for (int32_t d = 0; d < like.dim; ++d)
      check(d == dim || part.sizes[d] == like.sizes[d],
            "tensors that are joined have the same sizes beside the dimension");
    check(!__builtin_add_overflow(shape.sizes[dim], part.sizes[dim], &shape.sizes[dim]),
          "a result has no such size");
  }
  const Tensor made = empty_as(shape);
  int64_t at = 0;
  for (const Tensor& part : parts) {
    if (!counts(part)) continue;
    copy(part, part_of(made, dim, at, part.sizes[dim]));
    at += part.sizes[dim];
  }
  return made;
}
Tensor stack(Tensors parts, int64_t along) {
  check(!parts.empty(), "a tensor to join, or more");
  const int32_t dim = dim_of(along, parts[0].dim + 1);
  std::vector<Tensor> raised;
  for (const Tensor& part : parts) {
    check(has_same_sizes(part, parts[0]), "tensors that are stacked have the same sizes");
    raised.push_back(with_dim(part, dim, 1, 1));
  }
  return cat(raised, dim);
}

Tensor repeat(const Tensor& x, Ints times) {
  check(times.size() <= kMostDims && static_cast<int64_t>(times.size()) >= x.dim,
        "a number of times for each dimension, 8 or fewer");
  Tensor whole = x;
  while (whole.dim < static_cast<int32_t>(times.size())) whole = with_dim(whole, 0, 1, 0);
  Tensor shape = whole;
  for (int32_t d = 0; d < whole.dim; ++d)
    check(times[d] >= 0 && !__builtin_mul_overflow(whole.sizes[d], times[d], &shape.sizes[d]),
          "a result has no such size");
  const Tensor made = empty_as(shape);
  if (made.count() == 0) return made;
  // copies in the place of each repetition
  Tensor target = made;
  StridedRows places;
  for (int32_t d = 0; d < whole.dim; ++d) {
    places.add(times[d], whole.sizes[d] * made.strides[d]);
    target.sizes[d] = whole.sizes[d];
  }
  RowCursor at(places, 0);
  for (int64_t i = 0; i < places.count; ++i, at.next()) {
    target.data = static_cast<char*>(made.data) + at.offset() * bytes_of(made.dtype);
    copy(whole, target);
  }
  return made;
}
Tensor repeat_interleave(const Tensor& x, int64_t times, std::optional<int64_t> along,
                         std::optional<int64_t>) {
  check(times >= 0, "a number of times, 0 or more");
  Tensor whole = x;
  if (!along.has_value()) whole = reshape(x, std::vector<int64_t>{-1});
  const int32_t dim = along.has_value() ? dim_of(*along, x.dim) : 0;
  Tensor shape = whole;
  check(!__builtin_mul_overflow(whole.sizes[dim], times, &shape.sizes[dim]),
        "a result has no such size");
  const Tensor made = empty_as(shape);
  Tensor target = with_dim(made, dim + 1, times, made.strides[dim]);
  target.sizes[dim] = whole.sizes[dim];
  target.strides[dim] *= times;
  copy(with_dim(whole, dim + 1, times, 0), target);
  return made;
}

Tensor slice_scatter(const Tensor& x, const Tensor& source, int64_t along,
                     std::optional<int64_t> start, std::optional<int64_t> end, int64_t step) {
  Tensor made;
  loop_of(made, x.dtype, {&x});
  copy(x, made);
  copy(source, sliced(made, along, start, end, step));
  return made;
}

SPECC_VIEW_OPERATOR("aten::contiguous", contiguous);
SPECC_VIEW_OPERATOR("aten::reshape", reshape);
SPECC_VIEW_OPERATOR("aten::flatten.using_ints", flatten);
SPECC_VIEW_OPERATOR("aten::to.dtype", to_dtype);
SPECC_VIEW_OPERATOR("aten::type_as", type_as);
SPECC_OPERATOR("aten::_to_copy", to_copy);
SPECC_OPERATOR("aten::clone", clone);
SPECC_OPERATOR("aten::cat", cat);
SPECC_OPERATOR("aten::stack", stack);
SPECC_OPERATOR("aten::repeat", repeat);
SPECC_OPERATOR("aten::repeat_interleave.self_int", repeat_interleave);
SPECC_OPERATOR("aten::slice_scatter", slice_scatter);

}  // namespace
}  // namespace specc::aten
