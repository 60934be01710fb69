// Slots, block ids and ranges of tokens come from outside as numbers: a wrong one would be a read
// or a write anywhere in memory. What a call does not use may be anything, as entries of a block
// table after a sequence's last block are.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "fused.h"
#include "kernels.h"
#include "recurrence.h"
#include "refusal.h"

namespace specc {
namespace {

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Where the rows of a sequence may lie.
struct Table {
  const int32_t* ids;
  int64_t sequence, count, block_size, num_blocks;

  int64_t rows() const { return count * block_size; }
  bool is_block(int64_t index) const { return ids[index] >= 0 && ids[index] < num_blocks; }

  // Entries first … last - 1 are blocks of the cache.
  void check(int64_t first, int64_t last) const {
    // without a branch in the loop; what is wrong is looked for only where something is
    uint32_t highest = 0;  // below 0 is above all
    for (int64_t i = first; i < last; ++i)
      highest = std::max(highest, static_cast<uint32_t>(ids[i]));
    if (first >= last || highest < num_blocks) return;
    while (is_block(first)) ++first;
    refuse(indexed("block_table[" + std::to_string(sequence) + "]", first, ids[first]),
           up_to(num_blocks - 1) + ": the cache has " + std::to_string(num_blocks) + " blocks");
  }
  void check_slot(const char* name, int64_t place, int64_t slot) const {
    if (slot >= rows()) refuse_slot(indexed(name, place, slot));
  }
  [[noreturn]] void refuse_length(int64_t length) const {
    refuse(indexed("cache_len", sequence, length),
           up_to(rows()) + ": its sequence has " + std::to_string(count) + " blocks of " +
               std::to_string(block_size) + " rows");
  }
  [[noreturn]] void refuse_slot(const std::string& found) const {
    refuse(found + " of sequence " + std::to_string(sequence),
           up_to(rows() - 1) + ": it has " + std::to_string(count) + " blocks of " +
               std::to_string(block_size) + " rows");
  }
};

Table table_of(const History& a, int64_t b) {
  return {a.block_table + b * a.blocks_per_sequence, b, a.blocks_per_sequence, a.block_size,
          a.num_blocks};
}

struct Range {
  int64_t begin, end;
};

void check_begin(const int32_t* q_start) {
  if (q_start[0] != 0) refuse(indexed("q_start", 0, q_start[0]), "0");
}

// Tokens of a sequence among those of a pass.
Range tokens_of(const int32_t* q_start, int64_t b, int64_t num_tokens) {
  const int64_t begin = q_start[b], end = q_start[b + 1];
  if (end < begin || end > num_tokens)
    refuse(indexed("q_start", b + 1, end),
           std::to_string(begin) + " … " + std::to_string(num_tokens) +
               ": it ascends up to the number of tokens");
  return {begin, end};
}

// Every row that is not dead lies in a block of its sequence.
template <class Rows>
void check_slots(const Rows& a, int64_t per_token) {
  check_begin(a.q_start);
  for (int64_t b = 0; b < a.batch; ++b) {
    const Table table{a.block_table + b * a.blocks_per_sequence, b, a.blocks_per_sequence,
                      a.block_size, a.num_blocks};
    const auto [begin, end] = tokens_of(a.q_start, b, a.num_tokens);
    for (int64_t i = begin * per_token; i < end * per_token; ++i) {
      const int64_t slot = a.slot[i];
      if (slot < 0) continue;
      table.check_slot("slot", i, slot);
      table.check(slot / table.block_size, slot / table.block_size + 1);
    }
  }
}

// Sequences have places of their own.
class Places {
 public:
  explicit Places(int64_t count) : count_(count) {}

  void take(int64_t sequence, int64_t place, int64_t certain) {
    const std::string name = "states[" + std::to_string(sequence) + "]";
    if (place < 0 || place >= count_)
      refuse(indexed(name, 0, place),
             up_to(count_ - 1) + ": there are " + std::to_string(count_) + " states");
    if (certain < 0) refuse(indexed(name, 1, certain), "0 or more nodes that are certain");
    if (std::find(taken_.begin(), taken_.end(), place) != taken_.end())
      refuse(indexed(name, 0, place), "a place that no other sequence has");
    taken_.push_back(place);
  }

 private:
  const int64_t count_;
  std::vector<int64_t> taken_;
};

}  // namespace

void check_bounds(const StateTokens& a) {
  check_begin(a.q_start);
  Places places(a.num_states);
  for (int64_t b = 0; b < a.batch; ++b) {
    const auto [begin, end] = tokens_of(a.q_start, b, a.num_tokens);
    int64_t next = 0;
    for (int64_t t = begin, live = 0; t < end; ++t) {
      if (a.slot[t] < 0) continue;
      if (live++ == 0) {
        places.take(b, a.place(b), a.certain(b));
        if (a.cache_len[b] < 0) refuse(indexed("cache_len", b, a.cache_len[b]), "0 or more");
      }
      const int64_t node = a.node(b, t);
      const auto found = [&] {
        return indexed("slot", t, a.slot[t]) + ", which is node " + std::to_string(node);
      };
      if (node < a.certain(b) && node != next++)
        refuse(found(), "certain nodes in order, from node 0 on");
      if (node >= a.num_rows && node >= a.certain(b))
        refuse(found(), "nodes " + up_to(a.num_rows - 1) + ": a state has " +
                            std::to_string(a.num_rows) + " replay rows");
    }
  }
}

void check_bounds(const AcceptedPaths& a) {
  Places places(a.num_states);
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.cache_len[b] < 0) continue;
    const int32_t* source = a.source + b * a.length;
    int64_t last = int64_t{a.states[2 * b + 1]} - 1;
    for (int64_t i = 0; i < a.length && source[i] >= 0; ++i) {
      if (i == 0) places.take(b, a.states[2 * b], a.states[2 * b + 1]);
      const int64_t node = int64_t{source[i]} - a.cache_len[b];
      if (node < a.states[2 * b + 1]) continue;
      if (node <= last || node >= a.num_rows)
        refuse(indexed("source[" + std::to_string(b) + "]", i, source[i]) + ", which is node " +
                   std::to_string(node),
               "nodes that ascend up to " + std::to_string(a.num_rows - 1));
      last = node;
    }
  }
}

void check_bounds(const TreeAttention& a) {
  constexpr int64_t kMaxPosition = std::numeric_limits<int32_t>::max();
  check_begin(a.q_start);
  for (int64_t b = 0; b < a.batch; ++b) {
    const Table table{a.block_table + b * a.blocks_per_sequence, b, a.blocks_per_sequence,
                      a.block_size, a.num_blocks};
    const auto [begin, end] = tokens_of(a.q_start, b, a.num_tokens);
    int64_t slots = 0, lowest_slot = table.rows(), lowest_position = kMaxPosition;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a.slot[t], position = a.position[t];
      if (slot < 0) continue;
      table.check_slot("slot", t, slot);
      if (position < 0 || position > kMaxPosition)
        refuse(indexed("position", t, position), up_to(kMaxPosition));
      slots = std::max(slots, slot + 1);
      lowest_slot = std::min(lowest_slot, slot);
      lowest_position = std::min(lowest_position, position);
    }
    if (slots == 0) continue;  // dead tokens only: nothing of the sequence is used
    const int64_t length = a.cache_len[b];
    if (length < 0 || length > table.rows()) table.refuse_length(length);
    // rows between the sink and the first that any token sees are not read
    int64_t uncut = a.first_column(lowest_position);
    uncut = std::min({uncut, lowest_slot, a.ancestors ? length : slots});
    const int64_t block_size = table.block_size;
    const int64_t first = uncut / block_size;
    const int64_t sink = std::clamp<int64_t>(a.sink, 0, slots);
    table.check(0, std::min(first, divide_up(sink, block_size)));
    table.check(first, divide_up(slots, block_size));
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

void check_bounds(const SlabRows& a) { check_slots(a, a.per_token); }

void check_bounds(const WriteKV& a) { check_slots(a, 1); }

void check_bounds(const MergeTrees& a) {
  const int64_t trees = a.num_trees;
  bool is_good = a.start[0] == 0 && a.start[trees] == a.total;
  for (int64_t s = 0; s < trees; ++s) is_good &= a.start[s] < a.start[s + 1];
  if (is_good) return;
  std::string found;
  for (int64_t s = 0; s <= trees; ++s) found += (s ? ", " : "") + std::to_string(a.start[s]);
  refuse("start = " + found,
         "numbers that ascend from 0 to " + std::to_string(a.total) + ": every tree has a root");
}

void check_history(const History& a, int64_t b) {
  const Table table = table_of(a, b);
  const int64_t length = a.cache_len[b];
  if (length <= 0) return;
  if (length > table.rows()) table.refuse_length(length);
  table.check(0, divide_up(length, table.block_size));
}

void check_bounds(const Lookup& a) {
  for (int64_t b = 0; b < a.history.batch; ++b) check_history(a.history, b);
}

void check_bounds(const RecordTokens& a) {
  for (int64_t b = 0; b < a.history.batch; ++b) {
    const Table table = table_of(a.history, b);
    const int64_t length = a.history.cache_len[b], accepted = a.num_accepted[b];
    if (length < 0) continue;
    if (accepted < 0 || accepted >= a.width)
      refuse(indexed("num_accepted", b, accepted), up_to(a.width - 1));
    // the bonus token, after what is committed, may have no row
    const int64_t committed = length + 1 + accepted;
    if (committed > table.rows()) table.refuse_length(committed);
    table.check(length / table.block_size, divide_up(committed, table.block_size));
  }
}

}  // namespace specc
