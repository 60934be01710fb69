// Prompt lookup in the token history of each sequence, and what a step adds to it. The oracles are
// lookup_reference and record_tokens_reference.
#include <algorithm>
#include <bit>
#include <cstring>

#ifdef __SSE__
#include <immintrin.h>
#endif

#include "kernels.h"
#include "vec.h"

namespace specc {
namespace {

using vec::Int;
using vec::kWidth;

// Tokens that lie in one piece when they are looked at: they fit in the first cache.
constexpr int64_t kChunk = 2048;
// Places that are compared at once.
constexpr int kLanes = 4 * kWidth;
// Tokens of a suffix that are compared for all lanes; the rest, place by place.
constexpr int64_t kReach = 32;
// Before a chunk: what its first lanes and their suffixes reach.
constexpr int64_t kRoom = kReach + kLanes;

// Bit i is set where p[i] is x.
uint64_t equal_bits(const int32_t* p, int32_t x) {
  uint64_t bits = 0;
  for (int i = 0; i < kLanes; i += kWidth) {
    Int own;
    std::memcpy(&own, p + i, sizeof own);
    const Int other = Int{} + x;
    uint32_t mask = 0;
#if defined(__AVX512F__)
    mask = _mm512_cmpeq_epi32_mask((__m512i)own, (__m512i)other);
#elif defined(__AVX__)
    mask = static_cast<uint32_t>(_mm256_movemask_ps((__m256)(own == other)));
#elif defined(__SSE__)
    mask = static_cast<uint32_t>(_mm_movemask_ps((__m128)(own == other)));
#else
    for (int lane = 0; lane < kWidth; ++lane)
      mask |= static_cast<uint32_t>(own[lane] == other[lane]) << lane;
#endif
    bits |= uint64_t{mask} << i;
  }
  return bits;
}

int top_bit(uint64_t bits) { return std::bit_width(bits) - 1; }

// One sequence's tokens.
struct Rows {
  int32_t* tokens;
  const int32_t* table;
  int64_t block_size;

  Rows(const History& a, int64_t b)
      : tokens(a.tokens),
        table(a.block_table + b * a.blocks_per_sequence),
        block_size(a.block_size) {}

  int32_t* at(int64_t place) const {
    return tokens + table[place / block_size] * block_size + place % block_size;
  }
  bool is_one_block(int64_t first, int64_t last) const {
    return first / block_size == (last - 1) / block_size;
  }
  // Tokens first … last - 1.
  void copy(int64_t first, int64_t last, int32_t* out) const {
    int64_t block = first / block_size, skipped = first % block_size;
    while (first < last) {
      const int32_t* from = tokens + table[block++] * block_size + skipped;
      const int64_t count = std::min(block_size - skipped, last - first);
      int64_t i = 0;
      // without a call: blocks are short
      for (; i + kWidth <= count; i += kWidth) std::memcpy(out + i, from + i, sizeof(Int));
      for (; i < count; ++i) out[i] = from[i];
      first += count;
      out += count;
      skipped = 0;
      if (block_size % kWidth) continue;
      for (; first + block_size <= last; first += block_size, out += block_size) {
        from = tokens + table[block++] * block_size;
        for (i = 0; i < block_size; i += kWidth) std::memcpy(out + i, from + i, sizeof(Int));
      }
    }
  }
};

// The longest suffix of a context that ends earlier in it, too, and the latest place where.
class Search {
 public:
  // `length` tokens in `rows` and the root after them.
  Search(const Rows& rows, int64_t length, int32_t root, int64_t ngram)
      : rows_(rows),
        length_(length),
        most_(std::min(ngram, length)),
        reach_(std::min(most_, kReach)) {
    suffix_[0] = root;
    for (int64_t back = 1; back < reach_; ++back) suffix_[back] = *rows.at(length - back);
    for (int64_t end = length; end > 0 && matched_ < most_;) {
      const int64_t begin = std::max<int64_t>(end - kChunk, 0), first = begin - kReach;
      // the last chunk may begin inside of a register
      if (first >= 0 && rows.is_one_block(first, end)) {
        look(rows.at(first) + kReach, begin, end);
      } else {
        const int64_t from = std::max<int64_t>(first, 0);
        rows.copy(from, end, copied_ + (kRoom + from - begin));
        look(copied_ + kRoom, begin, end);
      }
      end = begin;
    }
  }

  int64_t matched() const { return matched_; }  // tokens, 0: none
  int64_t last() const { return last_; }        // place of the last of them

 private:
  // Places begin … end - 1, from the end on; `tokens` is that of `begin`.
  void look(const int32_t* tokens, int64_t begin, int64_t end) {
    for (int64_t place = end - kLanes; place > begin - kLanes; place -= kLanes) {
      const int32_t* own = tokens + (place - begin);
      uint64_t found = lanes(own, place, 0);
      // the token that would make it longer decides most often
      if (matched_ > 0 && matched_ < reach_) found &= lanes(own, place, matched_);
      if (found == 0) continue;
      compare(own, place, found);
      if (matched_ == most_) return;
    }
  }

  // Lanes in which the token `back` before `place` is the suffix's. Before the context there
  // are none.
  uint64_t lanes(const int32_t* own, int64_t place, int64_t back) const {
    const uint64_t bits = equal_bits(own - back, suffix_[back]);
    const int64_t missing = back - place;
    if (missing <= 0) return bits;
    return missing < kLanes ? bits >> missing << missing : 0;
  }

  // The lanes of `found` may end a suffix that is longer than what was matched.
  void compare(const int32_t* own, int64_t place, uint64_t found) {
    int64_t matched = 1;
    for (; matched < std::min(matched_, reach_) && found; ++matched)
      found &= lanes(own, place, matched);
    if (found == 0) return;
    matched = std::min(matched_ + 1, reach_);
    for (uint64_t longer; matched < reach_; ++matched, found = longer)
      if ((longer = found & lanes(own, place, matched)) == 0) break;
    if (matched < reach_ || reach_ == most_) {
      matched_ = matched;
      last_ = place + top_bit(found);
      return;
    }
    for (; found && matched_ < most_; found ^= uint64_t{1} << top_bit(found)) {
      const int64_t at = place + top_bit(found);
      matched = reach_;
      while (matched < most_ && matched <= at &&
             *rows_.at(at - matched) == *rows_.at(length_ - matched))
        ++matched;
      if (matched <= matched_) continue;
      matched_ = matched;
      last_ = at;
    }
  }

  const Rows rows_;
  const int64_t length_, most_, reach_;
  int64_t matched_ = 0, last_ = -1;
  int32_t suffix_[kReach] = {};            // backwards from the root
  int32_t copied_[kRoom + kChunk] = {};
};

}  // namespace

void lookup(const Lookup& a) {
  const int64_t width = a.num_tokens + 1;
  for (int64_t b = 0; b < a.history.batch; ++b) {
    const int64_t root = a.last_tokens[(b + 1) * a.num_last - 1];
    const int64_t length = a.history.cache_len[b];
    int64_t* tokens = a.tokens + b * width;
    int32_t* parents = a.parents + b * width;
    tokens[0] = root;
    std::fill(tokens + 1, tokens + width, 0);
    std::fill(parents, parents + width, -1);
    // no token of the history is one that does not fit
    if (length <= 0 || root != static_cast<int32_t>(root)) continue;
    const Rows rows(a.history, b);
    const Search search(rows, length, static_cast<int32_t>(root), a.ngram);
    if (search.matched() == 0) continue;
    const int64_t period = length - search.last();
    for (int64_t i = 0; i < a.num_tokens; ++i) {
      const int64_t place = search.last() + 1 + i;
      if (place < length) tokens[1 + i] = *rows.at(place);
      if (place == length) tokens[1 + i] = root;
      // after the context stand the proposals themselves
      if (place > length) tokens[1 + i] = tokens[1 + i - period];
      parents[1 + i] = static_cast<int32_t>(i);
    }
  }
}

void record_tokens(const RecordTokens& a) {
  for (int64_t b = 0; b < a.history.batch; ++b) {
    const int64_t length = a.history.cache_len[b];
    if (length < 0) continue;
    const Rows rows(a.history, b);
    const int64_t count = a.num_accepted[b] + int64_t{2};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t column = (length + i) / rows.block_size;
      // the bonus token, the last one, may have no row
      if (column >= a.history.blocks_per_sequence) break;
      if (rows.table[column] < 0 || rows.table[column] >= a.history.num_blocks) break;
      *rows.at(length + i) = static_cast<int32_t>(i ? a.output_tokens[b * a.width + i - 1]
                                                    : a.last_tokens[(b + 1) * a.num_last - 1]);
    }
  }
}

}  // namespace specc
