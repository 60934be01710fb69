// What the functions of operators look like: made of kernels/operators by `python -m
// specc.kernels.generate`, compared by `SPECC_OPERATOR`.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "tensor.h"

namespace specc {

// Whether a function has the type that the schema of the operator with this name asks for. Names of
// other namespaces than specc have no schema here.
template <class Function>
consteval bool fits_schema(std::string_view name) {
  using T = const Tensor&;
  using O = const Tensor*;  // may be absent
  using Ts = std::span<const Tensor>;
  using Ints = std::span<const int64_t>;
  using Text = std::string_view;
  using One = Tensor;
  using Two = std::tuple<Tensor, Tensor>;
  using Three = std::tuple<Tensor, Tensor, Tensor>;
  using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  if (name == "specc::accept")
    return std::is_same_v<Function, Three(T, T, T, int64_t, O, O, Ts, T, T, T, T, T)>;
  if (name == "specc::accept_winners")
    return std::is_same_v<Function, Three(T, T, T, int64_t)>;
  if (name == "specc::act_and_mul")
    return std::is_same_v<Function, One(T, Text)>;
  if (name == "specc::add_norm_gate_up")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, Text)>;
  if (name == "specc::add_norm_head")
    return std::is_same_v<Function, One(T, T, T, double, bool, T, O, T)>;
  if (name == "specc::add_norm_linear")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, O)>;
  if (name == "specc::add_norm_rope_write")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, O, T, T, T, T, T, T, T)>;
  if (name == "specc::add_rms_norm")
    return std::is_same_v<Function, Two(T, T, T, double, bool)>;
  if (name == "specc::all_reduce")
    return std::is_same_v<Function, One(T)>;
  if (name == "specc::ancestor_words")
    return std::is_same_v<Function, Two(T)>;
  if (name == "specc::attend")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, O, T, O, O, double, int64_t, int64_t,
        double, bool, bool, int64_t, int64_t)>;
  if (name == "specc::attend_expanded")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, T, T, O, T, O, int64_t, double,
        double)>;
  if (name == "specc::best_of_ranks")
    return std::is_same_v<Function, One(T, T)>;
  if (name == "specc::block_mass")
    return std::is_same_v<Function, void(T, T, T, T, T, T, O, T, T, double)>;
  if (name == "specc::cache_write")
    return std::is_same_v<Function, One(T, T, T)>;
  if (name == "specc::column_winners")
    return std::is_same_v<Function, Two(T, T, T, T, int64_t, int64_t)>;
  if (name == "specc::commit_kv")
    return std::is_same_v<Function, void(T, T, T, T)>;
  if (name == "specc::commit_rows")
    return std::is_same_v<Function, Two(T, T, T)>;
  if (name == "specc::dense_attention")
    return std::is_same_v<Function, One(T, T, T, O, O, double, double)>;
  if (name == "specc::distance_bias")
    return std::is_same_v<Function, One(T, T, T, double, double)>;
  if (name == "specc::draft_children")
    return std::is_same_v<Function, Two(T, int64_t, T, T, int64_t, T, T, bool)>;
  if (name == "specc::embed_norm_rope_write")
    return std::is_same_v<Function, Two(T, T, T, double, bool, T, O, T, T, T, T, T, T, T)>;
  if (name == "specc::embedding_of_blocks")
    return std::is_same_v<Function, One(T, T, int64_t, int64_t)>;
  if (name == "specc::experts")
    return std::is_same_v<Function, One(T, T, T, T, T, Text)>;
  if (name == "specc::from_first")
    return std::is_same_v<Function, One(T)>;
  if (name == "specc::gather_rows")
    return std::is_same_v<Function, One(T)>;
  if (name == "specc::grouped_linear")
    return std::is_same_v<Function, One(T, T, T, int64_t)>;
  if (name == "specc::grouped_mm")
    return std::is_same_v<Function, One(T, T, T)>;
  if (name == "specc::grouped_mm_q")
    return std::is_same_v<Function, One(T, T, T, int64_t, int64_t, int64_t, bool, bool, int64_t)>;
  if (name == "specc::image_slots")
    return std::is_same_v<Function, One(T, T, int64_t)>;
  if (name == "specc::leave_step")
    return std::is_same_v<Function, void(T, T, T, T, T, T, T, O)>;
  if (name == "specc::linear")
    return std::is_same_v<Function, One(T, T, O, int64_t)>;
  if (name == "specc::linear_q")
    return std::is_same_v<Function, One(T, T, O, int64_t, int64_t, int64_t, bool, bool, int64_t)>;
  if (name == "specc::lookup")
    return std::is_same_v<Function, Two(T, T, T, T, int64_t, int64_t)>;
  if (name == "specc::masked_attention")
    return std::is_same_v<Function, One(T, T, T, T, double)>;
  if (name == "specc::merge_trees")
    return std::is_same_v<Function, Four(T, T, T)>;
  if (name == "specc::next_tokens")
    return std::is_same_v<Function, One(T, T, T)>;
  if (name == "specc::node_winners")
    return std::is_same_v<Function, One(T, T, T, int64_t, T, T, T, T, T)>;
  if (name == "specc::over_link")
    return std::is_same_v<Function, One(T, Text)>;
  if (name == "specc::record_tokens")
    return std::is_same_v<Function, void(T, T, T, T, T, T)>;
  if (name == "specc::rerank_tree")
    return std::is_same_v<Function, Three(T, T, T, int64_t)>;
  if (name == "specc::rms_norm")
    return std::is_same_v<Function, One(T, T, double, bool)>;
  if (name == "specc::rope_write")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, T, T, T)>;
  if (name == "specc::skinny_linear")
    return std::is_same_v<Function, One(T, T, O)>;
  if (name == "specc::take_rows")
    return std::is_same_v<Function, One(T, T, T, T)>;
  if (name == "specc::tree_attention")
    return std::is_same_v<Function, One(T, T, T, T, T, T, T, T, T, O, T, O, O, double, int64_t,
        int64_t, double, bool, int64_t, int64_t)>;
  if (name == "specc::tree_expand")
    return std::is_same_v<Function, One(T, int64_t)>;
  if (name == "specc::tree_rows")
    return std::is_same_v<Function, Two(T, T, T)>;
  if (name == "specc::vote_chain")
    return std::is_same_v<Function, One(T, T)>;
  if (name == "specc::write_kv")
    return std::is_same_v<Function, void(T, T, T, T, T, T, T, bool)>;
  if (name == "specc::write_rows")
    return std::is_same_v<Function, void(T, T, T, T, T)>;
  return !name.starts_with("specc::");
}

}  // namespace specc
