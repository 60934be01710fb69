// Units of work that threads share: each takes its own from the front, then what others have left.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace specc {

// Units 0 ... count - 1. Neighbors lie beside each other in memory, so that a thread reads its own
// as one stream; what it takes of others comes from their end. Every unit is handed out once; what
// is computed for it must not depend on who takes it.
class Shares {
 public:
  // most: threads that there can be.
  explicit Shares(int most) : left_(most) {}

  // Before threads take; count < 2^32.
  void deal(int64_t count, int threads) {
    threads_ = threads;
    for (int t = 0; t < threads; ++t)
      left_[t].range.store(packed(begin_of(count, t, threads), begin_of(count, t + 1, threads)),
                           std::memory_order_relaxed);
  }

  // The first unit of a thread's own share.
  static int64_t begin_of(int64_t count, int64_t thread, int64_t threads) {
    return count * thread / threads;
  }

  // Up to `most` units that follow each other; false where none are left.
  bool take(int thread, int64_t most, int64_t& begin, int64_t& end) {
    if (take_of(thread, most, true, begin, end)) return true;
    for (int i = 1; i < threads_; ++i)
      if (take_of((thread + i) % threads_, most, false, begin, end)) return true;
    return false;
  }

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> range{0};
  };

  static uint64_t packed(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }

  bool take_of(int owner, int64_t most, bool is_front, int64_t& begin, int64_t& end) {
    std::atomic<uint64_t>& range = left_[owner].range;
    uint64_t now = range.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t first = static_cast<int64_t>(now >> 32);
      const int64_t last = static_cast<int64_t>(now & 0xffffffff);
      if (first >= last) return false;
      const int64_t count = std::min(most, last - first);
      begin = is_front ? first : last - count;
      end = begin + count;
      const uint64_t rest = is_front ? packed(end, last) : packed(first, begin);
      if (range.compare_exchange_weak(now, rest, std::memory_order_relaxed)) return true;
    }
  }

  std::vector<Range> left_;
  int threads_ = 0;
};

}  // namespace specc
