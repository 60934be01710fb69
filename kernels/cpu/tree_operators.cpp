// Trees that come as data, and the history of tokens, as operators of tensors.
#include <tuple>

#include "tensors.h"

namespace specc::operators {
namespace {

void check_tree(const Tensor& tokens, const Tensor& parents) {
  check(is_rows(tokens, kInt64), "tokens is [B, N] int64, rows contiguous");
  check(is_rows(parents, kInt32) && is_same_shape(tokens, parents),
        "parents is [B, N] int32, rows contiguous");
  check(tokens.sizes[1] >= 1, "a tree has a root");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_trees(const Tensor& tokens, const Tensor& parents,
                                                       const Tensor& start) {
  check_tree(tokens, parents);
  check_index(start, 1, kInt32, "start is [S + 1] int32");
  const int64_t batch = tokens.sizes[0], total = tokens.sizes[1], num_trees = start.sizes[0] - 1;
  check(num_trees >= 1 && num_trees <= total, "1 … T trees");
  MergeTrees a{batch,
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
  check_bounds(a);
  Tensor merged(empty({batch, a.nodes()}, kInt64)), above(empty({batch, a.nodes()}, kInt32)),
      image(empty({batch, total}, kInt32)), count(empty({batch, a.nodes()}, kInt32));
  a.out_tokens = merged.as<int64_t>();
  a.out_parents = above.as<int32_t>();
  a.image = image.as<int32_t>();
  a.count = count.as<int32_t>();
  specc::merge_trees(a);
  return {merged, above, image, count};
}

std::tuple<Tensor, Tensor, Tensor> rerank_tree(const Tensor& tokens, const Tensor& parents,
                                               const Tensor& scores, int64_t num_nodes) {
  check_tree(tokens, parents);
  check(is_rows(scores, kFloat32) && is_same_shape(tokens, scores),
        "scores is [B, M] float32, rows contiguous");
  const int64_t batch = tokens.sizes[0], num_candidates = tokens.sizes[1];
  check(num_nodes >= 1 && num_nodes <= num_candidates, "1 … M nodes");
  Tensor best(empty({batch, num_nodes}, kInt64)), above(empty({batch, num_nodes}, kInt32)),
      kept(empty({batch, num_nodes}, kInt32));
  specc::rerank_tree({batch, num_candidates, num_nodes, tokens.as<int64_t>(), tokens.strides[0],
                      parents.as<int32_t>(), parents.strides[0], scores.as<float>(),
                      scores.strides[0], best.as<int64_t>(), above.as<int32_t>(),
                      kept.as<int32_t>()});
  return {best, above, kept};
}

std::tuple<Tensor, Tensor> ancestor_words(const Tensor& parents) {
  check(is_rows(parents, kInt32), "parents is [B, N] int32, rows contiguous");
  const int64_t batch = parents.sizes[0], num_nodes = parents.sizes[1];
  check(num_nodes >= 1, "a tree has a root");
  check_count(num_nodes, 1, "N");
  const int64_t num_words = (num_nodes + 63) / 64;
  Tensor words(empty({batch * num_nodes, num_words}, kInt64)),
      depths(empty({batch * num_nodes}, kInt32));
  specc::ancestor_words({batch, num_nodes, num_words, parents.as<int32_t>(), parents.strides[0],
                         words.as<int64_t>(), depths.as<int32_t>()});
  return {words, depths};
}

Tensor image_slots(const Tensor& image, const Tensor& slots, int64_t num_nodes) {
  check(is_rows(image, kInt32), "image is [B, T] int32, rows contiguous");
  const int64_t batch = image.sizes[0], num_own = image.sizes[1];
  check((slots.dim == 1 || (slots.dim == 2 && slots.sizes[0] == batch)) && slots.dtype == kInt32 &&
            slots.is_dense_row() && slots.sizes[slots.dim - 1] == num_own,
        "slots is [T] or [B, T] int32, rows contiguous");
  check(num_nodes >= 1, "a tree has a root");
  check_count(num_nodes, 1, "num_nodes");
  Tensor rows(empty({batch, num_nodes}, kInt32));
  specc::image_slots({batch, num_own, num_nodes, image.as<int32_t>(), image.strides[0],
                      slots.as<int32_t>(), slots.dim == 2 ? slots.strides[0] : 0,
                      rows.as<int32_t>()});
  return rows;
}

Tensor vote_chain(const Tensor& tokens, const Tensor& weights) {
  check_index(tokens, 3, kInt64, "tokens is [B, S, L] int64, contiguous");
  check_index(weights, 2, kFloat32, "weights is [B, S] float32, contiguous");
  check(is_same_shape(tokens, weights), "tokens and weights agree");
  const int64_t batch = tokens.sizes[0], length = tokens.sizes[2];
  Tensor chain(empty({batch, length}, kInt64));
  specc::vote_chain({batch, tokens.sizes[1], length, tokens.as<int64_t>(), weights.as<float>(),
                     chain.as<int64_t>()});
  return chain;
}

History history_of(const Tensor& history, const Tensor& table, const Tensor& cache_len) {
  check_index(history, 2, kInt32, "history is [blocks, block_size] int32");
  check_index(table, 2, kInt32, "block_table is [B, n] int32");
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  check(table.sizes[0] == cache_len.sizes[0], "block_table and cache_len agree");
  check(history.sizes[1] >= 1, "a block has 1 row or more");
  return {history.as<int32_t>(), history.sizes[0], history.sizes[1], table.as<int32_t>(),
          table.sizes[1],        table.sizes[0],   cache_len.as<int32_t>()};
}

void check_last_tokens(const Tensor& last, const History& history) {
  check_index(last, 2, kInt64, "last_tokens is [B, C] int64");
  check(last.sizes[0] == history.batch && last.sizes[1] >= 1,
        "last_tokens has B rows, and 1 column or more");
}

std::tuple<Tensor, Tensor> lookup(const Tensor& history, const Tensor& table,
                                  const Tensor& cache_len, const Tensor& last, int64_t ngram,
                                  int64_t num_tokens) {
  Lookup a{};
  a.history = history_of(history, table, cache_len);
  check_last_tokens(last, a.history);
  check(ngram >= 1, "ngram is 1 or more");
  check_count(num_tokens, 1, "num_tokens");
  a.last_tokens = last.as<int64_t>();
  a.num_last = last.sizes[1];
  a.ngram = ngram;
  a.num_tokens = num_tokens;
  check_bounds(a);
  Tensor tokens(empty({a.history.batch, num_tokens + 1}, kInt64)),
      parents(empty({a.history.batch, num_tokens + 1}, kInt32));
  a.tokens = tokens.as<int64_t>();
  a.parents = parents.as<int32_t>();
  specc::lookup(a);
  return {tokens, parents};
}

void record_tokens(const Tensor& history, const Tensor& table, const Tensor& cache_len,
                   const Tensor& last, const Tensor& output, const Tensor& accepted) {
  RecordTokens a{};
  a.history = history_of(history, table, cache_len);
  check_last_tokens(last, a.history);
  check_index(output, 2, kInt64, "output_tokens is [B, P] int64");
  check_index(accepted, 1, kInt32, "num_accepted is [B] int32");
  check(output.sizes[0] == a.history.batch && accepted.sizes[0] == a.history.batch,
        "output_tokens, num_accepted and cache_len agree");
  check_apart(history, {&table, &cache_len, &accepted});
  a.last_tokens = last.as<int64_t>();
  a.num_last = last.sizes[1];
  a.output_tokens = output.as<int64_t>();
  a.width = output.sizes[1];
  a.num_accepted = accepted.as<int32_t>();
  check_bounds(a);
  specc::record_tokens(a);
}

}  // namespace

SPECC_OPERATOR("specc::merge_trees", merge_trees);
SPECC_OPERATOR("specc::rerank_tree", rerank_tree);
SPECC_OPERATOR("specc::ancestor_words", ancestor_words);
SPECC_OPERATOR("specc::image_slots", image_slots);
SPECC_OPERATOR("specc::vote_chain", vote_chain);
SPECC_OPERATOR("specc::lookup", lookup);
SPECC_OPERATOR("specc::record_tokens", record_tokens);

}  // namespace specc::operators
