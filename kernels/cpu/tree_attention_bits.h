// Which keys a token sees, as bits of a tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace specc::attention {

constexpr int kTile = 64;  // keys of a tile: the bits of a word

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

// Of a token's nodes before `last`, how many it sees, and one more than the last one of these.
struct Path {
  int32_t nodes = 0, end = 0;

  // Whether these are the first nodes of the region, so that each lies where its path has it.
  bool is_chain() const { return nodes == end; }
};
inline Path path_before(const int64_t* words, int64_t num_words, int64_t last) {
  Path path;
  for (int64_t node = 0; node < std::min(last, 64 * num_words); node += kTile) {
    const uint64_t bits = ancestor_bits(words, num_words, node) & range_bits(node, 0, last);
    if (!bits) continue;
    path.nodes += __builtin_popcountll(bits);
    path.end = static_cast<int32_t>(node + kTile - __builtin_clzll(bits));
  }
  return path;
}

// Of these bits those that are not among the first `skipped`, nor after the first `most`.
inline uint64_t middle_bits(uint64_t bits, int64_t skipped, int64_t most) {
  while (bits && __builtin_popcountll(bits) > std::max<int64_t>(most, 0))
    bits &= ~(uint64_t{1} << (63 - __builtin_clzll(bits)));
  for (; bits && skipped > 0; --skipped) bits &= bits - 1;
  return bits;
}

}  // namespace specc::attention
