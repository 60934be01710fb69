// Kernels that take the place of several operators of a model: norms, gates, rotary embedding with
// what it writes. They compute in float32 and round once, and add a row's numbers in an order that
// depends on its length alone: not on rows, threads or instruction sets. Callers check shapes and
// bounds; strides count elements, and the last dimension is contiguous.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels.h"
#include "strided_rows.h"

namespace specc {

// specc::rms_norm, specc::add_rms_norm, aten::layer_norm; semantics: kernels/reference/fused.py.
struct Norm {
  DType dtype;  // of x, residual, out and total
  int64_t n;    // elements of a row
  const void* x;
  StridedRows rows;
  const void* residual;  // added to x before the norm; or null
  StridedRows residual_rows;
  DType weight_dtype;    // of weight and bias
  const void* weight;    // [n], or null
  const void* bias;      // [n], or null
  bool unit_offset;      // the factor is 1 + weight
  float eps;
  void* out;    // [rows, n]
  void* total;  // x + residual in dtype, where there is a residual
};
void rms_norm(const Norm& a, int num_threads);
void layer_norm(const Norm& a, int num_threads);

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu };

// specc::act_and_mul; semantics: act_and_mul_reference.
struct ActAndMul {
  DType dtype;
  Activation activation;
  int64_t n;              // of the result's row; the input's is twice as long
  const void* gate_up;
  StridedRows rows;
  void* out;  // [rows, n]
};
void act_and_mul(const ActAndMul& a, int num_threads);

// What a pass writes to a layer's caches, as TreeAttention has it.
struct WriteKV {
  DType dtype;                // of k, v and of the caches, unless those hold int8
  bool holds_int8;            // rows of the caches are as kv_rows.h has them
  int64_t num_kv_heads;       // HK
  int64_t num_tokens;         // Nt
  int64_t head_dim, value_dim;
  const void* k;              // [HK, Nt, D]
  int64_t k_head_stride, k_token_stride;
  const void* v;              // [HK, Nt, DV], or null: values are in their keys
  int64_t v_head_stride, v_token_stride;
  void* k_cache;              // [blocks, block_size, HK, D], of int8 D + 4
  int64_t k_block_stride, k_row_stride, k_cache_head_stride;
  void* v_cache;              // [blocks, block_size, HK, DV], of int8 DV + 4
  int64_t v_block_stride, v_row_stride, v_cache_head_stride;
  int64_t num_blocks, block_size;
  int64_t batch;              // B
  const int32_t* q_start;     // [B + 1]
  const int32_t* slot;        // [Nt], -1 = dead token
  const int32_t* block_table;  // [B, blocks_per_sequence]
  int64_t blocks_per_sequence;
};
// specc::write_kv; semantics: write_kv_reference.
void write_kv(const WriteKV& a, int num_threads);
// Throws std::runtime_error where a call would leave a cache, before anything is written.
void check_bounds(const WriteKV& a);

// specc::rope_write; semantics: rope_write_reference.
struct RopeWrite {
  WriteKV write;      // whose k is not rotated yet
  int64_t num_heads;  // H
  const void* q;      // [H, Nt, D]
  int64_t q_head_stride, q_token_stride;
  int64_t rotated;    // R, even, at most D
  DType table_dtype;
  const void* cos;    // [Nt, R]
  int64_t cos_stride;
  const void* sin;    // [Nt, R]
  int64_t sin_stride;
  void* out;          // [Nt, H, D]
  bool hadamard;         // rotated rows are multiplied as Hadamard has it
};
void rope_write(const RopeWrite& a, int num_threads);

// specc::hadamard; semantics: hadamard_reference.
struct Hadamard {
  DType dtype;
  int64_t n;  // elements of a row
  const void* x;
  StridedRows rows;
  void* out;  // [rows, n]
};
void hadamard(const Hadamard& a, int num_threads);

// aten::softmax, aten::log_softmax over the last dimension.
struct Softmax {
  DType dtype;      // of x
  DType out_dtype;  // of out
  bool is_log;
  int64_t n;
  const void* x;
  StridedRows rows;
  void* out;  // [rows, n]
};
void softmax(const Softmax& a, int num_threads);

}  // namespace specc
