// What a step does under sampling rules, as operators of tensors.
#include <tuple>
#include <vector>

#include "filters.h"
#include "sampling.h"
#include "tensors.h"

namespace specc::operators {
namespace {

SamplingRows sampling_of(const Tensor& values, const Tensor& words, int64_t batch) {
  check_index(values, 2, kFloat32, "values is [B, 6] float32");
  check_index(words, 2, kInt64, "words is [B, 4] int64");
  check(values.sizes[0] == batch && values.sizes[1] == kNumValues &&
            words.sizes[0] == batch && words.sizes[1] == kNumWords,
        "values is [B, 6], words is [B, 4]");
  return {values.as<float>(), words.as<int64_t>()};
}

std::tuple<Tensor, Tensor> draft_children(const Tensor& logits, int64_t num_children,
                                          const Tensor& cache_len, const Tensor& columns,
                                          int64_t depth, const Tensor& values, const Tensor& words,
                                          bool scored) {
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  check_index(columns, 1, kInt32, "columns is [F] int32");
  const int64_t batch = cache_len.sizes[0], frontier = columns.sizes[0];
  check(logits.dim == 2 && logits.is_dense_row() && logits.sizes[0] == batch * frontier,
        "logits is [B * F, V], rows contiguous");
  check(num_children >= 1 && num_children <= logits.sizes[1], "1 … V children");
  check_count(depth, 0, "depth");
  DraftChildren a{};
  a.logits = {to_dtype(logits), logits.data, logits.strides[0], frontier};
  a.batch = batch;
  a.vocab = logits.sizes[1];
  a.num_children = num_children;
  a.cache_len = cache_len.as<int32_t>();
  a.columns = columns.as<int32_t>();
  a.depth = depth;
  a.sampling = sampling_of(values, words, batch);
  check_bounds(a);
  Tensor tokens(empty({batch * frontier, num_children}, kInt64)),
      scores(empty({batch * frontier, scored ? num_children : 0}, kFloat32));
  a.tokens = tokens.as<int64_t>();
  a.scores = scored ? scores.as<float>() : nullptr;
  specc::draft_children(a);
  return {tokens, scores};
}

// Trees [B, N], and target logits [B * T, V] of T nodes of each.
template <typename Args>
void set_trees(Args& a, const Tensor& logits, const Tensor& tokens, const Tensor& parents) {
  check(is_rows(tokens, kInt64), "tokens is [B, N] int64, rows contiguous");
  const int64_t batch = tokens.sizes[0], num_nodes = tokens.sizes[1];
  check(logits.dim == 2 && logits.is_dense_row() &&
            (batch > 0 ? logits.sizes[0] % batch == 0 : logits.sizes[0] == 0),
        "logits is [B * N, V], rows contiguous");
  check(is_rows(parents, kInt32) && parents.sizes[0] == batch && parents.sizes[1] == num_nodes,
        "parents is [B, N] int32, rows contiguous");
  check(num_nodes >= 1 && logits.sizes[1] >= 1, "a tree has a root, logits have 1 token or more");
  a.logits = {to_dtype(logits), logits.data, logits.strides[0],
              batch > 0 ? logits.sizes[0] / batch : 0};
  a.num_nodes = num_nodes;
  a.vocab = logits.sizes[1];
  a.tokens = tokens.as<int64_t>();
  a.token_stride = tokens.strides[0];
  a.parents = parents.as<int32_t>();
  a.parent_stride = parents.strides[0];
}

// Sampling options and history of the batch.
template <typename Args>
void set_rows(Args& a, const Tensor& values, const Tensor& words, const Tensor& cache_len,
              const Tensor& history, const Tensor& table) {
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  check_index(history, 2, kInt32, "history is [blocks, block_size] int32");
  check_index(table, 2, kInt32, "block_table is [B, n] int32");
  const int64_t batch = cache_len.sizes[0];
  check(table.sizes[0] == batch, "tokens, cache_len and block_table agree");
  check(history.sizes[1] >= 1, "a block has 1 row or more");
  a.sampling = sampling_of(values, words, batch);
  a.history = {history.as<int32_t>(), history.sizes[0], history.sizes[1], table.as<int32_t>(),
               table.sizes[1],        batch,            cache_len.as<int32_t>()};
}

std::vector<Logits> drafts_of(Tensors draft_logits, int64_t batch, int64_t vocab) {
  std::vector<Logits> drafts;
  for (const Tensor& logits : draft_logits) {
    check(logits.dim == 2 && logits.is_dense_row() && logits.sizes[1] == vocab &&
              (batch > 0 ? logits.sizes[0] % batch == 0 : logits.sizes[0] == 0),
          "draft_logits are [B * F, V], rows contiguous");
    drafts.push_back({to_dtype(logits), logits.data, logits.strides[0],
                      batch > 0 ? logits.sizes[0] / batch : 0});
  }
  return drafts;
}

std::tuple<Tensor, Tensor, Tensor> accept(const Tensor& logits, const Tensor& tokens,
                                          const Tensor& parents, int64_t max_depth,
                                          const Tensor* image, const Tensor* q_rows,
                                          Tensors draft_logits, const Tensor& values,
                                          const Tensor& words, const Tensor& cache_len,
                                          const Tensor& history, const Tensor& table) {
  Accept a{};
  set_trees(a, logits, tokens, parents);
  set_rows(a, values, words, cache_len, history, table);
  check(a.history.batch == tokens.sizes[0], "tokens, cache_len and block_table agree");
  const int64_t batch = tokens.sizes[0], num_nodes = a.num_nodes;
  check(a.logits.rows_per_sequence == num_nodes || batch == 0,
        "logits is [B * N, V], rows contiguous");
  check_count(max_depth, 0, "max_depth");
  a.max_depth = max_depth;
  a.num_columns = num_nodes;
  if (image != nullptr) {
    check(is_rows(*image, kInt32) && image->sizes[0] == batch,
          "image is [B, T] int32, rows contiguous");
    a.num_columns = image->sizes[1];
    a.image = image->as<int32_t>();
    a.image_stride = image->strides[0];
  }
  if (q_rows != nullptr) {
    check_index(*q_rows, 1, kInt32, "q_rows is [T] int32");
    check(q_rows->sizes[0] == a.num_columns, "q_rows has an entry for each column");
    a.q_rows = q_rows->as<int32_t>();
  }
  a.drafts = drafts_of(draft_logits, batch, a.vocab);
  check_bounds(a);
  Tensor path(empty({batch, max_depth + 1}, kInt32)), num_accepted(empty({batch}, kInt32)),
      output(empty({batch, max_depth + 1}, kInt64));
  a.path = path.as<int32_t>();
  a.num_accepted = num_accepted.as<int32_t>();
  a.output_tokens = output.as<int64_t>();
  specc::accept(a);
  return {path, num_accepted, output};
}

Tensor node_winners(const Tensor& logits, const Tensor& tokens, const Tensor& parents,
                    int64_t first_node, const Tensor& values, const Tensor& words,
                    const Tensor& cache_len, const Tensor& history, const Tensor& table) {
  NodeWinners a{};
  set_trees(a, logits, tokens, parents);
  set_rows(a, values, words, cache_len, history, table);
  check(a.history.batch == tokens.sizes[0], "tokens, cache_len and block_table agree");
  check(first_node >= 0 && first_node <= a.num_nodes - a.logits.rows_per_sequence,
        "first_node is 0 … N - T");
  a.first_node = first_node;
  check_bounds(a);
  Tensor winners(empty({logits.sizes[0]}, kInt64));
  a.winners = winners.as<int64_t>();
  specc::node_winners(a);
  return winners;
}

std::tuple<Tensor, Tensor> column_winners(const Tensor& logits, const Tensor& temperature,
                                          const Tensor& seeds, const Tensor& positions,
                                          int64_t first, int64_t vocab_size) {
  check(logits.dim == 2 && logits.is_dense_row(), "logits is [R, C], rows contiguous");
  check_index(temperature, 1, kFloat32, "temperature is [R] float32");
  check_index(seeds, 1, kInt64, "seeds is [R] int64");
  check_index(positions, 1, kInt64, "positions is [R] int64");
  const int64_t rows = logits.sizes[0];
  check(temperature.sizes[0] == rows && seeds.sizes[0] == rows && positions.sizes[0] == rows,
        "temperature, seeds and positions have an entry for each row");
  // tokens are numbers of 32 bits in the noise
  check(first >= 0 && is_i32(first) && is_i32(logits.sizes[1]) &&
            is_i32(first + logits.sizes[1]) && vocab_size >= 1 && is_i32(vocab_size),
        "first is 0 or more, vocab_size is 1 or more");
  Tensor scores(empty({rows}, kFloat32)), tokens(empty({rows}, kInt64));
  specc::column_winners({{to_dtype(logits), logits.data, logits.strides[0], 1},
                         rows,
                         logits.sizes[1],
                         temperature.as<float>(),
                         seeds.as<int64_t>(),
                         positions.as<int64_t>(),
                         first,
                         vocab_size,
                         scores.as<float>(),
                         tokens.as<int64_t>()});
  return {scores, tokens};
}

}  // namespace

SPECC_OPERATOR("specc::draft_children", draft_children);
SPECC_OPERATOR("specc::accept", accept);
SPECC_OPERATOR("specc::node_winners", node_winners);
SPECC_OPERATOR("specc::column_winners", column_winners);

}  // namespace specc::operators
