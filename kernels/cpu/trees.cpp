// Trees that come as data: several drafts' trees merged, the best nodes of a candidate tree, what
// attention needs of them, and a vote. The oracles are in kernels/reference/sampling.py and
// kernels/reference/trees.py.
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels.h"

namespace specc {
namespace {

// Merged nodes by parent and token; it holds ids, the nodes themselves lie in the outputs.
class NodeTable {
 public:
  explicit NodeTable(int64_t num_nodes)
      : shift_(64 - std::bit_width(static_cast<uint64_t>(2 * num_nodes))),
        places_(uint64_t{1} << (64 - shift_)) {}

  void clear() { std::fill(places_.begin(), places_.end(), -1); }

  // Where the node is, or -1 at the place that it would take.
  int32_t& find(const int64_t* tokens, const int32_t* parents, int64_t token, int32_t parent) {
    const uint64_t mixed =
        (static_cast<uint64_t>(token) ^ static_cast<uint64_t>(parent) << 40) * 0x9E3779B97F4A7C15;
    uint64_t at = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 >> shift_;
    // half of the places stay free, so that there is an end
    for (;; at = (at + 1) & (places_.size() - 1)) {
      const int32_t node = places_[at];
      if (node < 0 || (tokens[node] == token && parents[node] == parent)) return places_[at];
    }
  }

 private:
  int shift_;
  std::vector<int32_t> places_;
};

// Sorts as rerank_tree ranks candidates: the root, then by descending score, -inf, NaN; equal
// ones by ascending index. All differ.
uint64_t rank_key(const float* scores, int64_t candidate) {
  uint32_t bits, order;
  std::memcpy(&bits, scores + candidate, sizeof bits);
  if (candidate == 0) {
    order = 0xFFFFFFFF;
  } else if ((bits & 0x7FFFFFFF) > 0x7F800000) {
    order = 0;
  } else if ((bits & 0x7FFFFFFF) == 0) {
    order = 0x80000000;  // 0 and -0 are equal
  } else {
    order = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  }
  return uint64_t{order} << 32 | (0xFFFFFFFF - static_cast<uint32_t>(candidate));
}

}  // namespace

void merge_trees(const MergeTrees& a) {
  const int64_t num_nodes = a.nodes();
  NodeTable table(num_nodes);
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t* tokens = a.tokens + b * a.token_stride;
    const int32_t* parents = a.parents + b * a.parent_stride;
    int64_t* out_tokens = a.out_tokens + b * num_nodes;
    int32_t* out_parents = a.out_parents + b * num_nodes;
    int32_t* image = a.image + b * a.total;
    int32_t* count = a.count + b * num_nodes;
    std::fill(out_tokens, out_tokens + num_nodes, 0);
    std::fill(out_parents, out_parents + num_nodes, -1);
    std::fill(count, count + num_nodes, 0);
    table.clear();
    // all roots are one node, the first tree's
    out_tokens[0] = tokens[0];
    count[0] = static_cast<int32_t>(a.num_trees);
    int32_t found = 1;
    for (int64_t s = 0; s < a.num_trees; ++s) {
      const int64_t first = a.start[s];
      image[first] = 0;
      for (int64_t column = first + 1; column < a.start[s + 1]; ++column) {
        const int64_t parent = parents[column];
        image[column] = -1;
        if (parent < 0 || parent >= column - first) continue;
        const int32_t above = image[first + parent];
        if (above < 0) continue;
        int32_t& node = table.find(out_tokens, out_parents, tokens[column], above);
        if (node < 0) {
          node = found++;
          out_tokens[node] = tokens[column];
          out_parents[node] = above;
        }
        image[column] = node;
        ++count[node];
      }
    }
  }
}

void rerank_tree(const RerankTree& a) {
  std::vector<uint64_t> keys(a.num_candidates), order(a.num_candidates);
  std::vector<int32_t> place(a.num_candidates);
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t* tokens = a.tokens + b * a.token_stride;
    const int32_t* parents = a.parents + b * a.parent_stride;
    for (int64_t i = 0; i < a.num_candidates; ++i)
      keys[i] = rank_key(a.scores + b * a.score_stride, i);
    order = keys;
    const auto last = order.begin() + (a.num_nodes - 1);
    std::nth_element(order.begin(), last, order.end(), std::greater<>());
    const uint64_t bound = *last;
    int32_t kept = 0;
    for (int64_t i = 0; i < a.num_candidates; ++i) place[i] = keys[i] >= bound ? kept++ : -1;
    for (int64_t i = 0; i < a.num_candidates; ++i) {
      if (place[i] < 0) continue;
      const int64_t at = b * a.num_nodes + place[i], parent = parents[i];
      const bool has_parent = parent >= 0 && parent < a.num_candidates;
      a.out_tokens[at] = tokens[i];
      a.out_parents[at] = has_parent ? place[parent] : -1;
      a.kept[at] = static_cast<int32_t>(i);
    }
  }
}

void ancestor_words(const AncestorWords& a) {
  for (int64_t b = 0; b < a.batch; ++b) {
    const int32_t* parents = a.parents + b * a.parent_stride;
    int64_t* words = a.words + b * a.num_nodes * a.num_words;
    int32_t* depths = a.depths + b * a.num_nodes;
    std::fill(words, words + a.num_nodes * a.num_words, 0);
    for (int64_t node = 0; node < a.num_nodes; ++node) {
      const int64_t parent = parents[node];
      int64_t* own = words + node * a.num_words;
      depths[node] = 0;
      if (parent < 0 && node > 0) continue;  // dead
      // words after the parent's own are 0; a dead parent has no bits, not even its own
      if (parent >= 0 && parent < node) {
        const int64_t* above = words + parent * a.num_words;
        std::copy(above, above + parent / 64 + 1, own);
        depths[node] = depths[parent] + (above[parent / 64] >> parent % 64 & 1);
      }
      own[node / 64] |= static_cast<int64_t>(uint64_t{1} << node % 64);
    }
  }
}

void image_slots(const ImageSlots& a) {
  for (int64_t b = 0; b < a.batch; ++b) {
    const int32_t* image = a.image + b * a.image_stride;
    const int32_t* slots = a.slots + b * a.slot_stride;
    int32_t* out = a.out + b * a.num_nodes;
    std::fill(out, out + a.num_nodes, -1);
    // backwards: the first one with a row stays
    for (int64_t i = a.num_own - 1; i >= 0; --i)
      if (image[i] >= 0 && image[i] < a.num_nodes && slots[i] >= 0) out[image[i]] = slots[i];
  }
}

void vote_chain(const VoteChain& a) {
  std::vector<int64_t> agree;  // drafts, in ascending order
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t* tokens = a.tokens + b * a.num_drafts * a.length;
    const float* weights = a.weights + b * a.num_drafts;
    int64_t* out = a.out + b * a.length;
    agree.resize(a.num_drafts);
    for (int64_t s = 0; s < a.num_drafts; ++s) agree[s] = s;
    for (int64_t i = 0; i < a.length; ++i) {
      const auto token_of = [&](int64_t s) { return tokens[s * a.length + i]; };
      std::erase_if(agree, [&](int64_t s) { return token_of(s) < 0; });
      int64_t best = -1;
      float most = -1.0f;
      for (const int64_t s : agree) {
        // what is fast to compute may not change the order of the sum
        volatile float votes = 0.0f;
        for (const int64_t other : agree)
          if (token_of(other) == token_of(s)) votes = votes + weights[other];
        if (votes > most) {
          most = votes;
          best = token_of(s);
        }
      }
      out[i] = best;
      std::erase_if(agree, [&](int64_t s) { return token_of(s) != best; });
    }
  }
}

}  // namespace specc
