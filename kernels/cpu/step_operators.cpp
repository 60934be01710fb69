// Binds what a step does between its programs to the operators of kernels/ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tensors.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

// Slots as int64, whatever integers they are.
std::vector<int64_t> slots_of(const View& view, const char* what) {
  int64_t count = 1;
  for (int64_t i = 0; i < view.dim; ++i) count *= view.sizes[i];
  check(view.is_contiguous(), what);
  if (view.dtype == aoti_torch_dtype_int64())
    return {view.as<int64_t>(), view.as<int64_t>() + count};
  check(view.dtype == aoti_torch_dtype_int32(), what);
  return {view.as<int32_t>(), view.as<int32_t>() + count};
}

Tensor tree_expand(Tensor logits_tensor, int64_t num_children) {
  const View logits(logits_tensor.get());
  check(logits.dim == 2 && logits.is_dense_row(), "logits is [R, V], rows contiguous");
  check(num_children >= 1 && num_children <= logits.sizes[1], "1 … V children");
  Tensor out(empty({logits.sizes[0], num_children}, aoti_torch_dtype_int64()));
  specc::tree_expand({to_dtype(logits), logits.sizes[0], logits.sizes[1], num_children, logits.data,
                      logits.strides[0], static_cast<int64_t*>(data_of(out.get()))});
  return out;
}

std::tuple<Tensor, Tensor, Tensor> accept_winners(Tensor winners_tensor, Tensor tokens_tensor,
                                                  Tensor parents_tensor, int64_t max_depth) {
  const View winners(winners_tensor.get()), tokens(tokens_tensor.get()),
      parents(parents_tensor.get());
  check(is_rows(tokens, i64()), "tokens is [B, N] int64, rows contiguous");
  check(is_rows(winners, i64()) && is_same_shape(winners, tokens),
        "winners is [B, N] int64, rows contiguous");
  check(is_rows(parents, i32()) && is_same_shape(parents, tokens),
        "parents is [B, N] int32, rows contiguous");
  check_count(max_depth, 0, "max_depth");
  const int64_t batch = tokens.sizes[0];
  check(tokens.sizes[1] >= 1, "a tree has a root");
  Tensor path(empty({batch, max_depth + 1}, i32())), num_accepted(empty({batch}, i32())),
      output(empty({batch, max_depth + 1}, i64()));
  specc::AcceptWinners a{};
  a.batch = batch;
  a.num_nodes = tokens.sizes[1];
  a.max_depth = max_depth;
  a.winners = winners.as<int64_t>();
  a.winner_stride = winners.strides[0];
  a.tokens = tokens.as<int64_t>();
  a.token_stride = tokens.strides[0];
  a.parents = parents.as<int32_t>();
  a.parent_stride = parents.strides[0];
  a.path = static_cast<int32_t*>(data_of(path.get()));
  a.num_accepted = static_cast<int32_t*>(data_of(num_accepted.get()));
  a.output_tokens = static_cast<int64_t*>(data_of(output.get()));
  specc::accept_winners(a);
  return {path, num_accepted, output};
}

std::tuple<Tensor, Tensor> tree_rows(Tensor cache_len_tensor, Tensor nodes_tensor,
                                     Tensor depths_tensor) {
  const View cache_len(cache_len_tensor.get()), nodes(nodes_tensor.get()),
      depths(depths_tensor.get());
  const int32_t i32 = aoti_torch_dtype_int32();
  check_index(cache_len, 1, i32, "cache_len is [B] int32");
  check_index(nodes, 1, i32, "nodes is [M] int32");
  check_index(depths, 1, i32, "depths is [M] int32");
  check(nodes.sizes[0] == depths.sizes[0], "nodes and depths agree");
  const int64_t batch = cache_len.sizes[0], count = nodes.sizes[0];
  Tensor slot(empty({batch * count}, i32)),
      position(empty({batch * count}, aoti_torch_dtype_int64()));
  int32_t* slots = static_cast<int32_t*>(data_of(slot.get()));
  int64_t* positions = static_cast<int64_t*>(data_of(position.get()));
  // for all rows at once: the loop over them needs no check of its own
  int64_t lowest = 0, highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    lowest = std::min<int64_t>(lowest, nodes.as<int32_t>()[i]);
    highest = std::max<int64_t>(highest, nodes.as<int32_t>()[i]);
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = cache_len.as<int32_t>()[b];
    check(is_i32(length + lowest) && is_i32(length + highest), "cache_len and nodes add to int32");
    for (int64_t i = 0; i < count; ++i) {
      slots[b * count + i] = static_cast<int32_t>(length + nodes.as<int32_t>()[i]);
      positions[b * count + i] = std::max<int64_t>(length + depths.as<int32_t>()[i], 0);
    }
  }
  return {slot, position};
}

std::tuple<Tensor, Tensor> commit_rows(Tensor path_tensor, Tensor cache_len_tensor,
                                       Tensor slot_of_tensor) {
  const View path(path_tensor.get()), cache_len(cache_len_tensor.get()),
      slot_of(slot_of_tensor.get());
  const int32_t i32 = aoti_torch_dtype_int32();
  check_index(path, 2, i32, "path is [B, P] int32");
  check_index(cache_len, 1, i32, "cache_len is [B] int32");
  check(path.sizes[0] == cache_len.sizes[0], "path and cache_len agree");
  const int64_t batch = path.sizes[0], width = path.sizes[1];
  check((slot_of.dim == 1 || (slot_of.dim == 2 && slot_of.sizes[0] == batch)) &&
            slot_of.dtype == i32 && slot_of.is_dense_row(),
        "slot_of is [N] or [B, N] int32, rows contiguous");
  const int64_t num_nodes = slot_of.sizes[slot_of.dim - 1];
  const int64_t slot_stride = slot_of.dim == 2 ? slot_of.strides[0] : 0;
  Tensor source(empty({batch, width}, i32)), length(empty({batch}, i32));
  int32_t* sources = static_cast<int32_t*>(data_of(source.get()));
  int32_t* lengths = static_cast<int32_t*>(data_of(length.get()));
  std::fill(sources, sources + batch * width, -1);
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* slots = slot_of.as<int32_t>() + b * slot_stride;
    const int32_t* nodes = path.as<int32_t>() + b * width;
    const int64_t committed = cache_len.as<int32_t>()[b];
    int64_t kept = 0;
    for (; committed >= 0 && kept < width && nodes[kept] >= 0; ++kept) {
      check(nodes[kept] < num_nodes, "slot_of has an entry for each node");
      if (slots[nodes[kept]] < 0) break;
      const int64_t row = committed + slots[nodes[kept]];
      check(is_i32(row), "cache_len and slot_of add to int32");
      sources[b * width + kept] = static_cast<int32_t>(row);
    }
    check(is_i32(committed + kept), "cache_len and the length of a path add to int32");
    lengths[b] = static_cast<int32_t>(committed + kept);
  }
  return {source, length};
}

Tensor next_tokens(Tensor last_tensor, Tensor output_tensor, Tensor accepted_tensor) {
  const View last(last_tensor.get()), output(output_tensor.get()), accepted(accepted_tensor.get());
  const int32_t i64 = aoti_torch_dtype_int64();
  check_index(last, 2, i64, "last_tokens is [B, C] int64");
  check_index(output, 2, i64, "output_tokens is [B, P] int64");
  check_index(accepted, 1, aoti_torch_dtype_int32(), "num_accepted is [B] int32");
  const int64_t batch = last.sizes[0], columns = last.sizes[1], width = output.sizes[1];
  check(output.sizes[0] == batch && accepted.sizes[0] == batch,
        "last_tokens, output_tokens and num_accepted agree");
  check(columns >= 1, "last_tokens has 1 column or more");
  Tensor out(empty({batch, columns}, i64));
  int64_t* next = static_cast<int64_t*>(data_of(out.get()));
  for (int64_t b = 0; b < batch; ++b, next += columns) {
    const int64_t count = accepted.as<int32_t>()[b] + int64_t{1};
    check(1 <= count && count <= width, "num_accepted is less than P");
    const int64_t* before = last.as<int64_t>() + b * columns;
    const int64_t* put_out = output.as<int64_t>() + b * width;
    const int64_t kept = std::max<int64_t>(columns - count, 0);
    std::copy(before + columns - kept, before + columns, next);
    std::copy(put_out + count - (columns - kept), put_out + count, next + kept);
  }
  return out;
}

void commit_kv(Tensor slab_tensor, Tensor source_tensor, Tensor target_tensor,
               Tensor table_tensor) {
  const View slab(slab_tensor.get()), source(source_tensor.get()), target(target_tensor.get()),
      table(table_tensor.get());
  check(slab.dim == 6 && slab.is_contiguous(), "slab is [L, 2, blocks, block_size, HK, D]");
  check_index(table, 2, aoti_torch_dtype_int32(), "block_table is [B, n] int32");
  check(source.dim == 2 && target.dim == 2 && source.sizes[0] == table.sizes[0] &&
            target.sizes[0] == table.sizes[0] && source.sizes[1] == target.sizes[1],
        "source and target are [B, P]");
  const std::vector<int64_t> from = slots_of(source, "source is contiguous, of int32 or int64"),
                             to = slots_of(target, "target is contiguous, of int32 or int64");
  // rows of int8 move as they are, with their scales
  const bool is_int8 = slab.dtype == aoti_torch_dtype_int8();
  const int64_t item = is_int8 ? 1 : to_dtype(slab) == specc::DType::kFloat32 ? 4 : 2;
  const specc::CommitKV a{slab.data, slab.sizes[0] * slab.sizes[1], slab.sizes[2], slab.sizes[3],
                          slab.sizes[4] * slab.sizes[5] * item, table.sizes[0], source.sizes[1],
                          from.data(), to.data(), table.as<int32_t>(), table.sizes[1]};
  specc::check_bounds(a);
  specc::commit_kv(a);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def("tree_expand(Tensor logits, int num_children) -> Tensor");
  library.def(
      "accept_winners(Tensor winners, Tensor tokens, Tensor parents, int max_depth) -> "
      "(Tensor path, Tensor num_accepted, Tensor output_tokens)");
  library.def("commit_kv(Tensor(a!) slab, Tensor source, Tensor target, Tensor block_table) -> ()");
  library.def(
      "tree_rows(Tensor cache_len, Tensor nodes, Tensor depths) -> (Tensor slot, Tensor "
      "position)");
  library.def(
      "commit_rows(Tensor path, Tensor cache_len, Tensor slot_of) -> (Tensor source, Tensor "
      "length)");
  library.def(
      "next_tokens(Tensor last_tokens, Tensor output_tokens, Tensor num_accepted) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("tree_expand", TORCH_BOX(&tree_expand));
  library.impl("accept_winners", TORCH_BOX(&accept_winners));
  library.impl("commit_kv", TORCH_BOX(&commit_kv));
  library.impl("tree_rows", TORCH_BOX(&tree_rows));
  library.impl("commit_rows", TORCH_BOX(&commit_rows));
  library.impl("next_tokens", TORCH_BOX(&next_tokens));
}
