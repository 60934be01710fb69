// Binds rows in paged slabs to their operators, twice, as register.cpp does.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "kernels.h"
#include "shims.h"
#include "tensors.h"
#include "threads.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

// What the arguments say of slab, tokens and tables, without the rows themselves.
specc::SlabRows rows_of(const View& slab, const View& slot, int64_t per_token,
                        const View& q_start, const View& block_table) {
  check(slab.dim == 3 && slab.is_dense_row(), "slab is [blocks, block_size, W], rows contiguous");
  check(slab.sizes[1] >= 1, "a block has 1 row or more");
  check_index(q_start, 1, aoti_torch_dtype_int32(), "q_start is [B + 1] int32");
  check_index(block_table, 2, aoti_torch_dtype_int32(), "block_table is [B, n] int32");
  check(q_start.sizes[0] == block_table.sizes[0] + 1, "q_start and block_table agree");
  specc::SlabRows a{};
  a.item_bytes = to_dtype(slab) == specc::DType::kFloat32 ? 4 : 2;
  a.num_tokens = slot.sizes[0];
  a.per_token = per_token;
  a.width = slab.sizes[2];
  a.slab = slab.data;
  a.block_stride = slab.strides[0];
  a.row_stride = slab.strides[1];
  a.num_blocks = slab.sizes[0];
  a.block_size = slab.sizes[1];
  a.q_start = q_start.as<int32_t>();
  a.slot = slot.as<int32_t>();
  a.batch = block_table.sizes[0];
  a.block_table = block_table.as<int32_t>();
  a.blocks_per_sequence = block_table.sizes[1];
  specc::check_bounds(a);
  return a;
}

void write_rows(AtenTensorHandle x_handle, AtenTensorHandle slab_handle,
                AtenTensorHandle q_start_handle, AtenTensorHandle slot_handle,
                AtenTensorHandle block_table_handle) {
  const View x(x_handle), slab(slab_handle), slot(slot_handle);
  check(x.dim == 2 && x.is_dense_row(), "x is [Nt, W], rows contiguous");
  check_index(slot, 1, aoti_torch_dtype_int32(), "slot is [Nt] int32");
  check(slab.dim == 3 && x.dtype == slab.dtype && x.sizes[1] == slab.sizes[2] &&
            x.sizes[0] == slot.sizes[0],
        "x, slab and slot agree");
  specc::SlabRows a = rows_of(slab, slot, 1, View(q_start_handle), View(block_table_handle));
  a.rows = x.data;
  a.rows_stride = x.strides[0];
  specc::write_rows(a, specc::kernel_threads());
}

AtenTensorHandle take_rows(AtenTensorHandle slab_handle, AtenTensorHandle slots_handle,
                           AtenTensorHandle q_start_handle, AtenTensorHandle block_table_handle) {
  const View slab(slab_handle), slots(slots_handle);
  check_index(slots, 2, aoti_torch_dtype_int32(), "slots is [Nt, K] int32");
  specc::SlabRows a =
      rows_of(slab, slots, slots.sizes[1], View(q_start_handle), View(block_table_handle));
  AtenTensorHandle out = empty({a.num_tokens, a.per_token, a.width}, slab.dtype);
  a.rows = data_of(out);
  a.rows_stride = a.width;
  specc::take_rows(a, specc::kernel_threads());
  return out;
}

void boxed_write_rows(Tensor x, Tensor slab, Tensor q_start, Tensor slot, Tensor block_table) {
  write_rows(x.get(), slab.get(), q_start.get(), slot.get(), block_table.get());
}

Tensor boxed_take_rows(Tensor slab, Tensor slots, Tensor q_start, Tensor block_table) {
  return Tensor(take_rows(slab.get(), slots.get(), q_start.get(), block_table.get()));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def(
      "write_rows(Tensor x, Tensor(a!) slab, Tensor q_start, Tensor slot, Tensor block_table) -> "
      "()");
  library.def("take_rows(Tensor slab, Tensor slots, Tensor q_start, Tensor block_table) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("write_rows", TORCH_BOX(&boxed_write_rows));
  library.impl("take_rows", TORCH_BOX(&boxed_take_rows));
}

// Both are declared to AOTInductor in kernels/native.py, C_SHIMS.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_write_rows(
    AtenTensorHandle x, AtenTensorHandle slab, AtenTensorHandle q_start, AtenTensorHandle slot,
    AtenTensorHandle block_table, AtenTensorHandle*) {  // the last is null: there is no result
  return specc::guarded([&] { write_rows(x, slab, q_start, slot, block_table); });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_take_rows(
    AtenTensorHandle slab, AtenTensorHandle slots, AtenTensorHandle q_start,
    AtenTensorHandle block_table, AtenTensorHandle* result) {
  return specc::guarded([&] { *result = take_rows(slab, slots, q_start, block_table); });
}
