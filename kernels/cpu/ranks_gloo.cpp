// Ranks of several hosts meet over the gloo backend of a process group of torch.distributed.
//
// Of gloo only send and recv are used: its all-reduce adds up along a ring, in another order for
// each part. A message is a call, and data right after it, so that a rank knows what comes before
// it takes it, and an error names the rank that it waited for. Nothing here calls Python.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <unistd.h>

#include "ranks.h"

// version.cpp
extern "C" const char specc_interface[];

namespace specc::ranks {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

constexpr int kTag = 0, kFarewellTag = 1;
// gloo sends when the other side has asked for it, so who ends waits for others to hear why
constexpr auto kFarewell = std::chrono::milliseconds(1000);
// up to here every rank gets all data of all ranks; above, its part of them, and then all sums
constexpr int64_t kDirectBytes = 65536;
constexpr size_t kTextBytes = 600;

enum class Word : int32_t { kCall = 0x53504331, kAbort, kClosed };

struct Message {
  Word word;
  int32_t pid;
  int64_t bytes;  // of the data after it
  Call call;
  char version[32];
  char text[kTextBytes];  // of an abort
};

struct Part {
  const char* data = nullptr;
  int64_t bytes = 0;
};

at::Tensor bytes_at(const void* data, int64_t bytes) {
  return at::from_blob(const_cast<void*>(data), {bytes}, at::kByte);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

class GlooGroup : public Group {
 public:
  GlooGroup(const std::string& name, double time_limit)
      : processes_(c10d::resolve_process_group(name)),
        backend_(processes_->getBackend(c10::DeviceType::CPU)),
        rank_(backend_->getRank()),
        size_(backend_->getSize()),
        time_limit_(time_limit) {
    if (backend_->getBackendName() != "gloo")
      refuse("a process group of " + backend_->getBackendName(), "one of gloo",
             "let specc.runtime.ranks.gloo make it");
    heard_.resize(size());
    heard_[rank()].pid = ::getpid();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce(Call call, Element element, const void* x, void* y) override {
    const std::lock_guard lock(busy_);
    begin(call);
    const int64_t element_bytes = element == Element::kFloat32 ? 4 : 2;
    const bool is_direct = size() <= 2 || call.bytes <= kDirectBytes;
    const int64_t count = call.bytes / element_bytes;
    const auto at = [&](int r) { return count * r / size() * element_bytes; };
    const int64_t first = is_direct ? 0 : at(rank());
    const int64_t bytes = is_direct ? call.bytes : at(rank() + 1) - first;
    const char* mine = static_cast<const char*>(x);
    received_.resize(bytes * size());
    std::vector<Part> sent(size());
    std::vector<char*> targets(size());
    std::vector<const void*> parts(size());
    for (int r = 0; r < size(); ++r) {
      const int64_t from = is_direct ? 0 : at(r), end = is_direct ? call.bytes : at(r + 1);
      sent[r] = {mine + from, end - from};
      targets[r] = received_.data() + r * bytes;
      parts[r] = r == rank() ? mine + first : targets[r];
    }
    exchange(sent, targets, std::vector<int64_t>(size(), bytes));
    char* sums = static_cast<char*>(y);
    sum_in_order(element, parts.data(), size(), bytes / element_bytes, sums + first);
    if (is_direct) return;
    std::vector<int64_t> sizes(size());
    for (int r = 0; r < size(); ++r) {
      sent[r] = {sums + first, bytes};
      targets[r] = sums + at(r);
      sizes[r] = at(r + 1) - at(r);
    }
    exchange(sent, targets, sizes);
  }

  void share(Call call, const void* x, const Sink& sink) override {
    const std::lock_guard lock(busy_);
    begin(call);
    std::vector<Part> sent(size());
    std::vector<char*> targets(size());
    std::vector<int64_t> sizes(size());
    received_.resize(call.bytes * size());
    for (int r = 0; r < size(); ++r) {
      if (call.is_sent_by(rank()) && call.is_read_by(r))
        sent[r] = {static_cast<const char*>(x), call.bytes};
      sizes[r] = call.is_sent_by(r) && call.is_read_by(rank()) ? call.bytes : 0;
      targets[r] = received_.data() + r * call.bytes;
    }
    exchange(sent, targets, sizes);
    for (int r = 0; call.is_read_by(rank()) && r < size(); ++r)
      if (call.is_sent_by(r))
        sink(r, 0, r == rank() ? static_cast<const char*>(x) : targets[r], call.bytes);
  }

  void abort(const std::string& text) override {
    end(text, Word::kAbort);
    const std::lock_guard lock(waiting_lock_);
    if (waiting_ != nullptr) waiting_->abort();
  }

  std::vector<State> states() override {
    const std::lock_guard lock(heard_lock_);
    std::vector<State> all = heard_;
    const auto now = Clock::now();
    for (int r = 0; r < size(); ++r) {
      if (r == rank())
        all[r].heartbeat_ns = 0;
      else if (all[r].pid != 0)
        all[r].heartbeat_ns = std::chrono::nanoseconds(now - heard_at_[r]).count();
    }
    return all;
  }

  void close() override {
    end(three_lines("a collective after the group was closed", "an open group", "open one first"),
        Word::kClosed);
    {
      const std::lock_guard lock(waiting_lock_);
      if (waiting_ != nullptr) waiting_->abort();
    }
    const std::lock_guard lock(busy_);
    if (backend_ == nullptr) return;
    farewell();
    told_.clear();
    calls_coming_.clear();
    ends_.clear();
    processes_.reset();
    backend_.reset();
  }

  // torch.distributed connects all before there is a process group.
  void wait_for_all(double) override {}

 private:
  void begin(Call& call) {
    {
      const std::lock_guard lock(sending_);
      if (!ended_.empty()) throw std::runtime_error(ended_);
      call.number = ++num_calls_;
      call_ = call;
    }
    const std::lock_guard lock(heard_lock_);
    heard_[rank()].num_calls = num_calls_;
  }

  void check_ended() {
    const std::lock_guard lock(sending_);
    if (!ended_.empty()) throw std::runtime_error(ended_);
  }

  // Sends what each rank is to have, and takes what it gets; sizes[r] bytes from rank r.
  void exchange(const std::vector<Part>& sent, const std::vector<char*>& targets,
                const std::vector<int64_t>& sizes) {
    std::vector<WorkPointer> sending;
    // messages are kept after an error: others are still to learn what this rank called, and gloo
    // closes a connection when what comes has no place any more
    told_.clear();
    messages_.assign(size(), {});
    {
      // an abort of another thread comes before or after data, not between them and their message
      const std::lock_guard lock(sending_);
      if (!ended_.empty()) throw std::runtime_error(ended_);
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        messages_[r] = message(Word::kCall, sent[r].bytes);
        try {
          told_.push_back(send(r, &messages_[r], sizeof(Message)));
          if (sent[r].bytes > 0) sending.push_back(send(r, sent[r].data, sent[r].bytes));
        } catch (const std::exception&) {
          // that one is gone, which receive says better
        }
      }
    }
    // gloo sends what was asked for, so all is asked for before the first wait; and all calls come
    // before any data: who strayed is seen even if another waits for data in vain
    calls_coming_.assign(size(), {});
    calls_.assign(size(), {});
    for (int r = 0; r < size(); ++r)
      if (r != rank()) calls_coming_[r] = receive(r, &calls_[r], sizeof calls_[r]);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      guarded(r, [&] { wait(calls_coming_[r]); });
      check(r, calls_[r], sizes[r]);
    }
    std::vector<WorkPointer> coming(size());
    for (int r = 0; r < size(); ++r)
      if (r != rank() && sizes[r] > 0) coming[r] = receive(r, targets[r], sizes[r]);
    for (int r = 0; r < size(); ++r)
      if (r != rank() && sizes[r] > 0) guarded(r, [&] { wait(coming[r]); });
    for (const WorkPointer& work : told_) guarded(-1, [&] { wait(work); });
    for (const WorkPointer& work : sending) guarded(-1, [&] { wait(work); });
  }

  // Waits until the others close it, too, or have had the time for it.
  void farewell() {
    const auto end = Clock::now() + kFarewell;
    char bye = 0;
    std::vector<char> byes(size());
    std::vector<WorkPointer> works;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      try {
        std::vector<at::Tensor> mine{bytes_at(&bye, 1)}, theirs{bytes_at(&byes[r], 1)};
        works.push_back(backend_->send(mine, r, kFarewellTag));
        works.push_back(backend_->recv(theirs, r, kFarewellTag));
      } catch (const std::exception&) {
        // gone
      }
    }
    for (const WorkPointer& work : works) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      try {
        work->wait(std::max(left, std::chrono::milliseconds(1)));
      } catch (const std::exception&) {
        // gone, or busy elsewhere
      }
    }
  }

  Message message(Word word, int64_t bytes) const {
    Message made{};
    made.word = word;
    made.pid = ::getpid();
    made.bytes = bytes;
    made.call = call_;
    std::strncpy(made.version, specc_interface, sizeof made.version - 1);
    return made;
  }

  void check(int other, const Message& got, int64_t bytes) {
    const std::string name = "rank " + std::to_string(other);
    if (std::strncmp(got.version, specc_interface, sizeof got.version - 1) != 0)
      give_up(three_lines(name + " with another version of specc", "one version on all hosts",
                          "start all ranks with one engine and version"));
    {
      const std::lock_guard lock(heard_lock_);
      heard_[other] = {got.pid, got.call.number, 0, got.word == Word::kClosed};
      heard_at_[other] = Clock::now();
    }
    if (got.word == Word::kAbort) give_up(std::string(got.text, ::strnlen(got.text, kTextBytes)));
    if (got.word == Word::kClosed)
      give_up(three_lines(name + " (pid " + std::to_string(got.pid) +
                              ") has closed the group: not at " + describe(call_),
                          "every rank in the group", "see why it ended"));
    if (got.call.is_same(call_) && got.bytes == bytes) return;
    const std::string mine = "rank " + std::to_string(rank()) + " calls " + describe(call_);
    const std::string others = name + " calls " + describe(got.call);
    give_up(three_lines(rank() < other ? mine + ", " + others : others + ", " + mine,
                        "the same collective on every rank",
                        "start all ranks with one engine and version; report this if they were"));
  }

  WorkPointer send(int to, const void* data, int64_t bytes) {
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    return backend_->send(tensors, to, kTag);
  }

  WorkPointer receive(int from, void* data, int64_t bytes) {
    WorkPointer coming;
    guarded(from, [&] {
      std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
      coming = backend_->recv(tensors, from, kTag);
    });
    return coming;
  }

  void wait(const WorkPointer& work) {
    {
      const std::lock_guard lock(waiting_lock_);
      waiting_ = work;
    }
    // who ended the group before that has aborted nothing
    try {
      check_ended();
      work->wait(std::chrono::milliseconds(static_cast<int64_t>(time_limit_ * 1e3)));
    } catch (...) {
      const std::lock_guard lock(waiting_lock_);
      waiting_.reset();
      throw;
    }
    {
      const std::lock_guard lock(waiting_lock_);
      waiting_.reset();
    }
    check_ended();
  }

  // What gloo says names a socket; `other` is the rank at its other end, -1 where that is not known.
  template <typename F>
  void guarded(int other, F&& body) {
    const auto begin = Clock::now();
    try {
      body();
    } catch (const std::exception& error) {
      check_ended();
      const double waited = std::chrono::duration<double>(Clock::now() - begin).count();
      int64_t last = 0, pid = 0;
      if (other >= 0) {
        const std::lock_guard lock(heard_lock_);
        last = heard_[other].num_calls;
        pid = heard_[other].pid;
      }
      const std::string name =
          other < 0 ? "a rank" : "rank " + std::to_string(other) +
                                     (pid > 0 ? " (pid " + std::to_string(pid) + ")" : "") +
                                     ", last collective " + std::to_string(last);
      give_up(three_lines(name + ": not at " + describe(call_) + " after " + seconds(waited) + " (" +
                              first_line(error.what()) + ")",
                          "every rank within the time limit of " + seconds(time_limit_),
                          "see what became of it; give ranks more time if it is only slow"));
    }
  }

  [[noreturn]] void give_up(const std::string& text) {
    end(text, Word::kAbort);
    check_ended();
    throw std::runtime_error(text);
  }

  // The first reason stays, here and for those who are told.
  void end(const std::string& text, Word word) {
    const std::lock_guard lock(sending_);
    if (!ended_.empty()) return;
    ended_ = text;
    last_ = message(word, 0);
    std::strncpy(last_.text, text.c_str(), kTextBytes - 1);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      try {
        ends_.push_back(send(r, &last_, sizeof last_));
      } catch (const std::exception&) {
        // that one is gone
      }
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroup> processes_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const int rank_, size_;
  const double time_limit_;
  std::mutex busy_;
  int64_t num_calls_ = 0;
  Call call_;
  std::vector<char> received_;
  std::vector<Message> messages_;
  std::vector<WorkPointer> told_;
  std::vector<Message> calls_;
  std::vector<WorkPointer> calls_coming_;
  std::mutex sending_;
  std::string ended_;
  Message last_{};
  std::vector<WorkPointer> ends_;
  std::mutex waiting_lock_;
  WorkPointer waiting_;
  std::mutex heard_lock_;
  std::vector<State> heard_;
  std::vector<Clock::time_point> heard_at_ = std::vector<Clock::time_point>(size());
};

}  // namespace

std::shared_ptr<Group> open_gloo(const std::string& name, double time_limit) {
  return std::make_shared<GlooGroup>(name, time_limit);
}

}  // namespace specc::ranks
