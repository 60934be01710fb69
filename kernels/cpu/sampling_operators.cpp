// Binds what a step does under sampling rules to the operators of kernels/ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "filters.h"
#include "sampling.h"
#include "tensors.h"

using torch::stable::Tensor;
using namespace specc::tensors;

namespace {

specc::SamplingRows sampling_of(const View& values, const View& words, int64_t batch) {
  check_index(values, 2, aoti_torch_dtype_float32(), "values is [B, 6] float32");
  check_index(words, 2, i64(), "words is [B, 4] int64");
  check(values.sizes[0] == batch && values.sizes[1] == specc::kNumValues &&
            words.sizes[0] == batch && words.sizes[1] == specc::kNumWords,
        "values is [B, 6], words is [B, 4]");
  return {values.as<float>(), words.as<int64_t>()};
}

std::tuple<Tensor, Tensor> draft_children(Tensor logits_tensor, int64_t num_children,
                                          Tensor cache_len_tensor, Tensor columns_tensor,
                                          int64_t depth, Tensor values_tensor, Tensor words_tensor,
                                          bool scored) {
  const View logits(logits_tensor.get()), cache_len(cache_len_tensor.get()),
      columns(columns_tensor.get()), values(values_tensor.get()), words(words_tensor.get());
  check_index(cache_len, 1, i32(), "cache_len is [B] int32");
  check_index(columns, 1, i32(), "columns is [F] int32");
  const int64_t batch = cache_len.sizes[0], frontier = columns.sizes[0];
  check(logits.dim == 2 && logits.is_dense_row() && logits.sizes[0] == batch * frontier,
        "logits is [B * F, V], rows contiguous");
  check(num_children >= 1 && num_children <= logits.sizes[1], "1 … V children");
  check_count(depth, 0, "depth");
  specc::DraftChildren a{};
  a.logits = {to_dtype(logits), logits.data, logits.strides[0], frontier};
  a.batch = batch;
  a.vocab = logits.sizes[1];
  a.num_children = num_children;
  a.cache_len = cache_len.as<int32_t>();
  a.columns = columns.as<int32_t>();
  a.depth = depth;
  a.sampling = sampling_of(values, words, batch);
  specc::check_bounds(a);
  Tensor tokens(empty({batch * frontier, num_children}, i64())),
      scores(empty({batch * frontier, scored ? num_children : 0}, aoti_torch_dtype_float32()));
  a.tokens = out<int64_t>(tokens);
  a.scores = scored ? out<float>(scores) : nullptr;
  specc::draft_children(a);
  return {tokens, scores};
}

// Trees [B, N], and target logits [B * T, V] of T nodes of each.
template <typename Args>
void set_trees(Args& a, const View& logits, const View& tokens, const View& parents) {
  check(is_rows(tokens, i64()), "tokens is [B, N] int64, rows contiguous");
  const int64_t batch = tokens.sizes[0], num_nodes = tokens.sizes[1];
  check(logits.dim == 2 && logits.is_dense_row() &&
            (batch > 0 ? logits.sizes[0] % batch == 0 : logits.sizes[0] == 0),
        "logits is [B * N, V], rows contiguous");
  check(is_rows(parents, i32()) && parents.sizes[0] == batch && parents.sizes[1] == num_nodes,
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
void set_rows(Args& a, const View& values, const View& words, const View& cache_len,
              const View& history, const View& table) {
  check_index(cache_len, 1, i32(), "cache_len is [B] int32");
  check_index(history, 2, i32(), "history is [blocks, block_size] int32");
  check_index(table, 2, i32(), "block_table is [B, n] int32");
  const int64_t batch = cache_len.sizes[0];
  check(table.sizes[0] == batch, "tokens, cache_len and block_table agree");
  check(history.sizes[1] >= 1, "a block has 1 row or more");
  a.sampling = sampling_of(values, words, batch);
  a.history = {history.as<int32_t>(), history.sizes[0], history.sizes[1], table.as<int32_t>(),
               table.sizes[1],        batch,            cache_len.as<int32_t>()};
}

std::vector<specc::Logits> drafts_of(const std::vector<Tensor>& tensors, int64_t batch,
                                     int64_t vocab) {
  std::vector<specc::Logits> drafts;
  for (const Tensor& tensor : tensors) {
    const View logits(tensor.get());
    check(logits.dim == 2 && logits.is_dense_row() && logits.sizes[1] == vocab &&
              (batch > 0 ? logits.sizes[0] % batch == 0 : logits.sizes[0] == 0),
          "draft_logits are [B * F, V], rows contiguous");
    drafts.push_back({to_dtype(logits), logits.data, logits.strides[0],
                      batch > 0 ? logits.sizes[0] / batch : 0});
  }
  return drafts;
}

std::tuple<Tensor, Tensor, Tensor> accept(Tensor logits_tensor, Tensor tokens_tensor,
                                          Tensor parents_tensor, int64_t max_depth,
                                          std::optional<Tensor> image_tensor,
                                          std::optional<Tensor> q_rows_tensor,
                                          std::vector<Tensor> draft_tensors, Tensor values_tensor,
                                          Tensor words_tensor, Tensor cache_len_tensor,
                                          Tensor history_tensor, Tensor table_tensor) {
  const View logits(logits_tensor.get()), tokens(tokens_tensor.get()),
      parents(parents_tensor.get()), values(values_tensor.get()), words(words_tensor.get()),
      cache_len(cache_len_tensor.get()), history(history_tensor.get()),
      table(table_tensor.get());
  specc::Accept a{};
  set_trees(a, logits, tokens, parents);
  set_rows(a, values, words, cache_len, history, table);
  check(a.history.batch == tokens.sizes[0], "tokens, cache_len and block_table agree");
  const int64_t batch = tokens.sizes[0], num_nodes = a.num_nodes;
  check(a.logits.rows_per_sequence == num_nodes || batch == 0,
        "logits is [B * N, V], rows contiguous");
  check_count(max_depth, 0, "max_depth");
  a.max_depth = max_depth;
  a.num_columns = num_nodes;
  if (image_tensor.has_value()) {
    const View image(image_tensor->get());
    check(is_rows(image, i32()) && image.sizes[0] == batch,
          "image is [B, T] int32, rows contiguous");
    a.num_columns = image.sizes[1];
    a.image = image.as<int32_t>();
    a.image_stride = image.strides[0];
  }
  if (q_rows_tensor.has_value()) {
    const View q_rows(q_rows_tensor->get());
    check_index(q_rows, 1, i32(), "q_rows is [T] int32");
    check(q_rows.sizes[0] == a.num_columns, "q_rows has an entry for each column");
    a.q_rows = q_rows.as<int32_t>();
  }
  a.drafts = drafts_of(draft_tensors, batch, a.vocab);
  specc::check_bounds(a);
  Tensor path(empty({batch, max_depth + 1}, i32())), num_accepted(empty({batch}, i32())),
      output(empty({batch, max_depth + 1}, i64()));
  a.path = out<int32_t>(path);
  a.num_accepted = out<int32_t>(num_accepted);
  a.output_tokens = out<int64_t>(output);
  specc::accept(a);
  return {path, num_accepted, output};
}

Tensor node_winners(Tensor logits_tensor, Tensor tokens_tensor, Tensor parents_tensor,
                    int64_t first_node, Tensor values_tensor, Tensor words_tensor,
                    Tensor cache_len_tensor, Tensor history_tensor, Tensor table_tensor) {
  const View logits(logits_tensor.get()), tokens(tokens_tensor.get()),
      parents(parents_tensor.get()), values(values_tensor.get()), words(words_tensor.get()),
      cache_len(cache_len_tensor.get()), history(history_tensor.get()), table(table_tensor.get());
  specc::NodeWinners a{};
  set_trees(a, logits, tokens, parents);
  set_rows(a, values, words, cache_len, history, table);
  check(a.history.batch == tokens.sizes[0], "tokens, cache_len and block_table agree");
  check(first_node >= 0 && first_node <= a.num_nodes - a.logits.rows_per_sequence,
        "first_node is 0 … N - T");
  a.first_node = first_node;
  specc::check_bounds(a);
  Tensor winners(empty({logits.sizes[0]}, i64()));
  a.winners = out<int64_t>(winners);
  specc::node_winners(a);
  return winners;
}

std::tuple<Tensor, Tensor> column_winners(Tensor logits_tensor, Tensor temperature_tensor,
                                          Tensor seeds_tensor, Tensor positions_tensor,
                                          int64_t first, int64_t vocab_size) {
  const View logits(logits_tensor.get()), temperature(temperature_tensor.get()),
      seeds(seeds_tensor.get()), positions(positions_tensor.get());
  check(logits.dim == 2 && logits.is_dense_row(), "logits is [R, C], rows contiguous");
  check_index(temperature, 1, aoti_torch_dtype_float32(), "temperature is [R] float32");
  check_index(seeds, 1, i64(), "seeds is [R] int64");
  check_index(positions, 1, i64(), "positions is [R] int64");
  const int64_t rows = logits.sizes[0];
  check(temperature.sizes[0] == rows && seeds.sizes[0] == rows && positions.sizes[0] == rows,
        "temperature, seeds and positions have an entry for each row");
  // tokens are numbers of 32 bits in the noise
  check(first >= 0 && is_i32(first) && is_i32(logits.sizes[1]) &&
            is_i32(first + logits.sizes[1]) && vocab_size >= 1 && is_i32(vocab_size),
        "first is 0 or more, vocab_size is 1 or more");
  Tensor scores(empty({rows}, aoti_torch_dtype_float32())), tokens(empty({rows}, i64()));
  specc::column_winners({{to_dtype(logits), logits.data, logits.strides[0], 1},
                         rows,
                         logits.sizes[1],
                         temperature.as<float>(),
                         seeds.as<int64_t>(),
                         positions.as<int64_t>(),
                         first,
                         vocab_size,
                         out<float>(scores),
                         out<int64_t>(tokens)});
  return {scores, tokens};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specc_cpu, library) {
  library.def(
      "draft_children(Tensor logits, int num_children, Tensor cache_len, Tensor columns, int "
      "depth, Tensor values, Tensor words, bool scored=False) -> (Tensor tokens, Tensor scores)");
  library.def(
      "accept(Tensor logits, Tensor tokens, Tensor parents, int max_depth, Tensor? image, Tensor? "
      "q_rows, Tensor[] draft_logits, Tensor values, Tensor words, Tensor cache_len, Tensor "
      "history, Tensor block_table) -> (Tensor path, Tensor num_accepted, Tensor output_tokens)");
  library.def(
      "node_winners(Tensor logits, Tensor tokens, Tensor parents, int first_node, Tensor values, "
      "Tensor words, Tensor cache_len, Tensor history, Tensor block_table) -> Tensor");
  library.def(
      "column_winners(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, int first, "
      "int vocab_size) -> (Tensor scores, Tensor tokens)");
}

STABLE_TORCH_LIBRARY_IMPL(specc_cpu, CPU, library) {
  library.impl("draft_children", TORCH_BOX(&draft_children));
  library.impl("accept", TORCH_BOX(&accept));
  library.impl("node_winners", TORCH_BOX(&node_winners));
  library.impl("column_winners", TORCH_BOX(&column_winners));
}
