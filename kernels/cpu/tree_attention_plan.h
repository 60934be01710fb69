// How specc::tree_attention splits its work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "tree_attention_bits.h"

namespace specc::attention {

constexpr int kMaxRows = 128;  // query rows of an item, so that its scores stay in the L2 cache
// A unit's accumulators, its tile and the next one, which is being fetched, stay there, too.
constexpr int kMaxUnitRows = 256;
constexpr int64_t kMaxUnitBytes = 256 << 10;  // of K and V of a tile
constexpr int64_t kTilesPerThread = 4;        // rather fewer heads in a unit than fewer of these
// Threads cut the line of tiles between pieces of so many, which have sums of their own: pieces are
// the same for any number of threads, and are added in their order.
constexpr int kPieceTiles = 4;

// A sequence's block of query rows: some tokens, times the query heads of one KV head.
struct Item {
  int32_t sequence;
  int32_t first, tokens;           // in Plan::live
  int64_t end;                     // its tokens see slots below
  // Columns below: a token's committed rows have the columns of their slots, its nodes of the tree
  // those after them, one after the other.
  int64_t end_column;
  int64_t sink_tiles, first_tile;  // what is read: tiles 0 … sink_tiles - 1, then first_tile …
  int64_t num_tiles;
  int64_t units;                   // its KV heads are cut into this many parts
  int64_t tile_cost;               // of a unit
  int64_t start;                   // cost of all items before this one

  int64_t column(int64_t index) const {
    return (index < sink_tiles ? index : first_tile + index - sink_tiles) * kTile;
  }
  // Whether a piece begins with this tile; so does what comes after the last one.
  bool begins_piece(int64_t index) const {
    const auto piece = [this](int64_t i) { return column(i) / (kTile * kPieceTiles); };
    return index == 0 || index == num_tiles || piece(index) != piece(index - 1);
  }
  int64_t pieces(int64_t first, int64_t last) const {
    int64_t count = 0;
    for (int64_t index = first; index < last; ++index) count += begins_piece(index);
    return count;
  }
  int64_t first_head(int64_t unit, int64_t num_kv_heads) const {
    return num_kv_heads * unit / units;
  }
};

// A place in the line of all tiles, where a piece begins: items in order, in each its units, in
// each its tiles.
struct Place {
  int64_t item = 0, unit = 0, tile = 0;
  bool same_unit(const Place& other) const { return item == other.item && unit == other.unit; }
};

struct Plan {
  std::vector<int32_t> live;  // tokens that are not dead, by sequence
  std::vector<Path> paths;    // what they see of their trees; none without trees
  std::vector<Item> items;
  int64_t cost;
  int64_t max_rows, max_unit_rows;  // query rows of one KV head, and of a unit
  // sums of each thread: of the unit that it began, and of pieces of the one that it went on with
  std::vector<float*> kept, kept_pieces;

  void build(const TreeAttention& a, int threads);
  Place place(int64_t at) const;
};

inline void Plan::build(const TreeAttention& a, int threads) {
  live.clear();
  paths.clear();
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
    for (size_t i = begin; a.ancestors && i < live.size(); ++i)
      paths.push_back(path_before(a.ancestors + live[i] * a.num_words, a.num_words,
                                  slots - a.cache_len[b]));
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
      item.end = item.end_column = a.ancestors ? slots : std::min(slots, highest + 1);
      if (a.ancestors) {
        int32_t nodes = 0;
        for (int32_t i = 0; i < item.tokens; ++i)
          nodes = std::max(nodes, paths[first + i].nodes);
        item.end_column = std::min<int64_t>(slots, a.cache_len[b]) + nodes;
      }
      // columns from `sink` to `uncut` are cut for all tokens: they are not read
      int64_t uncut = a.first_column(lowest);
      if (a.ancestors) uncut = std::min<int64_t>(uncut, a.cache_len[b]);
      item.first_tile = uncut / kTile;
      item.sink_tiles = std::min((a.sink + kTile - 1) / kTile, item.first_tile);
      const int64_t end_tile = (item.end_column + kTile - 1) / kTile;
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
  Place place{next - 1 - items.begin(), tile / item.num_tiles, tile % item.num_tiles};
  int64_t before = place.tile, after = place.tile;
  while (!item.begins_piece(before)) --before;
  while (!item.begins_piece(after)) ++after;
  place.tile = place.tile - before <= after - place.tile ? before : after;
  if (place.tile == item.num_tiles) {
    place.tile = 0;
    if (++place.unit == item.units) place.unit = 0, ++place.item;
  }
  return place;
}

}  // namespace specc::attention
