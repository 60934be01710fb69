// Slots, block ids and ranges of tokens come from outside as numbers: a wrong one would be a read
// or a write anywhere in memory. What a call does not use may be anything, as entries of a block
// table behind a sequence's last block are.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace specc {
namespace {

[[noreturn]] void refuse(const std::string& found, const std::string& needed) {
  throw std::runtime_error("specc: found " + found + ", needed " + needed);
}

std::string indexed(const char* name, int64_t index, int64_t value) {
  return std::string(name) + "[" + std::to_string(index) + "] = " + std::to_string(value);
}

std::string up_to(int64_t last) { return "0 … " + std::to_string(last); }

// Where the rows of a sequence may lie.
struct Table {
  const int32_t* ids;
  int64_t sequence, count, block_size, num_blocks;

  int64_t rows() const { return count * block_size; }
  bool is_block(int64_t index) const { return ids[index] >= 0 && ids[index] < num_blocks; }

  // Entries first … last - 1 are blocks of the cache.
  void check(int64_t first, int64_t last) const {
    // without a branch in the loop; what is wrong is looked for only where something is
    bool is_good = true;
    for (int64_t i = first; i < last; ++i) is_good &= is_block(i);
    if (is_good) return;
    while (is_block(first)) ++first;
    refuse(indexed(("block_table[" + std::to_string(sequence) + "]").c_str(), first, ids[first]),
           up_to(num_blocks - 1) + ": the cache has " + std::to_string(num_blocks) + " blocks");
  }
  [[noreturn]] void refuse_slot(const std::string& found) const {
    refuse(found + " of sequence " + std::to_string(sequence),
           up_to(rows() - 1) + ": it has " + std::to_string(count) + " blocks of " +
               std::to_string(block_size) + " rows");
  }
};

}  // namespace

void check_bounds(const TreeAttention& a) {
  constexpr int64_t kMaxPosition = std::numeric_limits<int32_t>::max();
  if (a.q_start[0] != 0) refuse(indexed("q_start", 0, a.q_start[0]), "0");
  for (int64_t b = 0; b < a.batch; ++b) {
    const Table table{a.block_table + b * a.blocks_per_sequence, b, a.blocks_per_sequence,
                      a.block_size, a.num_blocks};
    const int64_t begin = a.q_start[b], end = a.q_start[b + 1];
    if (end < begin || end > a.num_tokens)
      refuse(indexed("q_start", b + 1, end),
             std::to_string(begin) + " … " + std::to_string(a.num_tokens) +
                 ": it ascends up to the number of tokens");
    int64_t slots = 0, lowest_slot = table.rows(), lowest_position = kMaxPosition;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a.slot[t], position = a.position[t];
      if (slot < 0) continue;
      if (slot >= table.rows()) table.refuse_slot(indexed("slot", t, slot));
      if (position < 0 || position > kMaxPosition)
        refuse(indexed("position", t, position), up_to(kMaxPosition));
      slots = std::max(slots, slot + 1);
      lowest_slot = std::min(lowest_slot, slot);
      lowest_position = std::min(lowest_position, position);
    }
    if (slots == 0) continue;  // dead tokens only: nothing of the sequence is used
    const int64_t length = a.cache_len[b];
    if (length < 0 || length > table.rows())
      refuse(indexed("cache_len", b, length),
             up_to(table.rows()) + ": its sequence has " + std::to_string(table.count) +
                 " blocks of " + std::to_string(table.block_size) + " rows");
    // rows between the sink and the window of every token are not read
    int64_t uncut = a.window ? std::max<int64_t>(lowest_position - a.window + 1, 0) : 0;
    uncut = std::min({uncut, lowest_slot, a.ancestors ? length : slots});
    const int64_t block_size = table.block_size;
    const int64_t first = uncut / block_size;
    const int64_t sink = std::clamp<int64_t>(a.sink, 0, slots);
    table.check(0, std::min(first, (sink + block_size - 1) / block_size));
    table.check(first, (slots + block_size - 1) / block_size);
  }
}

void check_bounds(const CommitKV& a) {
  for (int64_t b = 0; b < a.batch; ++b) {
    const Table table{a.block_table + b * a.blocks_per_sequence, b, a.blocks_per_sequence,
                      a.block_size, a.blocks};
    for (int64_t i = b * a.moves; i < (b + 1) * a.moves; ++i) {
      const int64_t from = a.source[i], to = a.target[i];
      if (from < 0 || to < 0) continue;
      if (from >= table.rows()) table.refuse_slot(indexed("source", i - b * a.moves, from));
      if (to >= table.rows()) table.refuse_slot(indexed("target", i - b * a.moves, to));
      if (from == to) continue;
      for (const int64_t slot : {from, to})
        table.check(slot / table.block_size, slot / table.block_size + 1);
    }
  }
}

}  // namespace specc
