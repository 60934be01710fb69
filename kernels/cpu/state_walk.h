// In which order the nodes of a tree are taken, and which states exist meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "recurrence.h"

namespace specc {

// The certain tokens of a sequence in a pass, in order, and the uncertain ones with their nodes.
struct StateSequence {
  int64_t b, place;
  bool begins;  // with the state of no token
  std::vector<int64_t> certain;
  std::vector<std::pair<int64_t, int64_t>> uncertain;  // node, token; by node
};

// Those that have a live token.
inline std::vector<StateSequence> find_sequences(const StateTokens& a) {
  std::vector<StateSequence> found;
  for (int64_t b = 0; b < a.batch; ++b) {
    StateSequence made{b, a.place(b), false, {}, {}};
    for (int64_t t = a.q_start[b]; t < a.q_start[b + 1]; ++t) {
      if (a.slot[t] < 0) continue;
      const int64_t node = a.node(b, t);
      made.begins |= a.slot[t] == 0 && node == 0;
      if (node < a.certain(b))
        made.certain.push_back(t);
      else
        made.uncertain.emplace_back(node, t);
    }
    std::stable_sort(made.uncertain.begin(), made.uncertain.end(),
                     [](const auto& x, const auto& y) { return x.first < y.first; });
    if (!made.certain.empty() || !made.uncertain.empty()) found.push_back(std::move(made));
  }
  return found;
}

// What a sequence has accepted, of nodes that its state has not seen.
struct AcceptedNodes {
  int64_t b, place;
  std::vector<int64_t> nodes;
};

// Those that have such nodes.
inline std::vector<AcceptedNodes> find_accepted(const AcceptedPaths& a) {
  std::vector<AcceptedNodes> found;
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.cache_len[b] < 0) continue;
    AcceptedNodes made{b, a.states[2 * b], {}};
    for (int64_t i = 0; i < a.length && a.source[b * a.length + i] >= 0; ++i) {
      const int64_t node = int64_t{a.source[b * a.length + i]} - a.cache_len[b];
      if (node >= a.states[2 * b + 1]) made.nodes.push_back(node);
    }
    if (!made.nodes.empty()) found.push_back(std::move(made));
  }
  return found;
}

// Which nodes a token's path goes through, of those that the state has not seen.
struct TokenPath {
  const int64_t* words;  // null: through all
  int64_t num_words, certain;

  // The last one before `node`, -1 where there is none.
  int64_t last_before(int64_t node) const {
    if (words == nullptr) return node > certain ? node - 1 : -1;
    node = std::min(node, 64 * num_words);
    for (int64_t w = (node - 1) / 64; node > certain && w >= 0; node = 64 * w, --w) {
      const int64_t end = node - 64 * w;  // 1 … 64
      const uint64_t bits = static_cast<uint64_t>(words[w]) & (~uint64_t{0} >> (64 - end));
      if (bits == 0) continue;
      const int64_t last = 64 * w + 63 - __builtin_clzll(bits);
      return last >= certain ? last : -1;
    }
    return -1;
  }
  // Whether both go through the same nodes before `node`.
  bool is_like(const TokenPath& other, int64_t node) const {
    if (words == other.words) return true;
    int64_t mine = last_before(node), its = other.last_before(node);
    while (mine == its && mine >= 0) {
      mine = last_before(mine);
      its = other.last_before(its);
    }
    return mine == its;
  }
};

inline TokenPath path_of(const StateTokens& a, int64_t b, int64_t token) {
  const int64_t* words = a.ancestors ? a.ancestors + token * a.num_words : nullptr;
  return {words, a.num_words, a.certain(b)};
}

// The nodes of a sequence that are not certain, each after its parent, which is the last node
// before it on its path. Nodes that are no tokens of this pass are taken too, where a path goes
// through them. A state is computed in the memory of its parent's where nothing else needs that any
// more; of several children the one with most below it comes last and takes it, so n nodes need
// 1 + log2(n) states at most.
class StateWalk {
 public:
  struct Step {
    int64_t node;
    int64_t token;     // -1: of an earlier pass, whose inputs are a row
    // numbers of states: from -1 is that after the certain nodes, to -1 is of no use to any other
    int64_t from, to;
  };

  StateWalk(const StateTokens& a, const StateSequence& sequence) {
    if (sequence.uncertain.empty()) return;
    at_.assign(sequence.uncertain.back().first + 1, -1);
    for (const auto& [node, token] : sequence.uncertain)
      add(node, token, path_of(a, sequence.b, token));
    count();
    walk();
  }

  const std::vector<Step>& steps() const { return steps_; }
  int64_t num_states() const { return num_states_; }

 private:
  struct Node {
    int64_t node, token, parent;
    TokenPath path;
    int64_t size = 1;                // of all below it, too
    int64_t heaviest = -1;           // of its children
    int64_t first = -1, next = -1;   // child, sibling
  };

  int64_t add_below(int64_t node, int64_t token, int64_t parent, const TokenPath& path) {
    nodes_.push_back({node, token, parent, path});
    return at_[node] = static_cast<int64_t>(nodes_.size()) - 1;
  }

  void add(int64_t node, int64_t token, const TokenPath& path) {
    missing_.clear();
    int64_t before = path.last_before(node);
    for (; before >= 0; before = path.last_before(before)) {
      const int64_t found = at_[before];
      if (found >= 0 && path.is_like(nodes_[found].path, before)) break;
      missing_.push_back(before);
    }
    int64_t parent = before < 0 ? -1 : at_[before];
    for (auto each = missing_.rbegin(); each != missing_.rend(); ++each)
      parent = add_below(*each, -1, parent, path);
    add_below(node, token, parent, path);
  }

  // Children, and how much is below each node; these come after it.
  void count() {
    for (int64_t i = static_cast<int64_t>(nodes_.size()) - 1; i >= 0; --i) {
      Node& each = nodes_[i];
      int64_t& first = each.parent < 0 ? first_ : nodes_[each.parent].first;
      each.next = first;
      first = i;
      if (each.parent < 0) continue;
      Node& parent = nodes_[each.parent];
      parent.size += each.size;
      if (parent.heaviest < 0 || nodes_[parent.heaviest].size < each.size) parent.heaviest = i;
    }
  }

  void walk() {
    struct Visit {
      int64_t node, from;
      bool is_last;  // that needs the state it comes from
    };
    std::vector<Visit> left;
    const auto visit_children = [&](int64_t first, int64_t heaviest, int64_t state) {
      if (heaviest >= 0) left.push_back({heaviest, state, true});
      for (int64_t i = first; i >= 0; i = nodes_[i].next)
        if (i != heaviest) left.push_back({i, state, false});
    };
    std::vector<int64_t> free;
    visit_children(first_, -1, -1);
    while (!left.empty()) {
      const Visit visit = left.back();
      left.pop_back();
      const Node& node = nodes_[visit.node];
      const bool is_leaf = node.first < 0;
      int64_t to = visit.is_last ? visit.from : -1;
      if (is_leaf) {
        if (to >= 0) free.push_back(to);
        to = -1;
      } else if (to < 0) {
        if (free.empty()) free.push_back(num_states_++);
        to = free.back();
        free.pop_back();
      }
      steps_.push_back({node.node, node.token, visit.from, to});
      visit_children(node.first, node.heaviest, to);
    }
  }

  std::vector<Node> nodes_;
  std::vector<int64_t> at_;  // node → its last place in nodes_
  std::vector<int64_t> missing_;
  std::vector<Step> steps_;
  int64_t first_ = -1, num_states_ = 0;
};

}  // namespace specc
