// Binds low-rank terms of adapters to their operator.
#include "lora.h"

#include "operands.h"
#include "tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

// What each piece reads and writes lies within its tensors; their numbers are data of an engine.
void check_pieces(const Tensor& pieces, const Tensor& down, const Tensor& up, int64_t n) {
  check_index(pieces, 2, kInt32, "pieces is [P, 5] int32");
  check(pieces.sizes[1] == 5, "pieces is [P, 5]");
  const auto* piece = pieces.as<LoraPiece>();
  int64_t numbers = 0;
  for (int64_t p = 0; p < pieces.sizes[0]; ++p, ++piece) {
    check(piece->adapter >= 0 && piece->column >= 0 && piece->columns >= 0 && piece->row >= 0 &&
              piece->rank >= 0,
          "pieces are numbers of 0 or more");
    check(int64_t{piece->column} + piece->columns <= n &&
              int64_t{piece->row} + piece->rank <= down.sizes[0],
          "a piece lies within base and down");
    numbers += int64_t{piece->rank} * piece->columns;
    check(numbers <= up.sizes[0], "up has the numbers of all pieces");
  }
  check(numbers == up.sizes[0], "up has the numbers of all pieces");
}

Tensor add_lora(const Tensor& base, const Tensor& x, const Tensor& adapters, const Tensor& down,
                const Tensor& up, const Tensor& pieces, const Tensor& scales) {
  check(base.dim == 2 && base.is_dense_row() && x.dim == 2 && x.is_dense_row() &&
            x.sizes[0] == base.sizes[0],
        "base is [T, N], input [T, K]");
  check_index(adapters, 2, kInt32, "adapters is [T, 1] int32");
  check(adapters.sizes[0] == base.sizes[0] && adapters.sizes[1] == 1, "adapters is [T, 1]");
  check_index(down, 2, base.dtype, "down is [R, K] in the dtype of base");
  check_index(up, 1, base.dtype, "up is [U] in the dtype of base");
  check_index(scales, 1, kFloat32, "scales is [P] float32");
  check(x.dtype == base.dtype && down.sizes[1] == x.sizes[1], "input is [T, K] in the dtype of base");
  check_pieces(pieces, down, up, base.sizes[1]);
  check(scales.sizes[0] == pieces.sizes[0], "scales is [P]");
  AddLora a{};
  a.dtype = to_dtype(base);
  a.tokens = base.sizes[0];
  a.n = base.sizes[1];
  a.k = x.sizes[1];
  a.base = base.data;
  a.base_stride = base.strides[0];
  a.x = x.data;
  a.x_stride = x.strides[0];
  a.adapters = adapters.as<int32_t>();
  a.down = down.data;
  a.up = up.data;
  a.pieces = pieces.as<LoraPiece>();
  a.scales = scales.as<float>();
  a.num_pieces = pieces.sizes[0];
  const Tensor out = empty({a.tokens, a.n}, base.dtype);
  a.out = out.data;
  specc::add_lora(a, kernel_threads());
  return out;
}

}  // namespace

SPECC_OPERATOR("specc::add_lora", add_lora);

}  // namespace specc::operators
