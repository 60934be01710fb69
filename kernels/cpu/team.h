// The threads of a pass whose loops run on one thread: the others wait for its kernels, and
// meanwhile ask for the weights of the product that comes next.
//
// Between two products of a pass lie attention, norms and activations of few rows, which one thread
// computes while memory has nothing to do. A region of OpenMP for each kernel costs a barrier at
// both its ends and leaves nobody to use that time. So the pass as a whole is one region
// (`with_team`), and its kernels share their work within it (`in_parallel`, `Team::share`).
#pragma once

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "shares.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specc {

// Weights of one product, in blocks that follow each other.
struct WeightBlocks {
  const char* data = nullptr;
  int64_t blocks = 0, block_bytes = 0;

  bool operator==(const WeightBlocks&) const = default;
};

// Which weights a program's products read, in the order of its last pass.
class WeightOrder {
 public:
  void begin() { next_ = 0; }

  // What follows these, which are read now; no blocks where that is not known.
  WeightBlocks after(const WeightBlocks& now) {
    if (next_ == order_.size())
      order_.push_back(now);
    else
      order_[next_] = now;
    ++next_;
    return next_ < order_.size() ? order_[next_] : WeightBlocks{};
  }

 private:
  std::vector<WeightBlocks> order_;
  size_t next_ = 0;
};

// Waits for what mostly comes at once. Where there are more threads than processors, whoever waits
// lets others have theirs; what does not come for milliseconds (another rank's part of a sum) is
// waited for asleep.
class Patience {
 public:
  void wait() {
    ++turns_;
    if (turns_ >= kAwake)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    else if (turns_ % kTurns == 0)
      std::this_thread::yield();
    else
      spin();
  }

 private:
  static constexpr uint32_t kTurns = 1024, kAwake = 256 * kTurns;  // 256k pauses: some 4 to 10 ms

  static void spin() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  uint32_t turns_ = 0;
};

// For one pass. Thread 0 runs the program; the others `serve`.
class Team {
 public:
  // most: threads that there can be.
  Team(int most, WeightOrder& order) : order_(order), shares_(most) { order.begin(); }

  // By thread 0, before all else: so many have come.
  void begin(int threads) { threads_ = threads; }

  // By thread 0. work(thread, threads) on so many of the threads; returns when all are done. What
  // it throws ends the process, as in a region of OpenMP: others may be within it.
  template <class Work>
  void run(int threads, const Work& work) noexcept {
    num_working_ = std::min(threads, threads_);
    call_ = [](const void* context, int thread, int count) {
      (*static_cast<const Work*>(context))(thread, count);
    };
    context_ = &work;
    busy_.store(threads_ - 1, std::memory_order_relaxed);
    task_.fetch_add(1, std::memory_order_release);
    work(0, num_working_);
    Patience patience;
    while (busy_.load(std::memory_order_acquire) > 0) patience.wait();
  }

  // By thread 0. A product: work(take) on so many of the threads, where take(begin, end) hands out
  // blocks of the weights until none are left. Who has no work asks for the weights after these.
  template <class Work>
  void share(int threads, const WeightBlocks& weights, const Work& work) {
    threads = std::min(threads, threads_);
    shares_.deal(weights.blocks, threads);
    const int64_t most =
        std::max<int64_t>(1, kBytesAtOnce / std::max<int64_t>(1, weights.block_bytes));
    next_ = order_.after(weights);
    run(threads, [&](int thread, int) {
      work([&](int64_t& begin, int64_t& end) { return shares_.take(thread, most, begin, end); });
    });
    next_ = {};
  }

  // By all that work in `run`.
  void barrier() {
    const int64_t turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_working_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    Patience patience;
    while (turn_.load(std::memory_order_acquire) == turn) patience.wait();
  }

  // By threads 1 ... threads - 1, until `end`.
  void serve(int thread) {
    const char* ahead = nullptr;
    int64_t bytes = 0;
    for (int64_t done = 0;; ++done) {
      Patience patience;
      while (task_.load(std::memory_order_acquire) == done) {
        if (bytes <= 0) {
          patience.wait();
          continue;
        }
        for (int i = 0; i < kLinesAtOnce && bytes > 0; ++i, ahead += kLine, bytes -= kLine)
          __builtin_prefetch(ahead, 0, 2);
      }
      if (is_over_) return;
      if (thread < num_working_) call_(context_, thread, num_working_);
      const WeightBlocks next = next_;
      busy_.fetch_sub(1, std::memory_order_release);  // thread 0 may change members from here on
      const int64_t begin = Shares::begin_of(next.blocks, thread, threads_);
      const int64_t end = Shares::begin_of(next.blocks, thread + 1, threads_);
      ahead = next.data + begin * next.block_bytes;
      bytes = std::min((end - begin) * next.block_bytes, bytes_ahead());
    }
  }

  // By thread 0: no work comes any more.
  void end() {
    is_over_ = true;
    task_.fetch_add(1, std::memory_order_release);
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int kLinesAtOnce = 8;            // between two looks for work
  static constexpr int64_t kBytesAtOnce = 1 << 16;  // of weights that a thread takes

  // Half of the second-level cache: the other half is for what work itself touches.
  static int64_t bytes_ahead() {
    static const int64_t bytes = [] {
      long size = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
      size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
      return int64_t{size > 0 ? size : 1 << 19} / 2;
    }();
    return bytes;
  }

  WeightOrder& order_;
  Shares shares_;
  // written by thread 0 while no other works
  int threads_ = 1, num_working_ = 0;
  void (*call_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  WeightBlocks next_;
  bool is_over_ = false;
  alignas(64) std::atomic<int64_t> task_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> turn_{0};
};

// Of the pass that this thread runs; none outside of one, and in passes of many rows.
inline thread_local Team* team_of_pass = nullptr;

// pass() on this thread while others serve it; what it throws is thrown here. Regions of OpenMP in
// it have one thread.
template <class Pass>
void with_team(int threads, WeightOrder& order, const Pass& pass) {
  std::exception_ptr error;
  Team team(threads, order);
#pragma omp parallel num_threads(threads)
  if (const int thread = omp_get_thread_num(); thread > 0) {
    team.serve(thread);
  } else {
    team.begin(omp_get_num_threads());
    team_of_pass = &team;
    try {
      pass();
    } catch (...) {
      error = std::current_exception();
    }
    team_of_pass = nullptr;
    team.end();
  }
  if (error) std::rethrow_exception(error);
}

// work(thread, threads, barrier) on threads of the pass's team, or else in a region of OpenMP.
template <class Work>
void in_parallel(int threads, const Work& work) {
  if (threads <= 1) {
    work(0, 1, [] {});
  } else if (Team* team = team_of_pass) {
    team->run(threads, [&](int thread, int count) {
      work(thread, count, [&] { team->barrier(); });
    });
  } else {
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num(), omp_get_num_threads(), [] {
#pragma omp barrier
    });
  }
}

}  // namespace specc
