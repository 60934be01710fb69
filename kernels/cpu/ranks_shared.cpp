// Ranks of one host meet in shared memory.
//
// A turn: each rank puts its data and its call into its slot, says so, and waits until all others
// have; then everyone may read all slots. Slots are double: who writes for turn t + 2 has seen
// everyone in turn t + 1, so nobody reads those of turn t any more. A rank spins a little before it
// sleeps, since the others mostly are a few microseconds away.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <unistd.h>

#include "ranks_segment.h"

#ifdef __SSE__
#include <immintrin.h>
#endif

namespace specc::ranks {
namespace {

constexpr int kSpins = 400;
constexpr auto kBeat = std::chrono::milliseconds(200);
constexpr int64_t kLine = 64;

void pause() {
#if defined(__SSE__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void copy(void* target, const void* source, int64_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);  // without elements both may be null
}

// A rank's part of `count` elements: whole cache lines, and almost the same for each.
int64_t part_begin(int64_t count, int64_t element_bytes, int rank, int num_ranks) {
  const int64_t line = kLine / element_bytes, lines = (count + line - 1) / line;
  return std::min(count, lines * rank / num_ranks * line);
}

class SharedGroup : public Group {
 public:
  SharedGroup(Segment segment, int rank)
      : segment_(std::move(segment)), rank_(rank), mine_(segment_.cell(rank)) {
    mine_.heartbeat_ns.store(Segment::now_ns());
    int32_t nobody = 0;
    if (!mine_.pid.compare_exchange_strong(nobody, static_cast<int32_t>(::getpid())))
      refuse("rank " + std::to_string(rank) + " opened by process " + std::to_string(nobody) +
                 " already",
             "one process for each rank", "give every process a rank of its own");
    heart_ = std::thread([this] { beat(); });
  }

  ~SharedGroup() override { close(); }

  int rank() const override { return rank_; }
  int size() const override { return segment_.num_ranks(); }

  void all_reduce(Call call, Element element, const void* x, void* y) override {
    const std::lock_guard lock(busy_);
    const int64_t element_bytes = element == Element::kFloat32 ? 4 : 2;
    begin(call);
    const bool is_direct = call.bytes <= kDirectBytes;
    int64_t offset = 0;
    do {
      const int64_t bytes = std::min(call.bytes - offset, segment_.slot_bytes());
      copy(my_next_slot(), static_cast<const char*>(x) + offset, bytes);
      take_turn();
      char* target = static_cast<char*>(y) + offset;
      if (is_direct)
        sum(element, element_bytes, 0, bytes / element_bytes, target);
      else
        sum_by_parts(element, element_bytes, bytes, target);
      offset += bytes;
    } while (offset < call.bytes);
  }

  void share(Call call, const void* x, const Sink& sink) override {
    const std::lock_guard lock(busy_);
    begin(call);
    int64_t offset = 0;
    do {
      const int64_t bytes = std::min(call.bytes - offset, segment_.slot_bytes());
      if (call.is_sent_by(rank_))
        copy(my_next_slot(), static_cast<const char*>(x) + offset, bytes);
      take_turn();
      for (int r = 0; call.is_read_by(rank_) && r < size(); ++r)
        if (call.is_sent_by(r)) sink(r, offset, segment_.slot(turn_, r), bytes);
      offset += bytes;
    } while (offset < call.bytes);
  }

  void abort(const std::string& text) override { segment_.abort(text); }

  std::vector<State> states() override {
    const int64_t now = Segment::now_ns();
    std::vector<State> all;
    for (int r = 0; r < size(); ++r) {
      const Cell& cell = segment_.cell(r);
      const int64_t pid = cell.pid.load(), beat = cell.heartbeat_ns.load();
      all.push_back({pid, cell.num_calls.load(), pid == 0 ? -1 : std::max<int64_t>(0, now - beat),
                     cell.is_closed.load() != 0});
    }
    return all;
  }

  void close() override {
    {
      const std::lock_guard lock(heart_lock_);
      if (is_closing_.exchange(true)) return;
    }
    if (::getpid() != mine_.pid.load()) {
      heart_.detach();  // a forked child has no such thread, and is not this rank
      return;
    }
    heart_ends_.notify_all();
    heart_.join();
    mine_.is_closed.store(1);
    // others may sleep until this rank comes, and so may another thread of this process
    for (int r = 0; r < size(); ++r) Segment::wake(segment_.cell(r).turn);
    const std::lock_guard lock(busy_);
  }

  void wait_for_all(double limit) override {
    for (const int64_t end = Segment::now_ns() + static_cast<int64_t>(limit * 1e9);;) {
      std::string missing;
      for (int r = 0; r < size(); ++r)
        if (segment_.cell(r).pid.load() == 0)
          missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(r);
      if (missing.empty()) return;
      if (segment_.is_aborted()) throw std::runtime_error(segment_.abort_text());
      if (Segment::now_ns() >= end)
        give_up(three_lines(missing + " not there after " + seconds_text(limit), "every rank",
                            "see why it did not start, or give it more time"));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

 private:
  void beat() {
    std::unique_lock lock(heart_lock_);
    while (!heart_ends_.wait_for(lock, kBeat, [this] { return is_closing_.load(); }))
      mine_.heartbeat_ns.store(Segment::now_ns(), std::memory_order_relaxed);
  }

  char* my_next_slot() { return segment_.slot(turn_ + 1, rank_); }

  void begin(Call& call) {
    if (is_closing_)
      refuse("a collective after the group was closed", "an open group", "open one first");
    check_abort();
    call.number = ++num_calls_;
    call_ = call;
    mine_.num_calls.store(num_calls_, std::memory_order_relaxed);
  }

  void check_abort() {
    if (segment_.is_aborted()) throw std::runtime_error(segment_.abort_text());
  }

  [[noreturn]] void give_up(const std::string& text) {
    segment_.abort(text);
    // another rank may have been the first to see what is wrong: all say the same
    throw std::runtime_error(segment_.abort_text());
  }

  // What is in my slot is for the others; when it returns, what is in theirs is for me.
  void take_turn() {
    ++turn_;
    mine_.calls[turn_ & 1] = call_;
    mine_.turn.store(turn_, std::memory_order_seq_cst);
    if (mine_.num_sleepers.load(std::memory_order_seq_cst) > 0) Segment::wake(mine_.turn);
    uint64_t missing = (size() == 64 ? ~uint64_t{0} : (uint64_t{1} << size()) - 1) &
                       ~(uint64_t{1} << rank_);
    int64_t begin_ns = 0;
    for (int spins = 0; meet(missing); ++spins) {
      check_abort();
      if (spins < kSpins) {
        pause();
        continue;
      }
      if (is_closing_)
        refuse("the group closed while a collective waits", "an open group",
               "end what calls it first");
      const int64_t now = Segment::now_ns();
      if (begin_ns == 0) begin_ns = now;
      check_missing(missing, static_cast<double>(now - begin_ns) * 1e-9);
      sleep_for(segment_.cell(__builtin_ctzll(missing)));
    }
  }

  // Takes those who came out of `missing`; whether somebody is left.
  bool meet(uint64_t& missing) {
    for (uint64_t left = missing; left != 0; left &= left - 1) {
      const int r = __builtin_ctzll(left);
      const Cell& cell = segment_.cell(r);
      if (!has_come(cell)) continue;
      missing &= ~(uint64_t{1} << r);
      const Call other = cell.calls[turn_ & 1];
      if (!other.is_same(call_)) mismatch(r, other);
    }
    return missing != 0;
  }

  bool has_come(const Cell& cell) const {
    return static_cast<int32_t>(cell.turn.load(std::memory_order_acquire) - turn_) >= 0;
  }

  void sleep_for(Cell& cell) {
    cell.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = cell.turn.load(std::memory_order_seq_cst);
    // an abort wakes those who sleep already
    if (static_cast<int32_t>(seen - turn_) < 0 && !segment_.is_aborted())
      Segment::sleep(cell.turn, seen);
    cell.num_sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  [[noreturn]] void mismatch(int other_rank, const Call& other) {
    const bool is_first = rank_ < other_rank;
    const std::string mine = "rank " + std::to_string(rank_) + " calls " + describe(call_);
    const std::string others = "rank " + std::to_string(other_rank) + " calls " + describe(other);
    give_up(three_lines((is_first ? mine : others) + ", " + (is_first ? others : mine),
                        "the same collective on every rank",
                        "start all ranks with one engine and version; report this if they were"));
  }

  void check_missing(uint64_t missing, double waited) {
    std::string absent;
    bool is_gone = false;
    for (uint64_t left = missing; left != 0; left &= left - 1) {
      const int r = __builtin_ctzll(left);
      const Cell& cell = segment_.cell(r);
      // it may have come since, and closed after that
      const bool is_closed = cell.is_closed.load() != 0 && !has_come(cell);
      is_gone |= is_closed;
      absent += (absent.empty() ? "rank " : "; rank ") + std::to_string(r) + " (pid " +
                std::to_string(cell.pid.load()) + ")";
      if (is_closed) {
        absent += " has closed the group after collective ";
      } else {
        const int64_t age = std::max<int64_t>(0, Segment::now_ns() - cell.heartbeat_ns.load());
        absent += ", heartbeat " + seconds_text(static_cast<double>(age) * 1e-9) +
                  " old, last collective ";
      }
      absent += std::to_string(cell.num_calls.load());
    }
    if (!is_gone && waited < segment_.time_limit()) return;
    give_up(three_lines(absent + ": not at " + describe(call_) + " after " + seconds_text(waited),
                        "every rank within the time limit of " + seconds_text(segment_.time_limit()),
                        "see what became of it; give ranks more time if it is only slow"));
  }

  // Adds elements `first` … of all slots of this turn up.
  void sum(Element element, int64_t element_bytes, int64_t first, int64_t count, char* target) {
    const void* parts[kMaxRanks];
    for (int r = 0; r < size(); ++r)
      parts[r] = segment_.slot(turn_, r) + first * element_bytes;
    sum_in_order(element, parts, size(), count, target);
  }

  // Every rank adds up its part of the elements; in a second turn all take all parts.
  void sum_by_parts(Element element, int64_t element_bytes, int64_t bytes, char* target) {
    const int64_t count = bytes / element_bytes;
    const auto begin = [&](int r) { return part_begin(count, element_bytes, r, size()); };
    const int64_t first = begin(rank_);
    sum(element, element_bytes, first, begin(rank_ + 1) - first,
        my_next_slot() + first * element_bytes);
    take_turn();
    for (int r = 0; r < size(); ++r) {
      const int64_t at = begin(r) * element_bytes, end = begin(r + 1) * element_bytes;
      copy(target + at, segment_.slot(turn_, r) + at, end - at);
    }
  }

  Segment segment_;
  const int rank_;
  Cell& mine_;
  std::mutex busy_;
  uint32_t turn_ = 0;
  int64_t num_calls_ = 0;
  Call call_;
  std::atomic<bool> is_closing_ = false;
  std::mutex heart_lock_;
  std::condition_variable heart_ends_;
  std::thread heart_;
};

}  // namespace

std::shared_ptr<Group> create_shared(int size, int64_t slot_bytes, double time_limit,
                                     int* descriptor) {
  Segment segment = Segment::create(size, slot_bytes, time_limit, descriptor);
  return std::make_shared<SharedGroup>(std::move(segment), 0);
}

std::shared_ptr<Group> open_shared(const std::string& path, int rank, int size) {
  Segment segment = Segment::open(path);
  if (size != segment.num_ranks())
    refuse("a group of " + std::to_string(segment.num_ranks()) + " ranks",
           "one of " + std::to_string(size), "start all ranks with one engine");
  if (rank < 0 || rank >= size)
    refuse("rank " + std::to_string(rank), "0 … " + std::to_string(size - 1),
           "give every process a rank of its own");
  return std::make_shared<SharedGroup>(std::move(segment), rank);
}

}  // namespace specc::ranks
