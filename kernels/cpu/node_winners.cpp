// The target's own token after each node of a tile; the walk of accept.cpp asks for those on its
// path alone.
#include <vector>

#include "sampling.h"
#include "target_rows.h"

namespace specc {
namespace {

thread_local TargetMemory node_memory;

// Nodes from the root down to a node; empty where it hangs below none.
void find_path(const int32_t* parents, int64_t num_nodes, int64_t node,
               std::vector<int64_t>& path) {
  path.clear();
  for (; node > 0 && node < num_nodes && static_cast<int64_t>(path.size()) < num_nodes;
       node = parents[node])
    path.push_back(node);
  if (node != 0) return path.clear();
  path.push_back(0);
  std::reverse(path.begin(), path.end());
}

}  // namespace

void node_winners(const NodeWinners& a) {
  const int64_t size = a.logits.rows_per_sequence;
  std::vector<int64_t> path;
  for (int64_t b = 0; b < a.history.batch; ++b) {
    int64_t* winners = a.winners + b * size;
    std::fill(winners, winners + size, -1);
    if (a.history.cache_len[b] < 0) continue;
    const int64_t* tokens = a.tokens + b * a.token_stride;
    TargetRows rows(a.sampling, a.history, b, a.vocab, node_memory);
    for (int64_t i = 0; i < size; ++i) {
      find_path(a.parents + b * a.parent_stride, a.num_nodes, a.first_node + i, path);
      if (path.empty()) continue;
      const int64_t levels = static_cast<int64_t>(path.size());
      for (int64_t depth = 0; depth < levels; ++depth) rows.add(tokens[path[depth]], depth);
      winners[i] = rows.winner(rows.penalized({a.logits.dtype, a.logits.row(b * size + i)}),
                               levels - 1);
      for (int64_t depth = levels - 1; depth >= 0; --depth) rows.remove(tokens[path[depth]], depth);
    }
  }
}

}  // namespace specc
