// Layers that keep a state of each sequence: convolutions and recurrences over the tokens of trees.
// A token is taken in one order of operations, whatever else is in the pass and however many threads
// there are: nodes of trees, folds and plain decoding have the same bits. Callers check shapes and
// bounds; strides count elements, and the last dimension is contiguous.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace specc {

// The tokens of a pass, and where the states of their sequences are.
struct StateTokens {
  int64_t num_tokens;        // Nt
  int64_t batch;             // B
  const int32_t* q_start;    // [B + 1]
  const int32_t* slot;       // [Nt], -1 = dead token
  const int32_t* cache_len;  // [B]
  const int64_t* ancestors;  // [Nt, num_words], or null = all nodes before a token's own
  int64_t num_words;
  const int32_t* states;     // [B, 2]: place, and how many nodes are certain
  int64_t num_states, num_rows;

  int64_t place(int64_t b) const { return states[2 * b]; }
  int64_t certain(int64_t b) const { return states[2 * b + 1]; }
  int64_t node(int64_t b, int64_t token) const { return int64_t{slot[token]} - cache_len[b]; }
};
// Throws std::runtime_error where a pass would leave states or rows, or takes nodes out of order,
// before anything is written.
void check_bounds(const StateTokens& a);

// Paths that a step has accepted.
struct AcceptedPaths {
  int64_t batch, length;     // B, P
  const int32_t* source;     // [B, P], -1 = none from here on
  const int32_t* cache_len;  // [B], below 0: nothing is committed
  const int32_t* states;     // [B, 2]
  int64_t num_states, num_rows;
};
void check_bounds(const AcceptedPaths& a);  // as above

// specc::tree_conv; semantics: tree_conv_reference.
struct TreeConv {
  StateTokens tokens;
  DType dtype;         // of everything
  int64_t channels;    // C
  int64_t width;       // K
  const void* x;       // [Nt, C]
  int64_t x_stride;
  const void* weight;  // [C, K], contiguous
  const void* bias;    // [C], or null
  bool is_silu;
  void* state;         // [num_states, K - 1, C], contiguous
  void* rows;          // [num_states, R, C], contiguous
  void* out;           // [Nt, C]
};
void tree_conv(const TreeConv& a, int num_threads);

// specc::fold_conv; semantics: fold_conv_reference.
struct FoldConv {
  AcceptedPaths paths;
  int64_t layers;
  int64_t row_bytes;  // of C numbers
  int64_t kept;       // K - 1
  void* state;        // [L, num_states, K - 1, C], contiguous
  const void* rows;   // [L, num_states, R, C], contiguous
};
void fold_conv(const FoldConv& a, int num_threads);

// What the heads of a recurrence look like.
struct RecurrentHeads {
  int64_t key_heads, heads;    // HK, which divides HV
  int64_t key_dim, value_dim;  // DK, DV
  bool decays_rows;            // g is of each row of a state, else of a head
  bool has_beta;

  int64_t key_head(int64_t head) const { return head / (heads / key_heads); }
  int64_t decays() const { return decays_rows ? key_dim : 1; }
  // of a replay row: where k, v, g and beta of a head begin; how long it is
  int64_t k_place(int64_t head) const { return key_head(head) * key_dim; }
  int64_t v_place(int64_t head) const { return key_heads * key_dim + head * value_dim; }
  int64_t g_place(int64_t head) const {
    return key_heads * key_dim + heads * value_dim + head * decays();
  }
  int64_t beta_place(int64_t head) const { return g_place(heads) + head; }
  int64_t columns() const { return beta_place(has_beta ? heads : 0); }
};

// [Nt, heads, columns] of either type.
struct TokenHeads {
  const void* data;
  DType dtype;
  int64_t token_stride, head_stride;
};

// specc::tree_recurrence; semantics: tree_recurrence_reference.
struct TreeRecurrence {
  StateTokens tokens;
  RecurrentHeads heads;
  TokenHeads q, k, v, g;
  TokenHeads beta;  // of one column, where there is one
  float* state;     // [num_states, HV, DK, DV], contiguous
  float* rows;      // [num_states, R, W], contiguous
  DType out_dtype;
  void* out;        // [Nt, HV, DV]
};
void tree_recurrence(const TreeRecurrence& a, int num_threads);

// specc::fold_recurrence; semantics: fold_recurrence_reference.
struct FoldRecurrence {
  AcceptedPaths paths;
  RecurrentHeads heads;
  int64_t layers;
  float* state;       // [L, num_states, HV, DK, DV], contiguous
  const float* rows;  // [L, num_states, R, W], contiguous
};
void fold_recurrence(const FoldRecurrence& a, int num_threads);

}  // namespace specc
