// What a step does between its programs: choose children, walk the tree, move accepted rows.
// The oracles are tree_expand_reference, accept_winners_reference and commit_kv_reference.
#include <algorithm>
#include <cstring>
#include <vector>

#include "best_of_row.h"
#include "kernels.h"
#include "vec.h"

namespace specc {
namespace {

template <typename T>
void expand(const TreeExpand& a) {
  const T* logits = static_cast<const T*>(a.logits);
  std::vector<Best> best(a.num_children);
  for (int64_t r = 0; r < a.rows; ++r) {
    best_of_row(logits + r * a.row_stride, a.vocab, a.num_children, best.data());
    for (int64_t i = 0; i < a.num_children; ++i) a.out[r * a.num_children + i] = best[i].token;
  }
}

}  // namespace

void tree_expand(const TreeExpand& a) {
  a.dtype == DType::kFloat32 ? expand<float>(a) : expand<vec::BFloat16>(a);
}

void accept_winners(const AcceptWinners& a) {
  const int64_t width = a.max_depth + 1;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t* winners = a.winners + b * a.winner_stride;
    const int64_t* tokens = a.tokens + b * a.token_stride;
    const int32_t* parents = a.parents + b * a.parent_stride;
    int32_t* path = a.path + b * width;
    int64_t* output = a.output_tokens + b * width;
    std::fill(path, path + width, -1);
    std::fill(output, output + width, -1);
    int64_t node = 0;
    int32_t accepted = 0;
    path[0] = 0;
    for (int64_t depth = 0;; ++depth) {
      const int64_t wanted = winners[node];
      output[depth] = std::max<int64_t>(wanted, 0);
      if (depth == a.max_depth || wanted < 0) break;
      int64_t child = 1;
      while (child < a.num_nodes && !(parents[child] == node && tokens[child] == wanted)) ++child;
      if (child >= a.num_nodes) break;
      node = child;
      path[depth + 1] = static_cast<int32_t>(child);
      ++accepted;
    }
    a.num_accepted[b] = accepted;
  }
}

void commit_kv(const CommitKV& a) {
  if (a.row_bytes == 0) return;  // rows of nothing
  struct Move {
    int64_t from, to;  // rows of the flat cache
  };
  std::vector<Move> moves;
  std::vector<char> staged;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int32_t* table = a.block_table + b * a.blocks_per_sequence;
    auto row = [&](int64_t slot) {
      return table[slot / a.block_size] * a.block_size + slot % a.block_size;
    };
    moves.clear();
    for (int64_t i = 0; i < a.moves; ++i) {
      const int64_t from = a.source[b * a.moves + i], to = a.target[b * a.moves + i];
      if (from >= 0 && to >= 0 && from != to) moves.push_back({row(from), row(to)});
    }
    if (moves.empty()) continue;
    staged.resize(moves.size() * a.row_bytes);
    const int64_t layer_bytes = a.blocks * a.block_size * a.row_bytes;
    for (int64_t part = 0; part < a.parts; ++part) {
      char* cache = static_cast<char*>(a.slab) + part * layer_bytes;
      // sources and targets of a sequence may overlap: read all, then write all
      for (size_t i = 0; i < moves.size(); ++i)
        std::memcpy(staged.data() + i * a.row_bytes, cache + moves[i].from * a.row_bytes,
                    a.row_bytes);
      for (size_t i = 0; i < moves.size(); ++i)
        std::memcpy(cache + moves[i].to * a.row_bytes, staged.data() + i * a.row_bytes,
                    a.row_bytes);
    }
  }
}

}  // namespace specc
