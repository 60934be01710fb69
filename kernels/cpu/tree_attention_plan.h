// How specc::tree_attention splits its work, and which keys a token sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace specc::attention {

constexpr int kTile = 64;      // keys of a tile: the bits of a word
constexpr int kMaxRows = 128;  // query rows of an item, so that its scores stay in the L2 cache
// A unit's accumulators, its tile and the next one, which is being fetched, stay there, too.
constexpr int kMaxUnitRows = 256;
constexpr int64_t kMaxUnitBytes = 256 << 10;  // of K and V of a tile
constexpr int64_t kTilesPerThread = 4;        // rather fewer heads in a unit than fewer of these

// Bits of the tile from column `tile` on that lie in [first, last).
inline uint64_t range_bits(int64_t tile, int64_t first, int64_t last) {
  const int64_t low = std::max<int64_t>(first - tile, 0);
  const int64_t high = std::min<int64_t>(last - tile, kTile);
  if (low >= high) return 0;
  return (~uint64_t{0} >> (kTile - (high - low))) << low;
}

// Bits node … node + 63 of a token's ancestors; nodes below 0 are none.
inline uint64_t ancestor_bits(const int64_t* words, int64_t num_words, int64_t node) {
  if (node <= -kTile) return 0;
  const auto word = [=](int64_t w) {
    return w < num_words ? static_cast<uint64_t>(words[w]) : uint64_t{0};
  };
  if (node < 0) return word(0) << -node;
  const int64_t w = node / 64, shift = node % 64;
  return shift ? word(w) >> shift | word(w + 1) << (64 - shift) : word(w);
}

// Of these bits, which begin at `node`, the nodes among the last `most` of a token's path.
inline uint64_t last_of_path(const int64_t* words, int64_t num_words, int64_t node, uint64_t bits,
                             int64_t most) {
  if (most >= 64 * num_words) return bits;
  for (int64_t later = node + kTile; later < 64 * num_words; later += kTile)
    most -= __builtin_popcountll(ancestor_bits(words, num_words, later));
  while (bits && __builtin_popcountll(bits) > most) bits &= bits - 1;
  return bits;
}

// Positions of the keys of the tile from column `tile` on, as a token sees them: region nodes that
// it sees are its path from the root, and count back from it. What it does not see has any.
inline void key_positions(const TreeAttention& a, int64_t sequence, int64_t token, int64_t tile,
                          float* to) {
  const int64_t length = a.ancestors ? a.cache_len[sequence] : tile + kTile;
  const int64_t prefix = std::clamp<int64_t>(length - tile, 0, kTile);
  for (int64_t i = 0; i < prefix; ++i) to[i] = static_cast<float>(tile + i);
  if (prefix == kTile) return;
  const int64_t* words = a.ancestors + token * a.num_words;
  // nodes of the path from the first one of this tile on
  int64_t after = 0;
  for (int64_t node = tile + prefix - length; node < 64 * a.num_words; node += 64)
    after += __builtin_popcountll(ancestor_bits(words, a.num_words, node));
  const uint64_t bits = ancestor_bits(words, a.num_words, tile - length);
  for (int64_t i = prefix; i < kTile; ++i) {
    after -= bits >> i & 1;
    to[i] = static_cast<float>(a.position[token] - after);
  }
}

// A sequence's block of query rows: some tokens, times the query heads of one KV head.
struct Item {
  int32_t sequence;
  int32_t first, tokens;           // in Plan::live
  int64_t end;                     // its tokens see slots below
  int64_t sink_tiles, first_tile;  // what is read: tiles 0 … sink_tiles - 1, then first_tile …
  int64_t num_tiles;
  int64_t units;                   // its KV heads are cut into this many parts
  int64_t tile_cost;               // of a unit
  int64_t start;                   // cost of all items before this one

  int64_t column(int64_t index) const {
    return (index < sink_tiles ? index : first_tile + index - sink_tiles) * kTile;
  }
  int64_t first_head(int64_t unit, int64_t num_kv_heads) const {
    return num_kv_heads * unit / units;
  }
};

// A place in the line of all tiles: items in order, in each its units, in each its tiles.
struct Place {
  int64_t item = 0, unit = 0, tile = 0;
  bool same_unit(const Place& other) const { return item == other.item && unit == other.unit; }
};

struct Plan {
  std::vector<int32_t> live;  // tokens that are not dead, by sequence
  std::vector<Item> items;
  int64_t cost;
  int64_t max_rows, max_unit_rows;  // query rows of one KV head, and of a unit
  std::vector<float> partial;  // two accumulators a thread, for items that were cut

  void build(const TreeAttention& a, int threads);
  Place place(int64_t at) const;
};

inline void Plan::build(const TreeAttention& a, int threads) {
  live.clear();
  items.clear();
  cost = max_rows = max_unit_rows = 0;
  const int64_t item_size = a.holds_int8 ? 1 : a.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t head_bytes = kTile * (a.head_dim + a.value_dim) * item_size;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t tokens_per_item = std::max<int64_t>(1, kMaxRows / group);
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.leaves_out(b)) continue;
    const size_t begin = live.size();
    int64_t slots = 0;
    for (int32_t t = a.q_start[b]; t < a.q_start[b + 1]; ++t) {
      if (a.slot[t] < 0) continue;
      live.push_back(t);
      slots = std::max<int64_t>(slots, a.slot[t] + 1);
    }
    for (size_t first = begin; first < live.size(); first += tokens_per_item) {
      Item item;
      item.sequence = static_cast<int32_t>(b);
      item.first = static_cast<int32_t>(first);
      item.tokens = static_cast<int32_t>(std::min<int64_t>(tokens_per_item, live.size() - first));
      int64_t lowest = a.position[live[first]], highest = lowest;
      for (int32_t i = 1; i < item.tokens; ++i) {
        lowest = std::min(lowest, a.position[live[first + i]]);
        highest = std::max(highest, a.position[live[first + i]]);
      }
      item.end = a.ancestors ? slots : std::min(slots, highest + 1);
      // columns from `sink` to `uncut` are cut for all tokens: they are not read
      int64_t uncut = a.first_column(lowest);
      if (a.ancestors) uncut = std::min<int64_t>(uncut, a.cache_len[b]);
      item.first_tile = uncut / kTile;
      item.sink_tiles = std::min((a.sink + kTile - 1) / kTile, item.first_tile);
      const int64_t end_tile = (item.end + kTile - 1) / kTile;
      item.num_tiles =
          std::max<int64_t>(item.sink_tiles + std::max<int64_t>(end_tile - item.first_tile, 0), 1);
      const int64_t rows = item.tokens * group;
      int64_t heads = std::min(kMaxUnitRows / rows, kMaxUnitBytes / head_bytes);
      heads = std::clamp<int64_t>(heads, 1, a.num_kv_heads);
      const int64_t wanted = threads > 1 ? kTilesPerThread * threads : 1;
      while (heads > 1 && item.num_tiles * ((a.num_kv_heads + heads - 1) / heads) < wanted)
        heads /= 2;
      item.units = (a.num_kv_heads + heads - 1) / heads;
      heads = (a.num_kv_heads + item.units - 1) / item.units;
      // reading and transposing a tile costs as much as some rows
      item.tile_cost = kTile * (a.head_dim + a.value_dim) * (rows + 6) * heads;
      item.start = cost;
      cost += item.num_tiles * item.tile_cost * item.units;
      max_rows = std::max(max_rows, rows);
      max_unit_rows = std::max(max_unit_rows, rows * heads);
      items.push_back(item);
    }
  }
}

inline Place Plan::place(int64_t at) const {
  if (at >= cost) return {static_cast<int64_t>(items.size()), 0, 0};
  const auto next = std::upper_bound(items.begin(), items.end(), at,
                                     [](int64_t x, const Item& item) { return x < item.start; });
  const Item& item = *(next - 1);
  const int64_t tile = (at - item.start) / item.tile_cost;
  return {next - 1 - items.begin(), tile / item.num_tiles, tile % item.num_tiles};
}

}  // namespace specc::attention
