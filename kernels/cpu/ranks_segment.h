// The memory that the ranks of one host share: who they are, what each does, and two slots of each.
//
// It is a file without a name, so nothing of it outlives the processes. A rank writes into its own
// cell and slots only, apart from the reason of an abort.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ranks.h"

namespace specc::ranks {

constexpr size_t kTextBytes = 2000;

struct alignas(128) Cell {
  // turns that this rank has put data and call into its slots for; others sleep on it
  std::atomic<uint32_t> turn;
  std::atomic<uint32_t> num_sleepers;
  Call calls[2];  // of the turns with this parity
  alignas(128) std::atomic<int64_t> heartbeat_ns;  // of the clock that all processes share
  std::atomic<int64_t> num_calls;
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> is_closed;
};

enum class AbortState : uint32_t { kNone, kBeingWritten, kWritten };

struct alignas(128) Header {
  char version[32];  // of the library's interface: its layout belongs to it
  int64_t num_ranks, slot_bytes, num_bytes;
  double time_limit;
  std::atomic<uint32_t> abort_state;
  char abort_text[kTextBytes];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

// The segment as mapped by this process. Throws what a user has to know, without its number.
class Segment {
 public:
  static Segment create(int num_ranks, int64_t slot_bytes, double time_limit, int* descriptor);
  static Segment open(const std::string& path);
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  int num_ranks() const { return num_ranks_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  double time_limit() const { return time_limit_; }
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Cell& cell(int rank) const {
    return *reinterpret_cast<Cell*>(memory_ + sizeof(Header) + rank * sizeof(Cell));
  }
  char* slot(uint32_t turn, int rank) const {
    return slots_ + ((turn & 1) * static_cast<int64_t>(num_ranks_) + rank) * slot_bytes_;
  }

  // Sleeps while *word is `seen`, for 50 ms at most; may return earlier.
  static void sleep(std::atomic<uint32_t>& word, uint32_t seen);
  static void wake(std::atomic<uint32_t>& word);
  static int64_t now_ns();

  bool is_aborted() const {
    return header().abort_state.load(std::memory_order_relaxed) !=
           static_cast<uint32_t>(AbortState::kNone);
  }
  void abort(const std::string& text) const;
  std::string abort_text() const;

 private:
  Segment(char* memory, int64_t num_bytes);

  char* memory_;
  int64_t num_bytes_;
  // copies: what other processes could overwrite decides nothing here
  int num_ranks_ = 0;
  int64_t slot_bytes_ = 0;
  double time_limit_ = 0;
  char* slots_ = nullptr;
};

}  // namespace specc::ranks
