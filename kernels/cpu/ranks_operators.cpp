// Binds the collectives to the operators of kernels/ops.py, and all_reduce to compiled programs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>

#include "ranks.h"
#include "shims.h"
#include "tensors.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace specc::ranks {

namespace {

struct DTypeName {
  int32_t code;
  const char* name;
};

const char* dtype_name(int32_t code) {
  static const DTypeName names[] = {
      {aoti_torch_dtype_float32(), "float32"},   {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float16(), "float16"},   {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int64(), "int64"},       {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int16(), "int16"},       {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},       {aoti_torch_dtype_bool(), "bool"}};
  for (const DTypeName& each : names)
    if (each.code == code) return each.name;
  return "another dtype";
}

constexpr const char* kKindNames[] = {"nothing", "all_reduce", "gather_rows", "from_first",
                                      "best_of_ranks"};

// The same values in the order of memory; the tensor itself where they are already.
class Packed {
 public:
  explicit Packed(AtenTensorHandle handle) : view(handle) {
    if (view.is_contiguous()) return;
    std::vector<int64_t> strides(view.dim);
    int64_t step = 1;
    for (int64_t i = view.dim - 1; i >= 0; --i) {
      strides[i] = step;
      check(!__builtin_mul_overflow(step, view.sizes[i], &step), "a tensor has no such size");
    }
    AtenTensorHandle copy = nullptr;
    if (aoti_torch_empty_strided(view.dim, view.sizes, strides.data(), view.dtype,
                                 aoti_torch_device_type_cpu(), 0, &copy) != 0)
      fail("no memory for " + std::to_string(step) + " elements");
    copy_.emplace(copy);
    call(aoti_torch_copy_(copy, handle, 0));
    view = View(copy);
  }

  View view;

 private:
  std::optional<Tensor> copy_;
};

AtenTensorHandle empty_like(const View& view) {
  std::vector<int64_t> strides(view.dim);
  int64_t step = 1;
  for (int64_t i = view.dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= view.sizes[i];
  }
  AtenTensorHandle result = nullptr;
  if (aoti_torch_empty_strided(view.dim, view.sizes, strides.data(), view.dtype,
                               aoti_torch_device_type_cpu(), 0, &result) != 0)
    fail("no memory for a result of " + std::to_string(step) + " elements");
  return result;
}

int64_t count_of(const View& view) {
  int64_t count = 1;
  for (int64_t i = 0; i < view.dim; ++i) count *= view.sizes[i];
  return count;
}

Call call_of(Kind kind, const View& view) {
  Call call;
  call.kind = kind;
  call.dtype = view.dtype;
  const int64_t count = count_of(view);
  call.columns = view.dim > 0 ? view.sizes[view.dim - 1] : 1;
  call.rows = call.columns > 0 ? count / call.columns : 0;
  call.bytes = count * static_cast<int64_t>(aoti_torch_dtype_element_size(view.dtype));
  return call;
}

Element element_of(const View& view) {
  if (view.dtype == aoti_torch_dtype_float32()) return Element::kFloat32;
  if (view.dtype == aoti_torch_dtype_bfloat16()) return Element::kBFloat16;
  if (view.dtype == aoti_torch_dtype_float16()) return Element::kFloat16;
  fail("all_reduce takes float32, bfloat16 and float16");
}

AtenTensorHandle all_reduce(AtenTensorHandle x_handle) {
  const std::shared_ptr<Group> members = group();
  const Packed x(x_handle);
  const Element element = element_of(x.view);
  Tensor y(empty_like(x.view));
  members->all_reduce(call_of(Kind::kAllReduce, x.view), element, x.view.data, data_of(y.get()));
  AtenTensorHandle result = nullptr;
  call(aoti_torch_new_tensor_handle(y.get(), &result));
  return result;
}

Tensor boxed_all_reduce(Tensor x) { return Tensor(all_reduce(x.get())); }

Tensor gather_rows(Tensor x_tensor) {
  const std::shared_ptr<Group> members = group();
  const Packed x(x_tensor.get());
  check(x.view.dim == 2, "x is [R, C]");
  const Call call = call_of(Kind::kGatherRows, x.view);
  const int64_t rows = x.view.sizes[0], columns = x.view.sizes[1];
  int64_t all_columns = 0;
  check(!__builtin_mul_overflow(columns, members->size(), &all_columns),
        "a result has no such size");
  Tensor y(empty({rows, members->rank() == 0 ? all_columns : 0}, x.view.dtype));
  char* target = static_cast<char*>(data_of(y.get()));
  const int64_t width = rows > 0 ? call.bytes / rows : 0;
  // a piece may begin and end within rows
  const auto put = [&](int r, int64_t offset, const char* data, int64_t bytes) {
    while (bytes > 0) {
      const int64_t row = offset / width, column = offset % width;
      const int64_t size = std::min(bytes, width - column);
      std::memcpy(target + (row * members->size() + r) * width + column, data, size);
      offset += size;
      data += size;
      bytes -= size;
    }
  };
  members->share(call, x.view.data, put);
  return y;
}

Tensor from_first(Tensor x_tensor) {
  const std::shared_ptr<Group> members = group();
  const Packed x(x_tensor.get());
  Tensor y(empty_like(x.view));
  char* target = static_cast<char*>(data_of(y.get()));
  members->share(call_of(Kind::kFromFirst, x.view), x.view.data,
                 [&](int, int64_t offset, const char* data, int64_t bytes) {
                   if (bytes > 0) std::memcpy(target + offset, data, bytes);
                 });
  return y;
}

Tensor best_of_ranks(Tensor score_tensor, Tensor token_tensor) {
  const std::shared_ptr<Group> members = group();
  const Packed score(score_tensor.get()), token(token_tensor.get());
  check(score.view.dtype == aoti_torch_dtype_float32(), "score is float32");
  check(token.view.dtype == aoti_torch_dtype_int64(), "token is int64");
  check(score.view.dim == token.view.dim &&
            std::equal(score.view.sizes, score.view.sizes + score.view.dim, token.view.sizes),
        "score and token have one shape");
  Call call = call_of(Kind::kBestOfRanks, token.view);
  const int64_t count = count_of(token.view);
  const size_t score_bytes = count * sizeof(float), token_bytes = count * sizeof(int64_t);
  call.bytes = static_cast<int64_t>(score_bytes + token_bytes);
  std::vector<char> mine(call.bytes), all(call.bytes * members->size());
  if (count > 0) {
    std::memcpy(mine.data(), score.view.data, score_bytes);
    std::memcpy(mine.data() + score_bytes, token.view.data, token_bytes);
  }
  members->share(call, mine.data(), [&](int r, int64_t offset, const char* data, int64_t bytes) {
    if (bytes > 0) std::memcpy(all.data() + r * call.bytes + offset, data, bytes);
  });
  std::vector<const char*> parts;
  for (int r = 0; r < members->size(); ++r) parts.push_back(all.data() + r * call.bytes);
  Tensor best(empty_like(token.view));
  best_in_order(parts.data(), members->size(), count, static_cast<int64_t*>(data_of(best.get())));
  return best;
}

}  // namespace

std::string describe(const Call& call) {
  const auto kind = static_cast<size_t>(call.kind);
  std::string text = kind < std::size(kKindNames) ? kKindNames[kind] : "another kind";
  return text + " of " + dtype_name(call.dtype) + " [" + std::to_string(call.rows) + ", " +
         std::to_string(call.columns) + "] (collective " + std::to_string(call.number) + ")";
}

}  // namespace specc::ranks

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def("all_reduce(Tensor x) -> Tensor");
  library.def("gather_rows(Tensor x) -> Tensor");
  library.def("from_first(Tensor x) -> Tensor");
  library.def("best_of_ranks(Tensor score, Tensor token) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("all_reduce", TORCH_BOX(&specc::ranks::boxed_all_reduce));
  library.impl("gather_rows", TORCH_BOX(&specc::ranks::gather_rows));
  library.impl("from_first", TORCH_BOX(&specc::ranks::from_first));
  library.impl("best_of_ranks", TORCH_BOX(&specc::ranks::best_of_ranks));
}

extern "C" {

// Declared to AOTInductor in kernels/native.py, C_SHIMS.
__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_all_reduce(
    AtenTensorHandle x, AtenTensorHandle* result) {
  return specc::guarded([&] { *result = specc::ranks::all_reduce(x); });
}
}
