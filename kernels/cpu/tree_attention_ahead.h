// Requests for what a worker of specc::tree_attention reads next.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specc::attention {

// Asks for the rows of the next tile while this one is computed, into the second-level cache: the
// first one is too small for what comes next.
//
// Requests are spread evenly over the work. A processor waits for memory in a few miss buffers,
// which loads from the second-level cache go through, too: a burst of requests fills them, so that
// what is being computed waits for memory, and later memory has nothing to do.
class Ahead {
 public:
  // The rows of `count` keys, then as many of values, of so many bytes each; `work` is what spend
  // will be told in all, in any unit.
  Ahead(const char* const* rows, int64_t count, int64_t key_bytes, int64_t value_bytes,
        int64_t work)
      : row_(rows),
        first_value_(rows + count),
        end_(rows + 2 * count),
        key_bytes_(key_bytes),
        value_bytes_(value_bytes),
        work_of_a_row_(work / std::max<int64_t>(2 * count, 1)) {}

  // As much work is about to be done: ask for the rows that are due by then.
  void spend(int64_t work) {
    spent_ += work;
    while (spent_ > asked_ && row_ < end_) {
      asked_ += work_of_a_row_;
      ask();
    }
  }
  // Ask for the rest.
  void finish() {
    while (row_ < end_) ask();
  }

 private:
  void ask() {
    const int64_t bytes = row_ < first_value_ ? key_bytes_ : value_bytes_;
    const char* p = *row_++;
    for (const char* const end = p + bytes; p < end; p += 128) {
      __builtin_prefetch(p, 0, 2);
      __builtin_prefetch(p + 64, 0, 2);
    }
  }

  const char* const* row_;
  const char* const* const first_value_;
  const char* const* const end_;
  const int64_t key_bytes_, value_bytes_, work_of_a_row_;
  int64_t spent_ = 0, asked_ = 0;
};

}  // namespace specc::attention
