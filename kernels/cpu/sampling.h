// What a step does under sampling rules: draw children from a draft, and verify a tree. Callers
// check shapes (sampling_operators.cpp); semantics: kernels/reference/accept.py.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace specc {

// Rows of logits of one program: `rows_per_sequence` a sequence.
struct Logits {
  DType dtype;
  const void* data;  // [batch * rows_per_sequence, vocab]
  int64_t row_stride;
  int64_t rows_per_sequence;

  const void* row(int64_t index) const {
    const int64_t item = dtype == DType::kFloat32 ? 4 : 2;
    return static_cast<const char*>(data) + index * row_stride * item;
  }
};

// Sampling options of a batch; specc/sampling/rows.py has the columns.
struct SamplingRows {
  const float* values;   // [batch, 6]
  const int64_t* words;  // [batch, 4]
};

// specc::draft_children.
struct DraftChildren {
  Logits logits;
  int64_t batch, vocab, num_children;
  const int32_t* cache_len;  // [batch], below 0 for padding
  const int32_t* columns;    // [rows_per_sequence]
  int64_t depth;             // of the nodes that get children
  SamplingRows sampling;
  int64_t* tokens;  // [batch * rows_per_sequence, num_children]
  float* scores;    // of the same shape, or null
};
void draft_children(const DraftChildren& a);
// Throws std::runtime_error where a rule or a column is none; padding may have any.
void check_bounds(const DraftChildren& a);

// specc::accept.
struct Accept {
  Logits logits;
  int64_t num_nodes, vocab, max_depth;
  const int64_t* tokens;  // [batch, num_nodes]
  int64_t token_stride;
  const int32_t* parents;  // [batch, num_nodes]; stride 0 where all trees are one
  int64_t parent_stride;
  int64_t num_columns;
  const int32_t* image;  // [batch, num_columns]; null: column t is node t
  int64_t image_stride;
  const int32_t* q_rows;  // [num_columns]; null: no draft row at all
  std::vector<Logits> drafts;
  SamplingRows sampling;
  History history;
  int32_t* path;           // [batch, max_depth + 1]
  int32_t* num_accepted;   // [batch]
  int64_t* output_tokens;  // [batch, max_depth + 1]
};
void accept(const Accept& a);
// As above; also where a node, a draft row, or the history of a sequence with penalties is none.
void check_bounds(const Accept& a);

// specc::node_winners: `logits` are those of the nodes from first_node on.
struct NodeWinners {
  Logits logits;
  int64_t num_nodes, vocab, first_node;
  const int64_t* tokens;  // [batch, num_nodes]
  int64_t token_stride;
  const int32_t* parents;  // [batch, num_nodes]; stride 0 where all trees are one
  int64_t parent_stride;
  SamplingRows sampling;
  History history;
  int64_t* winners;  // [batch * rows_per_sequence]
};
void node_winners(const NodeWinners& a);
// As above; parents may be anything.
void check_bounds(const NodeWinners& a);

// specc::column_winners: a row of logits is its own sequence.
struct ColumnWinners {
  Logits logits;
  int64_t num_rows, num_columns;
  const float* temperature;  // [num_rows], as are the others
  const int64_t* seeds;
  const int64_t* positions;  // of the tokens that are drawn
  int64_t first;             // token of the first column
  int64_t vocab_size;        // columns of later tokens are padding
  float* scores;
  int64_t* tokens;
};
void column_winners(const ColumnWinners& a);

}  // namespace specc
