// Where the keys of a tile lie, and which of them each token sees.
//
// A tile is kTile columns of what plain decoding would have: committed rows, which lie in the slots
// of these numbers, then the nodes of a token's path, one after the other. A path's nodes may lie
// anywhere among a tree's; of each part of the region a tile takes those that are its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "tree_attention_bits.h"
#include "tree_attention_plan.h"

namespace specc::attention {

constexpr int64_t kInPlace = -1;  // keys lie in slots of the numbers of their columns

// kTile slots, some of whose keys are of a tile.
struct Part {
  int64_t slot;             // the first of them
  uint64_t seen;            // keys that any token sees
  uint64_t bits[kMaxRows];  // keys that each token of the item sees
  // Of each token: where in the tile the first node among its keys belongs, or kInPlace.
  int64_t place[kMaxRows];
  int64_t prefix;  // keys before these are committed rows

  int64_t count() const { return seen ? kTile - __builtin_clzll(seen) : 0; }
};

class View {
 public:
  // parts: memory, which only ever grows.
  View(const TreeAttention& a, const Plan& plan, std::vector<Part>& parts)
      : a_(a), plan_(plan), parts_(parts) {}

  // The tile from column `tile` on; parts that no token sees are left out.
  void find(const Item& item, int64_t tile);
  int64_t size() const { return size_; }
  const Part& operator[](int64_t i) const { return parts_[i]; }

 private:
  Part& next(int64_t slot);
  uint64_t committed(const Item& item, int64_t token, int64_t tile) const;
  void find_nodes(const Item& item, int64_t tile);

  const TreeAttention& a_;
  const Plan& plan_;
  std::vector<Part>& parts_;
  int64_t size_ = 0;
};

inline Part& View::next(int64_t slot) {
  if (size_ == static_cast<int64_t>(parts_.size())) parts_.emplace_back();
  Part& part = parts_[size_];
  part.slot = slot;
  part.seen = 0;
  return part;
}

inline uint64_t View::committed(const Item& item, int64_t token, int64_t tile) const {
  const int64_t position = a_.position[token];
  const int64_t last = a_.ancestors ? a_.cache_len[item.sequence] : position + 1;
  uint64_t bits = range_bits(tile, 0, std::min(last, item.end));
  if (a_.window)
    bits &= range_bits(tile, position - a_.window + 1, tile + kTile) | range_bits(tile, 0, a_.sink);
  if (a_.chunk) bits &= range_bits(tile, position - position % a_.chunk, tile + kTile);
  return bits;
}

inline void View::find(const Item& item, int64_t tile) {
  size_ = 0;
  if (a_.ancestors && tile + kTile > a_.cache_len[item.sequence]) return find_nodes(item, tile);
  Part& part = next(tile);
  part.prefix = kTile;
  for (int64_t i = 0; i < item.tokens; ++i) {
    part.seen |= part.bits[i] = committed(item, plan_.live[item.first + i], tile);
    part.place[i] = kInPlace;
  }
  size_ = part.seen != 0;
}

inline void View::find_nodes(const Item& item, int64_t tile) {
  const int64_t length = a_.cache_len[item.sequence];
  // of a path, the nodes of these numbers are of this tile; a node's number in the region is no
  // smaller than that in its path
  const int64_t first = std::max<int64_t>(tile - length, 0), last = tile + kTile - length;
  bool goes_on = true;
  for (int64_t slot = tile; goes_on && slot < item.end; slot += kTile) {
    Part& part = next(slot);
    part.prefix = std::clamp<int64_t>(length - slot, 0, kTile);
    goes_on = false;
    for (int64_t i = 0; i < item.tokens; ++i) {
      const int64_t token = plan_.live[item.first + i];
      const Path path = plan_.paths[item.first + i];
      const int64_t* words = a_.ancestors + token * a_.num_words;
      const auto cut = [&](uint64_t bits) {
        if (!a_.chunk) return bits;
        const int64_t most = a_.position[token] % a_.chunk + 1;
        return last_of_path(words, a_.num_words, slot - length, bits, most);
      };
      part.place[i] = kInPlace;
      uint64_t bits = slot == tile ? committed(item, token, tile) : 0;
      if (path.is_chain()) {
        if (slot == tile) bits |= cut(range_bits(slot, length, length + path.nodes));
      } else {
        const uint64_t nodes = ancestor_bits(words, a_.num_words, slot - length) &
                               range_bits(slot, length, item.end);
        const int64_t before = path_before(words, a_.num_words, slot - length).nodes;
        const int64_t after = before + __builtin_popcountll(nodes);
        const uint64_t own = middle_bits(nodes, first - before, last - before) & cut(nodes);
        if (own) {
          const uint64_t skipped = nodes & ((own & -own) - 1);
          const int64_t column = length + before + __builtin_popcountll(skipped);
          const int64_t lies = slot + __builtin_ctzll(own);
          const uint64_t run = own >> __builtin_ctzll(own);
          if (column != lies || (run & (run + 1))) part.place[i] = column - tile;
        }
        goes_on |= after < std::min<int64_t>(path.nodes, last);
        bits |= own;
      }
      part.seen |= part.bits[i] = bits;
    }
    size_ += part.seen != 0;
  }
}

}  // namespace specc::attention
