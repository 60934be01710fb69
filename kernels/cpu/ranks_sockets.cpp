// Ranks of several hosts meet over TCP: Python (runtime/ranks/sockets.py) connects each two of them,
// and hands the sockets over.
//
// A message is a head, and data right after it, so that a rank knows what comes before it takes it,
// and an error names the rank that it waited for. In a collective every rank tells every other one
// what it calls, and all are sent to and read from at the same time: whoever strays, aborts or is
// gone is noticed while another one is waited for.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "ranks_peer.h"

// version.cpp
extern "C" const char specc_interface[];

namespace specc::ranks {
namespace {

// for what a rank that ends still has to say to those that do not read at this moment
constexpr auto kFarewell = std::chrono::milliseconds(1000);
// how often all are looked at before the process sleeps: another rank of a host is often that near
constexpr int kLooks = 20;
constexpr int64_t kMaxAbortBytes = 2000;

double seconds_from(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class SocketGroup : public Group {
 public:
  SocketGroup(std::vector<Peer> peers, int wake, int rank, double time_limit)
      : peers_(std::move(peers)), wake_(wake), rank_(rank), time_limit_(time_limit) {
    peers_[rank_].known.pid = ::getpid();
  }

  ~SocketGroup() override {
    close();
    ::close(wake_);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }

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

  void abort(const std::string& text) override { leave(text, Word::kAbort); }

  std::vector<State> states() override {
    const std::lock_guard lock(known_lock_);
    std::vector<State> all;
    for (int r = 0; r < size(); ++r) {
      State state = peers_[r].known;
      if (r == rank())
        state.heartbeat_ns = 0;
      else if (state.pid != 0)
        state.heartbeat_ns =
            std::chrono::nanoseconds(Clock::now() - peers_[r].heard_at).count();
      all.push_back(state);
    }
    return all;
  }

  void close() override {
    leave(three_lines("a collective after the group was closed", "an open group", "open one first"),
          Word::kClosed);
    const std::lock_guard lock(busy_);
    for (Peer& peer : peers_) {
      if (peer.socket < 0) continue;
      // what is closed with something unread resets the connection, which could cut the last words
      ::shutdown(peer.socket, SHUT_WR);
      char rest[4096];
      while (::recv(peer.socket, rest, sizeof rest, MSG_DONTWAIT) > 0) {
      }
      ::close(std::exchange(peer.socket, -1));
      peer.error = std::max(peer.error, 0);
    }
  }

  // Python has connected all before there is a group.
  void wait_for_all(double) override {}

 private:
  void begin(Call& call) {
    check_ended();
    call.number = ++num_calls_;
    call_ = call;
    const std::lock_guard lock(known_lock_);
    peers_[rank()].known.num_calls = num_calls_;
  }

  void check_ended() {
    if (!has_ended_) return;
    const std::lock_guard lock(end_lock_);
    throw std::runtime_error(ended_);
  }

  // Sends what each rank is to have, and takes what it gets; sizes[r] bytes from rank r.
  void exchange(const std::vector<Part>& sent, const std::vector<char*>& targets,
                const std::vector<int64_t>& sizes) {
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      Peer& peer = peers_[r];
      peer.sent = head(Word::kCall, sent[r].bytes);
      peer.out.push_back({reinterpret_cast<const char*>(&peer.sent), kHeadBytes});
      if (sent[r].bytes > 0) peer.out.push_back(sent[r]);
      peer.target = targets[r];
      peer.wanted = sizes[r];
      peer.taken = 0;
      peer.is_done = false;
    }
    const auto begin = Clock::now();
    auto moved_at = begin;
    for (int looks = 0;; ++looks) {
      check_ended();
      bool is_over = true, has_moved = false;
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        Peer& peer = peers_[r];
        has_moved |= peer.send();
        has_moved |= take_some(r);
        if (peer.is_ended() && !(peer.is_done && peer.out.empty())) lost(r, begin);
        is_over &= peer.is_done && peer.out.empty();
      }
      if (is_over) return;
      if (has_moved) {
        moved_at = Clock::now();
        looks = 0;
      } else if (looks > kLooks) {
        const double left = time_limit_ - seconds_from(moved_at);
        if (left <= 0) late(begin);
        wait(left);
      }
    }
  }

  // Whether something came; of the next collective only the head is taken.
  bool take_some(int r) {
    Peer& peer = peers_[r];
    bool has_moved = false;
    while (!peer.is_ended()) {
      if (peer.got_bytes < kHeadBytes) {
        char* to = reinterpret_cast<char*>(&peer.got) + peer.got_bytes;
        const int64_t bytes = peer.receive(to, kHeadBytes - peer.got_bytes);
        if (bytes == 0) break;
        peer.got_bytes += bytes;
        has_moved = true;
        if (peer.got_bytes < kHeadBytes) continue;
        note(r);
      }
      if (peer.got.word == Word::kAbort) give_up(abort_text(peer));
      if (peer.is_done) break;
      if (!peer.is_checked) check(r);
      peer.is_checked = true;
      if (peer.taken < peer.wanted) {
        const int64_t bytes = peer.receive(peer.target + peer.taken, peer.wanted - peer.taken);
        if (bytes == 0) break;
        peer.taken += bytes;
        has_moved = true;
        if (peer.taken < peer.wanted) continue;
      }
      peer.is_done = true;
      peer.is_checked = false;
      peer.got_bytes = 0;
    }
    return has_moved;
  }

  // Sleeps until somebody can be sent to or read from, or another thread ends the group.
  void wait(double limit) {
    std::vector<pollfd> all{{wake_, POLLIN, 0}};
    for (const Peer& peer : peers_) {
      if (peer.socket < 0 || peer.is_ended()) continue;
      const bool reads = !peer.is_done || peer.got_bytes < kHeadBytes;
      const short events = (reads ? POLLIN : 0) | (peer.out.empty() ? 0 : POLLOUT);
      if (events != 0) all.push_back({peer.socket, events, 0});
    }
    const double milliseconds = std::min(limit * 1e3, 1e6);
    ::poll(all.data(), all.size(), std::max(1, static_cast<int>(milliseconds)));
  }

  // What a rank says with every head.
  void note(int r) {
    Peer& peer = peers_[r];
    const std::string name = "rank " + std::to_string(r);
    if (std::strncmp(peer.got.version, specc_interface, sizeof peer.got.version - 1) != 0)
      give_up(three_lines(name + " with another version of specc", "one version on all hosts",
                          "start all ranks with one engine and version"));
    const std::lock_guard lock(known_lock_);
    peer.known = {peer.got.pid, peer.got.call.number, 0, peer.got.word == Word::kClosed};
    peer.heard_at = Clock::now();
  }

  void check(int other) {
    const Peer& peer = peers_[other];
    const Head& got = peer.got;
    const std::string name = "rank " + std::to_string(other);
    if (got.word == Word::kClosed)
      give_up(three_lines(name + " (pid " + std::to_string(got.pid) +
                              ") has closed the group: not at " + describe(call_),
                          "every rank in the group", "see why it ended"));
    if (got.word == Word::kCall && got.call.is_same(call_) && got.bytes == peer.wanted) return;
    const std::string mine = "rank " + std::to_string(rank()) + " calls " + describe(call_);
    const std::string others = name + " calls " + describe(got.call);
    give_up(three_lines(rank() < other ? mine + ", " + others : others + ", " + mine,
                        "the same collective on every rank",
                        "start all ranks with one engine and version; report this if they were"));
  }

  // The text is short, and right behind its head.
  std::string abort_text(Peer& peer) {
    std::string text(std::clamp<int64_t>(peer.got.bytes, 0, kMaxAbortBytes), '\0');
    size_t have = 0;
    const auto end = Clock::now() + kFarewell;
    while (have < text.size() && !peer.is_ended() && Clock::now() < end) {
      pollfd one{peer.socket, POLLIN, 0};
      ::poll(&one, 1, 100);
      have += peer.receive(text.data() + have, text.size() - have);
    }
    text.resize(have);
    if (!text.empty()) return text;
    return three_lines("a rank that ended the group without a reason", "every rank at work",
                       "start the ranks again");
  }

  std::string absent(int r) {
    const std::lock_guard lock(known_lock_);
    const State& known = peers_[r].known;
    return "rank " + std::to_string(r) +
           (known.pid > 0 ? " (pid " + std::to_string(known.pid) + ")" : "") +
           ", last collective " + std::to_string(known.num_calls);
  }

  [[noreturn]] void missing(const std::string& who, const std::string& why,
                            Clock::time_point begin) {
    give_up(three_lines(who + ": not at " + describe(call_) + " after " +
                            seconds_text(seconds_from(begin)) + why,
                        "every rank within the time limit of " + seconds_text(time_limit_),
                        "see what became of it; give ranks more time if it is only slow"));
  }

  [[noreturn]] void lost(int r, Clock::time_point begin) {
    const int error = peers_[r].error;
    missing(absent(r), error > 0 ? std::string(" (") + std::strerror(error) + ")"
                                 : " (its connection has ended)",
            begin);
  }

  // Of those that did not come; where all have, of those whose data did not, or that take none.
  [[noreturn]] void late(Clock::time_point begin) {
    std::string who;
    const auto add = [&](auto&& is_meant) {
      if (!who.empty()) return;
      for (int r = 0; r < size(); ++r)
        if (r != rank() && is_meant(peers_[r])) who += (who.empty() ? "" : "; ") + absent(r);
    };
    add([](const Peer& peer) { return !peer.is_done && peer.got_bytes < kHeadBytes; });
    add([](const Peer& peer) { return !peer.is_done; });
    add([](const Peer& peer) { return !peer.out.empty(); });
    missing(who, "", begin);
  }

  Head head(Word word, int64_t bytes) const {
    Head made{};
    made.word = word;
    made.pid = ::getpid();
    made.bytes = bytes;
    made.call = call_;
    std::strncpy(made.version, specc_interface, sizeof made.version - 1);
    return made;
  }

  // Of a thread that has `busy_`.
  [[noreturn]] void give_up(const std::string& text) {
    end(text, Word::kAbort);
    tell();
    check_ended();
    throw std::runtime_error(text);
  }

  // Of any other thread: whoever waits in a collective is woken, and leaves it.
  void leave(const std::string& text, Word word) {
    end(text, word);
    const uint64_t one = 1;
    (void)!::write(wake_, &one, sizeof one);
    const std::lock_guard lock(busy_);
    tell();
  }

  // The first reason stays, here and for those who are told.
  void end(const std::string& text, Word word) {
    const std::lock_guard lock(end_lock_);
    if (has_ended_) return;
    ended_ = text;
    last_ = word;
    has_ended_ = true;
  }

  // Says so to the others, after what they have got a part of.
  void tell() {
    if (std::exchange(has_told_, true)) return;
    const std::string text = last_ == Word::kAbort ? ended_.substr(0, kMaxAbortBytes) : "";
    const Head last = head(last_, static_cast<int64_t>(text.size()));
    for (Peer& peer : peers_) {
      if (peer.socket < 0) continue;
      peer.out.push_back({reinterpret_cast<const char*>(&last), kHeadBytes});
      if (!text.empty()) peer.out.push_back({text.data(), static_cast<int64_t>(text.size())});
    }
    const auto until = Clock::now() + kFarewell;
    for (;;) {
      std::vector<pollfd> waiting;
      for (Peer& peer : peers_) {
        if (peer.socket >= 0 && !peer.is_ended()) peer.send();
        if (peer.socket >= 0 && !peer.is_ended() && !peer.out.empty())
          waiting.push_back({peer.socket, POLLOUT, 0});
      }
      if (waiting.empty() || Clock::now() >= until) break;
      ::poll(waiting.data(), waiting.size(), 50);
    }
    for (Peer& peer : peers_) peer.out.clear();
  }

  std::vector<Peer> peers_;
  const int wake_, rank_;
  const double time_limit_;
  std::mutex busy_;
  int64_t num_calls_ = 0;
  Call call_;
  std::vector<char> received_;
  bool has_told_ = false;
  std::mutex end_lock_;
  std::atomic<bool> has_ended_ = false;
  std::string ended_;
  Word last_ = Word::kClosed;
  std::mutex known_lock_;
};

}  // namespace

std::shared_ptr<Group> open_sockets(const int* sockets, int rank, int size, double time_limit) {
  const auto close_all = [&] {
    for (int r = 0; r < size; ++r)
      if (r != rank && sockets[r] >= 0) ::close(sockets[r]);
  };
  int wake = -1;
  try {
    if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
      refuse("rank " + std::to_string(rank) + " of " + std::to_string(size),
             "0 … N - 1 of " + std::to_string(kMaxRanks) + " at most",
             "choose another number of ranks");
    if (!(time_limit > 0 && time_limit < 1e9))
      refuse("a time limit of " + std::to_string(time_limit) + " s", "more than 0",
             "choose another limit");
    std::vector<Peer> peers(size);
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      if (!Peer::prepare(sockets[r]))
        refuse("no connection to rank " + std::to_string(r), "a connected stream of each rank",
               "let specc.runtime.ranks.sockets connect them");
      peers[r].socket = sockets[r];
    }
    wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake < 0)
      refuse(std::string("no descriptor: ") + std::strerror(errno), "one of the system's",
             "close some files");
    return std::make_shared<SocketGroup>(std::move(peers), wake, rank, time_limit);
  } catch (...) {
    close_all();
    if (wake >= 0) ::close(wake);
    throw;
  }
}

}  // namespace specc::ranks
