// Binds trees that come as data, and the history of tokens, to the operators of kernels/ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "kernels.h"
#include "tensors.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

void check_tree(const View& tokens, const View& parents) {
  check(is_rows(tokens, i64()), "tokens is [B, N] int64, rows contiguous");
  check(is_rows(parents, i32()) && is_same_shape(tokens, parents),
        "parents is [B, N] int32, rows contiguous");
  check(tokens.sizes[1] >= 1, "a tree has a root");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_trees(Tensor tokens_tensor, Tensor parents_tensor,
                                                       Tensor start_tensor) {
  const View tokens(tokens_tensor.get()), parents(parents_tensor.get()), start(start_tensor.get());
  check_tree(tokens, parents);
  check_index(start, 1, i32(), "start is [S + 1] int32");
  const int64_t batch = tokens.sizes[0], total = tokens.sizes[1], num_trees = start.sizes[0] - 1;
  check(num_trees >= 1 && num_trees <= total, "1 … T trees");
  specc::MergeTrees a{batch,
                      total,
                      num_trees,
                      tokens.as<int64_t>(),
                      tokens.strides[0],
                      parents.as<int32_t>(),
                      parents.strides[0],
                      start.as<int32_t>(),
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};
  specc::check_bounds(a);
  Tensor merged(empty({batch, a.nodes()}, i64())), above(empty({batch, a.nodes()}, i32())),
      image(empty({batch, total}, i32())), count(empty({batch, a.nodes()}, i32()));
  a.out_tokens = out<int64_t>(merged);
  a.out_parents = out<int32_t>(above);
  a.image = out<int32_t>(image);
  a.count = out<int32_t>(count);
  specc::merge_trees(a);
  return {merged, above, image, count};
}

std::tuple<Tensor, Tensor, Tensor> rerank_tree(Tensor tokens_tensor, Tensor parents_tensor,
                                               Tensor scores_tensor, int64_t num_nodes) {
  const View tokens(tokens_tensor.get()), parents(parents_tensor.get()),
      scores(scores_tensor.get());
  check_tree(tokens, parents);
  check(is_rows(scores, aoti_torch_dtype_float32()) && is_same_shape(tokens, scores),
        "scores is [B, M] float32, rows contiguous");
  const int64_t batch = tokens.sizes[0], num_candidates = tokens.sizes[1];
  check(num_nodes >= 1 && num_nodes <= num_candidates, "1 … M nodes");
  Tensor best(empty({batch, num_nodes}, i64())), above(empty({batch, num_nodes}, i32())),
      kept(empty({batch, num_nodes}, i32()));
  specc::rerank_tree({batch, num_candidates, num_nodes, tokens.as<int64_t>(), tokens.strides[0],
                      parents.as<int32_t>(), parents.strides[0], scores.as<float>(),
                      scores.strides[0], out<int64_t>(best), out<int32_t>(above),
                      out<int32_t>(kept)});
  return {best, above, kept};
}

std::tuple<Tensor, Tensor> ancestor_words(Tensor parents_tensor) {
  const View parents(parents_tensor.get());
  check(is_rows(parents, i32()), "parents is [B, N] int32, rows contiguous");
  const int64_t batch = parents.sizes[0], num_nodes = parents.sizes[1];
  check(num_nodes >= 1, "a tree has a root");
  check_count(num_nodes, 1, "N");
  const int64_t num_words = (num_nodes + 63) / 64;
  Tensor words(empty({batch * num_nodes, num_words}, i64())),
      depths(empty({batch * num_nodes}, i32()));
  specc::ancestor_words({batch, num_nodes, num_words, parents.as<int32_t>(), parents.strides[0],
                         out<int64_t>(words), out<int32_t>(depths)});
  return {words, depths};
}

Tensor image_slots(Tensor image_tensor, Tensor slots_tensor, int64_t num_nodes) {
  const View image(image_tensor.get()), slots(slots_tensor.get());
  check(is_rows(image, i32()), "image is [B, T] int32, rows contiguous");
  const int64_t batch = image.sizes[0], num_own = image.sizes[1];
  check((slots.dim == 1 || (slots.dim == 2 && slots.sizes[0] == batch)) && slots.dtype == i32() &&
            slots.is_dense_row() && slots.sizes[slots.dim - 1] == num_own,
        "slots is [T] or [B, T] int32, rows contiguous");
  check(num_nodes >= 1, "a tree has a root");
  check_count(num_nodes, 1, "num_nodes");
  Tensor rows(empty({batch, num_nodes}, i32()));
  specc::image_slots({batch, num_own, num_nodes, image.as<int32_t>(), image.strides[0],
                      slots.as<int32_t>(), slots.dim == 2 ? slots.strides[0] : 0,
                      out<int32_t>(rows)});
  return rows;
}

Tensor vote_chain(Tensor tokens_tensor, Tensor weights_tensor) {
  const View tokens(tokens_tensor.get()), weights(weights_tensor.get());
  check_index(tokens, 3, i64(), "tokens is [B, S, L] int64, contiguous");
  check_index(weights, 2, aoti_torch_dtype_float32(), "weights is [B, S] float32, contiguous");
  check(is_same_shape(tokens, weights), "tokens and weights agree");
  const int64_t batch = tokens.sizes[0], length = tokens.sizes[2];
  Tensor chain(empty({batch, length}, i64()));
  specc::vote_chain({batch, tokens.sizes[1], length, tokens.as<int64_t>(), weights.as<float>(),
                     out<int64_t>(chain)});
  return chain;
}

specc::History history_of(const View& history, const View& table, const View& cache_len) {
  check_index(history, 2, i32(), "history is [blocks, block_size] int32");
  check_index(table, 2, i32(), "block_table is [B, n] int32");
  check_index(cache_len, 1, i32(), "cache_len is [B] int32");
  check(table.sizes[0] == cache_len.sizes[0], "block_table and cache_len agree");
  check(history.sizes[1] >= 1, "a block has 1 row or more");
  return {history.as<int32_t>(), history.sizes[0], history.sizes[1], table.as<int32_t>(),
          table.sizes[1],        table.sizes[0],   cache_len.as<int32_t>()};
}

void check_last_tokens(const View& last, const specc::History& history) {
  check_index(last, 2, i64(), "last_tokens is [B, C] int64");
  check(last.sizes[0] == history.batch && last.sizes[1] >= 1,
        "last_tokens has B rows, and 1 column or more");
}

std::tuple<Tensor, Tensor> lookup(Tensor history_tensor, Tensor table_tensor,
                                  Tensor cache_len_tensor, Tensor last_tensor, int64_t ngram,
                                  int64_t num_tokens) {
  const View history(history_tensor.get()), table(table_tensor.get()),
      cache_len(cache_len_tensor.get()), last(last_tensor.get());
  specc::Lookup a{};
  a.history = history_of(history, table, cache_len);
  check_last_tokens(last, a.history);
  check(ngram >= 1, "ngram is 1 or more");
  check_count(num_tokens, 1, "num_tokens");
  a.last_tokens = last.as<int64_t>();
  a.num_last = last.sizes[1];
  a.ngram = ngram;
  a.num_tokens = num_tokens;
  specc::check_bounds(a);
  Tensor tokens(empty({a.history.batch, num_tokens + 1}, i64())),
      parents(empty({a.history.batch, num_tokens + 1}, i32()));
  a.tokens = out<int64_t>(tokens);
  a.parents = out<int32_t>(parents);
  specc::lookup(a);
  return {tokens, parents};
}

void record_tokens(Tensor history_tensor, Tensor table_tensor, Tensor cache_len_tensor,
                   Tensor last_tensor, Tensor output_tensor, Tensor accepted_tensor) {
  const View history(history_tensor.get()), table(table_tensor.get()),
      cache_len(cache_len_tensor.get()), last(last_tensor.get()), output(output_tensor.get()),
      accepted(accepted_tensor.get());
  specc::RecordTokens a{};
  a.history = history_of(history, table, cache_len);
  check_last_tokens(last, a.history);
  check_index(output, 2, i64(), "output_tokens is [B, P] int64");
  check_index(accepted, 1, i32(), "num_accepted is [B] int32");
  check(output.sizes[0] == a.history.batch && accepted.sizes[0] == a.history.batch,
        "output_tokens, num_accepted and cache_len agree");
  a.last_tokens = last.as<int64_t>();
  a.num_last = last.sizes[1];
  a.output_tokens = output.as<int64_t>();
  a.width = output.sizes[1];
  a.num_accepted = accepted.as<int32_t>();
  specc::check_bounds(a);
  specc::record_tokens(a);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def(
      "merge_trees(Tensor tokens, Tensor parents, Tensor start) -> (Tensor tokens, Tensor parents, "
      "Tensor image, Tensor count)");
  library.def(
      "rerank_tree(Tensor tokens, Tensor parents, Tensor scores, int num_nodes) -> (Tensor tokens, "
      "Tensor parents, Tensor kept)");
  library.def("ancestor_words(Tensor parents) -> (Tensor words, Tensor depths)");
  library.def("image_slots(Tensor image, Tensor slots, int num_nodes) -> Tensor");
  library.def("vote_chain(Tensor tokens, Tensor weights) -> Tensor");
  library.def(
      "lookup(Tensor history, Tensor block_table, Tensor cache_len, Tensor last_tokens, int ngram, "
      "int num_tokens) -> (Tensor tokens, Tensor parents)");
  library.def(
      "record_tokens(Tensor(a!) history, Tensor block_table, Tensor cache_len, Tensor last_tokens, "
      "Tensor output_tokens, Tensor num_accepted) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("merge_trees", TORCH_BOX(&merge_trees));
  library.impl("rerank_tree", TORCH_BOX(&rerank_tree));
  library.impl("ancestor_words", TORCH_BOX(&ancestor_words));
  library.impl("image_slots", TORCH_BOX(&image_slots));
  library.impl("vote_chain", TORCH_BOX(&vote_chain));
  library.impl("lookup", TORCH_BOX(&lookup));
  library.impl("record_tokens", TORCH_BOX(&record_tokens));
}
