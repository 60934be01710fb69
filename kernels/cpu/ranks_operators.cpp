// Collectives of the ranks of a sharded engine, as operators of tensors.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <vector>

#include "ranks.h"
#include "tensors.h"

namespace specc::operators {
namespace {

using ranks::Kind;

const char* name_of(Element dtype) {
  switch (dtype) {
    case kFloat32: return "float32";
    case kBFloat16: return "bfloat16";
    case kFloat16: return "float16";
    case kFloat64: return "float64";
    case kInt64: return "int64";
    case kInt32: return "int32";
    case kInt16: return "int16";
    case kInt8: return "int8";
    case kUInt8: return "uint8";
    case kBool: return "bool";
    default: return "another dtype";  // a rank may say anything
  }
}

constexpr const char* kKindNames[] = {"nothing", "all_reduce", "gather_rows", "from_first",
                                      "best_of_ranks"};

// Copies the elements of dimensions from `dim` on, in their order; returns where `to` has got.
char* pack(const Tensor& x, int32_t dim, const char* from, int64_t item, char* to) {
  if (dim == x.dim) {
    std::memcpy(to, from, item);
    return to + item;
  }
  if (dim == x.dim - 1 && x.strides[dim] == 1) {
    std::memcpy(to, from, x.sizes[dim] * item);
    return to + x.sizes[dim] * item;
  }
  for (int64_t i = 0; i < x.sizes[dim]; ++i)
    to = pack(x, dim + 1, from + i * x.strides[dim] * item, item, to);
  return to;
}

// The values of a tensor in the order of memory: its own, where they are already.
class Packed {
 public:
  explicit Packed(const Tensor& x) : bytes(x.count() * bytes_of(x.dtype)), data(x.as<char>()) {
    if (x.is_contiguous()) return;
    copy_.emplace(bytes);
    pack(x, 0, x.as<char>(), bytes_of(x.dtype), copy_->data());
    data = copy_->data();
  }

  int64_t bytes;
  const char* data;

 private:
  std::optional<Scratch> copy_;
};

Tensor empty_like(const Tensor& x) {
  return empty(Ints(x.sizes, static_cast<size_t>(x.dim)), x.dtype);
}

ranks::Call call_of(Kind kind, const Tensor& x) {
  ranks::Call call;
  call.kind = kind;
  call.dtype = static_cast<int32_t>(x.dtype);
  const int64_t count = x.count();
  call.columns = x.dim > 0 ? x.sizes[x.dim - 1] : 1;
  call.rows = call.columns > 0 ? count / call.columns : 0;
  call.bytes = count * bytes_of(x.dtype);
  return call;
}

ranks::Element summand_of(const Tensor& x) {
  switch (x.dtype) {
    case kFloat32: return ranks::Element::kFloat32;
    case kBFloat16: return ranks::Element::kBFloat16;
    case kFloat16: return ranks::Element::kFloat16;
    default: fail("all_reduce takes float32, bfloat16 and float16");
  }
}

Tensor all_reduce(const Tensor& x) {
  const std::shared_ptr<ranks::Group> members = ranks::group();
  const ranks::Element element = summand_of(x);
  const Packed mine(x);
  const Tensor y = empty_like(x);
  members->all_reduce(call_of(Kind::kAllReduce, x), element, mine.data, y.data);
  return y;
}

Tensor gather_rows(const Tensor& x) {
  const std::shared_ptr<ranks::Group> members = ranks::group();
  check(x.dim == 2, "x is [R, C]");
  const Packed mine(x);
  const ranks::Call call = call_of(Kind::kGatherRows, x);
  const int64_t rows = x.sizes[0], columns = x.sizes[1];
  int64_t all_columns = 0;
  check(!__builtin_mul_overflow(columns, members->size(), &all_columns),
        "a result has no such size");
  const Tensor y = empty({rows, members->rank() == 0 ? all_columns : 0}, x.dtype);
  char* target = y.as<char>();
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
  members->share(call, mine.data, put);
  return y;
}

Tensor from_first(const Tensor& x) {
  const std::shared_ptr<ranks::Group> members = ranks::group();
  const Packed mine(x);
  const Tensor y = empty_like(x);
  char* target = y.as<char>();
  members->share(call_of(Kind::kFromFirst, x), mine.data,
                 [&](int, int64_t offset, const char* data, int64_t bytes) {
                   if (bytes > 0) std::memcpy(target + offset, data, bytes);
                 });
  return y;
}

Tensor best_of_ranks(const Tensor& score, const Tensor& token) {
  const std::shared_ptr<ranks::Group> members = ranks::group();
  check(score.dtype == kFloat32, "score is float32");
  check(token.dtype == kInt64, "token is int64");
  check(score.dim == token.dim && std::equal(score.sizes, score.sizes + score.dim, token.sizes),
        "score and token have one shape");
  const Packed scores(score), tokens(token);
  ranks::Call call = call_of(Kind::kBestOfRanks, token);
  call.bytes = scores.bytes + tokens.bytes;
  const Scratch mine(call.bytes), all(call.bytes * members->size());
  if (call.bytes > 0) {
    std::memcpy(mine.data(), scores.data, scores.bytes);
    std::memcpy(mine.data() + scores.bytes, tokens.data, tokens.bytes);
  }
  members->share(call, mine.data(), [&](int r, int64_t offset, const char* data, int64_t bytes) {
    if (bytes > 0) std::memcpy(all.data() + r * call.bytes + offset, data, bytes);
  });
  std::vector<const char*> parts;
  for (int r = 0; r < members->size(); ++r) parts.push_back(all.data() + r * call.bytes);
  const Tensor best = empty_like(token);
  ranks::best_in_order(parts.data(), members->size(), token.count(), best.as<int64_t>());
  return best;
}

}  // namespace

SPECC_OPERATOR("specc::all_reduce", all_reduce);
SPECC_OPERATOR("specc::gather_rows", gather_rows);
SPECC_OPERATOR("specc::from_first", from_first);
SPECC_OPERATOR("specc::best_of_ranks", best_of_ranks);

}  // namespace specc::operators

namespace specc::ranks {

std::string describe(const Call& call) {
  using namespace operators;
  const auto kind = static_cast<size_t>(call.kind);
  std::string text = kind < std::size(kKindNames) ? kKindNames[kind] : "another kind";
  text += std::string(" of ") + name_of(static_cast<specc::Element>(call.dtype));
  return text + " [" + std::to_string(call.rows) + ", " + std::to_string(call.columns) +
         "] (collective " + std::to_string(call.number) + ")";
}

}  // namespace specc::ranks
