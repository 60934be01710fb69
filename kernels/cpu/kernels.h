// The CPU kernels, on raw pointers. All strides count elements; the last dimension of every tensor is
// contiguous unless a stride is named. Callers check shapes (the operators in *_operators.cpp) and
// bounds (check_bounds).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace specc {

enum class DType : int32_t { kFloat32, kBFloat16 };

// specc::tree_attention; semantics: kernels/reference/core.py, tree_attention_reference.
struct TreeAttention {
  DType dtype;               // of q, k, v, out and of both caches, unless those hold int8
  bool holds_int8;           // rows of the caches are as kv_rows.h has them
  int64_t num_heads;         // H
  int64_t num_kv_heads;      // HK, divides H
  int64_t num_tokens;        // Nt
  int64_t head_dim;          // D
  int64_t value_dim;         // DV
  int64_t batch;             // B
  const void* q;             // [H, Nt, D]
  int64_t q_head_stride, q_token_stride;
  const void* k;             // [HK, Nt, D]; null: rows of the pass are in the caches
  int64_t k_head_stride, k_token_stride;
  const void* v;             // [HK, Nt, DV]
  int64_t v_head_stride, v_token_stride;
  void* k_cache;             // [blocks, block_size, HK, D], of int8 D + 4
  int64_t k_block_stride, k_row_stride, k_cache_head_stride;
  void* v_cache;             // [blocks, block_size, HK, DV], of int8 DV + 4
  int64_t v_block_stride, v_row_stride, v_cache_head_stride;
  int64_t num_blocks, block_size;
  const int32_t* q_start;    // [B + 1]
  const int64_t* position;   // [Nt]
  const int32_t* slot;       // [Nt], -1 = dead token
  const int32_t* cache_len;  // [B]
  const int64_t* ancestors;  // [Nt, num_words], or null = causal
  int64_t num_words;
  const int32_t* block_table;  // [B, blocks_per_sequence]
  int64_t blocks_per_sequence;
  float scale;
  int64_t window, sink;      // 0 = none
  const void* sink_logits;   // [H] in dtype, or null
  float softcap;             // 0 = none
  const float* slopes;       // [H], or null
  bool rounds_bias;          // positions and their products with slopes are bfloat16
  int64_t most_rows;         // sequences with more tokens are only written; 0 = no limit
  int64_t chunk;             // tokens see their own chunk of positions alone; 0 = all
  void* out;                 // [H, Nt, DV]
  int64_t out_head_stride, out_token_stride;

  // Whether only rows of a sequence are written.
  bool leaves_out(int64_t b) const {
    return most_rows > 0 && q_start[b + 1] - q_start[b] > most_rows;
  }
  // The first column that a token sees besides the sink; that of the lowest position is the lowest.
  int64_t first_column(int64_t lowest_position) const {
    const int64_t first = window ? std::max<int64_t>(lowest_position - window + 1, 0) : 0;
    return chunk ? std::max(first, lowest_position - lowest_position % chunk) : first;
  }
};
void tree_attention(const TreeAttention& a, int num_threads);
// Throws std::runtime_error where a call would leave the cache, before anything is written.
void check_bounds(const TreeAttention& a);

// Outputs of a block of w; specc/artifact/weight_layout.py has the layout.
constexpr int kLinearBlock = 32;
// y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]), accumulated in float32. x and y are row-major with
// a row stride; w is contiguous, [N / 32, K, 32] of float or [N / 32, K / 2, 32, 2] of bfloat16,
// both rounded up.
struct Linear {
  DType dtype;  // of x, w, bias and y
  int64_t rows, n, k;
  const void* x;
  int64_t x_stride;
  const void* w;
  const void* bias;  // [N], or null
  void* y;
  int64_t y_stride;
};
// Products that differ in their rows and weights alone: one, or those of a mixture's experts.
void linear(const Linear* products, int64_t count, int num_threads);

// Rows [N, K] as such a w; what that has beyond N and K is zero.
struct PackBlocks {
  DType dtype;
  int64_t n, k;
  const void* rows;
  int64_t row_stride;
  void* blocks;  // of `bytes_of_blocks`
};
void pack_blocks(const PackBlocks& a, int num_threads);
int64_t bytes_of_blocks(DType dtype, int64_t n, int64_t k);

// specc::linear_q; semantics: linear_q_reference. y = x @ w.T + bias of a quantized weight in the
// blocks of specc/artifact/quantized_layout.py.
struct BlockFormat;  // linear_q_formats.h
struct LinearQ {
  DType dtype;  // of x, bias and y
  int64_t rows, n, k;
  const void* x;
  int64_t x_stride;
  const uint8_t* w;
  int64_t bits;    // 8 or 4
  int64_t group;   // columns of a scale: 32, 64 or 128, or 0 of 8 bits: all
  bool has_zeros;  // groups have zero points of their own
  bool is_float;   // e4m3 of 8 bits, mxfp4 or nvfp4 of 4
  int64_t row_bits;  // of the integers that x becomes: 8, 16 or, of float32, 24
  const void* bias;  // [N], or null
  void* y;
  int64_t y_stride;
  const BlockFormat* format;  // of ggml, whose bits and group these are; null for specc's layouts
};
// The format of this name, or null.
const BlockFormat* block_format(std::string_view name);
// Products that differ in their rows and blocks alone: one, or those of a mixture's experts.
void linear_q(const LinearQ* products, int64_t count, int num_threads);
// of `linear_q`, the part for e4m3; one product or more
void linear_fp8(const LinearQ* products, int64_t count, int num_threads);
// Bytes of a block of 32 outputs; throws std::runtime_error for a layout that is not known.
int64_t block_bytes(const LinearQ& a);

// out[t] = w[tokens[t]], of a weight [N, K] in the blocks of `linear`; throws std::runtime_error
// where a token is not in 0..N, before anything is written.
struct Embedding {
  DType dtype;  // of w and out
  int64_t num_tokens, n, k;
  const int64_t* tokens;
  const void* w;
  void* out;  // [num_tokens, K]
};
void embedding(const Embedding& a);

// specc::tree_expand: the num_children best tokens of each row, ties by ascending token.
struct TreeExpand {
  DType dtype;
  int64_t rows, vocab, num_children;
  const void* logits;  // [rows, vocab]
  int64_t row_stride;
  int64_t* out;  // [rows, num_children]
};
void tree_expand(const TreeExpand& a);

// specc::accept_winners; semantics: accept_winners_reference.
struct AcceptWinners {
  int64_t batch, num_nodes, max_depth;
  const int64_t* winners;  // [batch, num_nodes]
  int64_t winner_stride;
  const int64_t* tokens;   // [batch, num_nodes]
  int64_t token_stride;
  const int32_t* parents;  // [batch, num_nodes]; stride 0 where all trees are one
  int64_t parent_stride;
  int32_t* path;           // [batch, max_depth + 1]
  int32_t* num_accepted;   // [batch]
  int64_t* output_tokens;  // [batch, max_depth + 1]
};
void accept_winners(const AcceptWinners& a);

// specc::commit_kv; semantics: commit_kv_reference.
struct CommitKV {
  void* slab;      // [parts, blocks, block_size, row_bytes], contiguous
  int64_t parts;   // K and V of all layers
  int64_t blocks, block_size, row_bytes;
  int64_t batch, moves;
  const int64_t* source;  // [batch, moves], -1 = none
  const int64_t* target;  // [batch, moves], -1 = none
  const int32_t* block_table;  // [batch, blocks_per_sequence]
  int64_t blocks_per_sequence;
};
void commit_kv(const CommitKV& a);
void check_bounds(const CommitKV& a);  // as above

// specc::write_rows, specc::take_rows; semantics: kernels/reference/slab_rows.py.
struct SlabRows {
  int64_t item_bytes;
  int64_t num_tokens;  // Nt
  int64_t per_token;   // rows of a token: K, or 1 where they are written
  int64_t width;       // W
  void* slab;          // [blocks, block_size, W]
  int64_t block_stride, row_stride;
  int64_t num_blocks, block_size;
  int64_t batch;               // B
  const int32_t* q_start;      // [B + 1]
  const int32_t* slot;         // [Nt, per_token], -1 = none
  const int32_t* block_table;  // [B, blocks_per_sequence]
  int64_t blocks_per_sequence;
  void* rows;  // [Nt, per_token, W]: what is written, or what is read
  int64_t rows_stride;
};
void write_rows(const SlabRows& a, int num_threads);
void take_rows(const SlabRows& a, int num_threads);
void check_bounds(const SlabRows& a);  // as above

// specc::merge_trees; semantics: merge_trees_reference.
struct MergeTrees {
  int64_t batch, total, num_trees;
  const int64_t* tokens;  // [batch, total]
  int64_t token_stride;
  const int32_t* parents;  // [batch, total]
  int64_t parent_stride;
  const int32_t* start;  // [num_trees + 1]
  int64_t* out_tokens;   // [batch, nodes()], as the other outputs but image
  int32_t* out_parents;
  int32_t* image;  // [batch, total]
  int32_t* count;

  int64_t nodes() const { return 1 + total - num_trees; }
};
void merge_trees(const MergeTrees& a);
void check_bounds(const MergeTrees& a);  // as above

// specc::rerank_tree; semantics: rerank_tree_reference.
struct RerankTree {
  int64_t batch, num_candidates, num_nodes;
  const int64_t* tokens;  // [batch, num_candidates]
  int64_t token_stride;
  const int32_t* parents;  // [batch, num_candidates]
  int64_t parent_stride;
  const float* scores;  // [batch, num_candidates]
  int64_t score_stride;
  int64_t* out_tokens;   // [batch, num_nodes]
  int32_t* out_parents;  // [batch, num_nodes]
  int32_t* kept;         // [batch, num_nodes]
};
void rerank_tree(const RerankTree& a);

// specc::ancestor_words; semantics: ancestor_words_reference. A parent that does not precede its
// node is none.
struct AncestorWords {
  int64_t batch, num_nodes, num_words;
  const int32_t* parents;  // [batch, num_nodes]
  int64_t parent_stride;
  int64_t* words;   // [batch * num_nodes, num_words]
  int32_t* depths;  // [batch * num_nodes]
};
void ancestor_words(const AncestorWords& a);

// specc::image_slots; semantics: image_slots_reference.
struct ImageSlots {
  int64_t batch, num_own, num_nodes;
  const int32_t* image;  // [batch, num_own]
  int64_t image_stride;
  const int32_t* slots;  // [batch, num_own]; stride 0 where all sequences have the same
  int64_t slot_stride;
  int32_t* out;  // [batch, num_nodes]
};
void image_slots(const ImageSlots& a);

// specc::vote_chain; semantics: vote_chain_reference.
struct VoteChain {
  int64_t batch, num_drafts, length;
  const int64_t* tokens;  // [batch, num_drafts, length]
  const float* weights;   // [batch, num_drafts]
  int64_t* out;           // [batch, length]
};
void vote_chain(const VoteChain& a);

// The tokens of a batch: that at position p of sequence b is
// tokens[block_table[b, p / block_size], p % block_size].
struct History {
  int32_t* tokens;  // [num_blocks, block_size]
  int64_t num_blocks, block_size;
  const int32_t* block_table;  // [batch, blocks_per_sequence]
  int64_t blocks_per_sequence;
  int64_t batch;
  const int32_t* cache_len;  // [batch], below 0 for padding
};
// Throws where what sequence b has committed would lie outside, as check_bounds does.
void check_history(const History& a, int64_t b);

// specc::lookup; semantics: lookup_reference.
struct Lookup {
  History history;
  const int64_t* last_tokens;  // [batch, num_last], the root last
  int64_t num_last;
  int64_t ngram, num_tokens;
  int64_t* tokens;   // [batch, num_tokens + 1]
  int32_t* parents;  // [batch, num_tokens + 1]
};
void lookup(const Lookup& a);
void check_bounds(const Lookup& a);  // as above

// specc::record_tokens; semantics: record_tokens_reference.
struct RecordTokens {
  History history;
  const int64_t* last_tokens;  // [batch, num_last], the root last
  int64_t num_last;
  const int64_t* output_tokens;  // [batch, width]
  int64_t width;
  const int32_t* num_accepted;  // [batch]
};
void record_tokens(const RecordTokens& a);
void check_bounds(const RecordTokens& a);  // as above

// Sum of a buffer, with all threads: what reading memory costs at best.
float sum_floats(const float* data, int64_t count, int num_threads);

// Scales and zero points of 4 bits: search_scales of specc/artifact/rounding.py.
void int4_scales(
    const float* values,  // [groups, width]
    int64_t groups, int64_t width /* up to 128 */, bool has_zeros, int num_threads,
    float* scales,  // [groups]
    float* zeros);  // [groups]

}  // namespace specc
