// What a step does between its programs, as operators of tensors.
#include <algorithm>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace specc::operators {
namespace {

// Slots as int64, whatever integers they are.
std::vector<int64_t> slots_of(const Tensor& x, const char* what) {
  check(x.is_contiguous(), what);
  if (x.dtype == kInt64) return {x.as<int64_t>(), x.as<int64_t>() + x.count()};
  check(x.dtype == kInt32, what);
  return {x.as<int32_t>(), x.as<int32_t>() + x.count()};
}

Tensor tree_expand(const Tensor& logits, int64_t num_children) {
  check(logits.dim == 2 && logits.is_dense_row(), "logits is [R, V], rows contiguous");
  check(num_children >= 1 && num_children <= logits.sizes[1], "1 … V children");
  Tensor out(empty({logits.sizes[0], num_children}, kInt64));
  specc::tree_expand({to_dtype(logits), logits.sizes[0], logits.sizes[1], num_children, logits.data,
                      logits.strides[0], out.as<int64_t>()});
  return out;
}

std::tuple<Tensor, Tensor, Tensor> accept_winners(const Tensor& winners, const Tensor& tokens,
                                                  const Tensor& parents, int64_t max_depth) {
  check(is_rows(tokens, kInt64), "tokens is [B, N] int64, rows contiguous");
  check(is_rows(winners, kInt64) && is_same_shape(winners, tokens),
        "winners is [B, N] int64, rows contiguous");
  check(is_rows(parents, kInt32) && is_same_shape(parents, tokens),
        "parents is [B, N] int32, rows contiguous");
  check_count(max_depth, 0, "max_depth");
  const int64_t batch = tokens.sizes[0];
  check(tokens.sizes[1] >= 1, "a tree has a root");
  Tensor path(empty({batch, max_depth + 1}, kInt32)), num_accepted(empty({batch}, kInt32)),
      output(empty({batch, max_depth + 1}, kInt64));
  AcceptWinners a{};
  a.batch = batch;
  a.num_nodes = tokens.sizes[1];
  a.max_depth = max_depth;
  a.winners = winners.as<int64_t>();
  a.winner_stride = winners.strides[0];
  a.tokens = tokens.as<int64_t>();
  a.token_stride = tokens.strides[0];
  a.parents = parents.as<int32_t>();
  a.parent_stride = parents.strides[0];
  a.path = path.as<int32_t>();
  a.num_accepted = num_accepted.as<int32_t>();
  a.output_tokens = output.as<int64_t>();
  specc::accept_winners(a);
  return {path, num_accepted, output};
}

std::tuple<Tensor, Tensor> tree_rows(const Tensor& cache_len, const Tensor& nodes,
                                     const Tensor& depths) {
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  check_index(nodes, 1, kInt32, "nodes is [M] int32");
  check_index(depths, 1, kInt32, "depths is [M] int32");
  check(nodes.sizes[0] == depths.sizes[0], "nodes and depths agree");
  const int64_t batch = cache_len.sizes[0], count = nodes.sizes[0];
  Tensor slot(empty({batch * count}, kInt32)), position(empty({batch * count}, kInt64));
  int32_t* slots = slot.as<int32_t>();
  int64_t* positions = position.as<int64_t>();
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

std::tuple<Tensor, Tensor> commit_rows(const Tensor& path, const Tensor& cache_len,
                                       const Tensor& slot_of) {
  check_index(path, 2, kInt32, "path is [B, P] int32");
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  check(path.sizes[0] == cache_len.sizes[0], "path and cache_len agree");
  const int64_t batch = path.sizes[0], width = path.sizes[1];
  check((slot_of.dim == 1 || (slot_of.dim == 2 && slot_of.sizes[0] == batch)) &&
            slot_of.dtype == kInt32 && slot_of.is_dense_row(),
        "slot_of is [N] or [B, N] int32, rows contiguous");
  const int64_t num_nodes = slot_of.sizes[slot_of.dim - 1];
  const int64_t slot_stride = slot_of.dim == 2 ? slot_of.strides[0] : 0;
  Tensor source(empty({batch, width}, kInt32)), length(empty({batch}, kInt32));
  int32_t* sources = source.as<int32_t>();
  int32_t* lengths = length.as<int32_t>();
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

Tensor next_tokens(const Tensor& last, const Tensor& output, const Tensor& accepted) {
  check_index(last, 2, kInt64, "last_tokens is [B, C] int64");
  check_index(output, 2, kInt64, "output_tokens is [B, P] int64");
  check_index(accepted, 1, kInt32, "num_accepted is [B] int32");
  const int64_t batch = last.sizes[0], columns = last.sizes[1], width = output.sizes[1];
  check(output.sizes[0] == batch && accepted.sizes[0] == batch,
        "last_tokens, output_tokens and num_accepted agree");
  check(columns >= 1, "last_tokens has 1 column or more");
  Tensor out(empty({batch, columns}, kInt64));
  int64_t* next = out.as<int64_t>();
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

void commit_kv(const Tensor& slab, const Tensor& source, const Tensor& target, const Tensor& table) {
  check(slab.dim == 6 && slab.is_contiguous(), "slab is [L, 2, blocks, block_size, HK, D]");
  check_index(table, 2, kInt32, "block_table is [B, n] int32");
  check(source.dim == 2 && target.dim == 2 && source.sizes[0] == table.sizes[0] &&
            target.sizes[0] == table.sizes[0] && source.sizes[1] == target.sizes[1],
        "source and target are [B, P]");
  const std::vector<int64_t> from = slots_of(source, "source is contiguous, of int32 or int64"),
                             to = slots_of(target, "target is contiguous, of int32 or int64");
  // rows of int8 move as they are, with their scales
  if (slab.dtype != kInt8) to_dtype(slab);
  const int64_t item = bytes_of(slab.dtype);
  check_apart(slab, {&table});
  const CommitKV a{slab.data, slab.sizes[0] * slab.sizes[1], slab.sizes[2], slab.sizes[3],
                   slab.sizes[4] * slab.sizes[5] * item, table.sizes[0], source.sizes[1],
                   from.data(), to.data(), table.as<int32_t>(), table.sizes[1]};
  check_bounds(a);
  specc::commit_kv(a);
}

}  // namespace

SPECC_OPERATOR("specc::tree_expand", tree_expand);
SPECC_OPERATOR("specc::accept_winners", accept_winners);
SPECC_OPERATOR("specc::commit_kv", commit_kv);
SPECC_OPERATOR("specc::tree_rows", tree_rows);
SPECC_OPERATOR("specc::commit_rows", commit_rows);
SPECC_OPERATOR("specc::next_tokens", next_tokens);

}  // namespace specc::operators
