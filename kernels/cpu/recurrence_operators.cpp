// Layers that keep states, as operators of tensors.
#include <cstring>

#include "operands.h"
#include "recurrence.h"
#include "tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

StateTokens tokens_of(int64_t num_tokens, const Tensor& state, const Tensor& rows,
                      const Tensor& q_start, const Tensor& slot, const Tensor& cache_len,
                      const Tensor* ancestors, const Tensor& states) {
  check_index(q_start, 1, kInt32, "q_start is [B + 1] int32");
  check_index(slot, 1, kInt32, "slot is [Nt] int32");
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  check_index(states, 2, kInt32, "states is [B, 2] int32");
  StateTokens a{};
  a.num_tokens = num_tokens;
  a.batch = cache_len.sizes[0];
  check(slot.sizes[0] == num_tokens, "slot has a number for each token");
  check(q_start.sizes[0] == a.batch + 1 && states.sizes[0] == a.batch && states.sizes[1] == 2,
        "q_start, cache_len and states agree");
  a.q_start = q_start.as<int32_t>();
  a.slot = slot.as<int32_t>();
  a.cache_len = cache_len.as<int32_t>();
  a.states = states.as<int32_t>();
  if (ancestors != nullptr) {
    check_index(*ancestors, 2, kInt64, "ancestors is [Nt, W] int64");
    check(ancestors->sizes[0] == num_tokens, "ancestors has words for each token");
    a.ancestors = ancestors->as<int64_t>();
    a.num_words = ancestors->sizes[1];
  }
  a.num_states = state.sizes[0];
  a.num_rows = rows.sizes[1];
  check(rows.sizes[0] == a.num_states, "state and rows have the same places");
  for (const Tensor* written : {&state, &rows})
    check_apart(*written, {&q_start, &slot, &cache_len, ancestors, &states});
  check_bounds(a);
  return a;
}

AcceptedPaths paths_of(const Tensor& state, const Tensor& rows, const Tensor& source,
                       const Tensor& cache_len, const Tensor& states) {
  check_index(source, 2, kInt32, "source is [B, P] int32");
  check_index(cache_len, 1, kInt32, "cache_len is [B] int32");
  check_index(states, 2, kInt32, "states is [B, 2] int32");
  AcceptedPaths a{};
  a.batch = cache_len.sizes[0];
  a.length = source.sizes[1];
  check(source.sizes[0] == a.batch && states.sizes[0] == a.batch && states.sizes[1] == 2,
        "source, cache_len and states agree");
  a.source = source.as<int32_t>();
  a.cache_len = cache_len.as<int32_t>();
  a.states = states.as<int32_t>();
  check(rows.sizes[0] == state.sizes[0] && rows.sizes[1] == state.sizes[1],
        "state and rows have the same layers and places");
  a.num_states = state.sizes[1];
  a.num_rows = rows.sizes[2];
  check_apart(state, {&source, &cache_len, &states});
  check_bounds(a);
  return a;
}

Tensor tree_conv(const Tensor& x, const Tensor& weight, const Tensor* bias, const Tensor& state,
                 const Tensor& rows, const Tensor& q_start, const Tensor& slot,
                 const Tensor& cache_len, const Tensor* ancestors, const Tensor& states,
                 std::string_view activation) {
  TreeConv a{};
  a.dtype = to_dtype(x);
  check(x.dim == 2 && x.is_dense_row(), "x is [Nt, C], rows contiguous");
  check_index(weight, 2, x.dtype, "weight is [C, K] in the dtype of x");
  check_index(state, 3, x.dtype, "state is [num_states, K - 1, C] in the dtype of x");
  check_index(rows, 3, x.dtype, "rows is [num_states, R, C] in the dtype of x");
  a.channels = x.sizes[1];
  a.width = weight.sizes[1];
  check(weight.sizes[0] == a.channels && a.width >= 1, "weight has a row for each channel");
  check(state.sizes[1] == a.width - 1 && state.sizes[2] == a.channels &&
            rows.sizes[2] == a.channels,
        "state and rows fit x and weight");
  if (bias != nullptr) {
    check_index(*bias, 1, x.dtype, "bias is [C] in the dtype of x");
    check(bias->sizes[0] == a.channels, "bias has a number for each channel");
    a.bias = bias->data;
  }
  check(activation.empty() || activation == "silu", "activation is silu, or none");
  a.is_silu = !activation.empty();
  a.tokens = tokens_of(x.sizes[0], state, rows, q_start, slot, cache_len, ancestors, states);
  a.x = x.data;
  a.x_stride = x.strides[0];
  a.weight = weight.data;
  a.state = state.data;
  a.rows = rows.data;
  const Tensor out = empty({x.sizes[0], a.channels}, x.dtype);
  a.out = out.data;
  // tensors without elements have no memory
  if (a.channels > 0) specc::tree_conv(a, kernel_threads());
  return out;
}

TokenHeads heads_of(const Tensor& x, const char* what) {
  check(x.dim == 3 && x.is_dense_row(), what);
  return {x.data, to_dtype(x), x.strides[0], x.strides[1]};
}

// A number of each head.
TokenHeads numbers_of(const Tensor& x, const char* what) {
  check(x.dim == 2, what);
  return {x.data, to_dtype(x), x.strides[0], x.strides[1]};
}

void check_heads(const RecurrentHeads& heads) {
  check(heads.key_heads > 0 && heads.heads > 0 && heads.key_dim > 0 && heads.value_dim > 0,
        "a recurrence has heads, and these have columns");
  check(heads.heads % heads.key_heads == 0, "the number of key heads divides that of value heads");
}

Tensor tree_recurrence(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                       const Tensor* beta, const Tensor& state, const Tensor& rows,
                       const Tensor& q_start, const Tensor& slot, const Tensor& cache_len,
                       const Tensor* ancestors, const Tensor& states) {
  TreeRecurrence a{};
  a.q = heads_of(q, "q is [Nt, HK, DK], rows contiguous");
  a.k = heads_of(k, "k is [Nt, HK, DK], rows contiguous");
  a.v = heads_of(v, "v is [Nt, HV, DV], rows contiguous");
  const int64_t num_tokens = v.sizes[0];
  RecurrentHeads& heads = a.heads;
  heads = {k.sizes[1], v.sizes[1], k.sizes[2], v.sizes[2], g.dim == 3, beta != nullptr};
  check_heads(heads);
  check(k.sizes[0] == num_tokens && has_same_sizes(q, k), "q, k and v agree");
  if (heads.decays_rows) {
    a.g = heads_of(g, "g of rows is [Nt, HV, DK], rows contiguous");
    check(g.sizes[2] == heads.key_dim, "g has a number for each row of a state");
  } else {
    a.g = numbers_of(g, "g is [Nt, HV] or [Nt, HV, DK]");
  }
  check(g.sizes[0] == num_tokens && g.sizes[1] == heads.heads, "g and v agree");
  if (beta != nullptr) {
    a.beta = numbers_of(*beta, "beta is [Nt, HV]");
    check(beta->sizes[0] == num_tokens && beta->sizes[1] == heads.heads, "beta and v agree");
  }
  check_index(state, 4, kFloat32, "state is [num_states, HV, DK, DV] float32");
  check(state.sizes[1] == heads.heads && state.sizes[2] == heads.key_dim &&
            state.sizes[3] == heads.value_dim,
        "state fits k and v");
  check_index(rows, 3, kFloat32, "rows is [num_states, R, W] float32");
  a.tokens = tokens_of(num_tokens, state, rows, q_start, slot, cache_len, ancestors, states);
  const Tensor out = empty({num_tokens, heads.heads, heads.value_dim}, v.dtype);
  // places for no sequence: all tokens are dead, and sizes may be anything
  if (state.count() == 0) {
    if (out.bytes > 0) std::memset(out.data, 0, static_cast<size_t>(out.bytes));
    return out;
  }
  check(rows.sizes[2] == heads.columns(), "rows have k, v, g and beta of a token");
  a.state = state.as<float>();
  a.rows = rows.as<float>();
  a.out_dtype = a.v.dtype;
  a.out = out.data;
  specc::tree_recurrence(a, kernel_threads());
  return out;
}

void fold_conv(const Tensor& state, const Tensor& rows, const Tensor& source,
               const Tensor& cache_len, const Tensor& states) {
  to_dtype(state);
  check_index(state, 4, state.dtype, "state is [L, num_states, K - 1, C]");
  check_index(rows, 4, state.dtype, "rows is [L, num_states, R, C] in the dtype of state");
  check(rows.sizes[3] == state.sizes[3], "state and rows have the same columns");
  FoldConv a{};
  a.paths = paths_of(state, rows, source, cache_len, states);
  a.layers = state.sizes[0];
  a.kept = state.sizes[2];
  a.row_bytes = state.sizes[3] * bytes_of(state.dtype);
  a.state = state.data;
  a.rows = rows.data;
  // tensors without elements have no memory
  if (state.count() > 0) specc::fold_conv(a, kernel_threads());
}

void fold_recurrence(const Tensor& state, const Tensor& rows, const Tensor& source,
                     const Tensor& cache_len, const Tensor& states, int64_t key_heads,
                     bool has_beta) {
  check_index(state, 5, kFloat32, "state is [L, num_states, HV, DK, DV] float32");
  check_index(rows, 4, kFloat32, "rows is [L, num_states, R, W] float32");
  FoldRecurrence a{};
  RecurrentHeads& heads = a.heads;
  heads = {key_heads, state.sizes[2], state.sizes[3], state.sizes[4], false, has_beta};
  check_heads(heads);
  a.paths = paths_of(state, rows, source, cache_len, states);
  // no layers, or places for no sequence: sizes may be anything
  if (state.count() == 0) return;
  if (rows.sizes[3] != heads.columns()) heads.decays_rows = true;
  check(rows.sizes[3] == heads.columns(), "rows have k, v, g and beta of a token");
  a.layers = state.sizes[0];
  a.state = state.as<float>();
  a.rows = rows.as<float>();
  specc::fold_recurrence(a, kernel_threads());
}

}  // namespace

SPECC_OPERATOR("specc::tree_conv", tree_conv);
SPECC_OPERATOR("specc::tree_recurrence", tree_recurrence);
SPECC_OPERATOR("specc::fold_conv", fold_conv);
SPECC_OPERATOR("specc::fold_recurrence", fold_recurrence);

}  // namespace specc::operators
