#include "weight_stream.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "clock.h"
#include "ranks_guard.h"

namespace specc {
namespace {

// One read of the system: what a stopped device is noticed by, and enough that it hardly counts
// when a thread that was woken waits for its turn.
constexpr int64_t kReadBytes = int64_t{16} << 20;
// Threads that read: while one of them waits for its turn, the device has work of the other.
constexpr int kReaders = 2;
constexpr int64_t kMaxEnd = int64_t{1} << 62;  // of pieces, in bytes
constexpr int64_t kHugePage = int64_t{2} << 20;

void require(bool is_true, const std::string& text) {
  if (!is_true) throw std::runtime_error(text);
}

int64_t page_end(int64_t byte) {
  return (byte + WeightStream::kPage - 1) / WeightStream::kPage * WeightStream::kPage;
}

// Memory to read into, in huge pages where the system has them: a device takes so many places in
// memory with one request, so that what is scattered over small pages is read in many small ones,
// each of which costs time of a core, too.
std::shared_ptr<char> make_buffer(int64_t bytes) {
  const int64_t size = page_end(bytes), huge = size / kHugePage * kHugePage;
  const int64_t alignment = huge > 0 ? kHugePage : WeightStream::kPage;
  // a mapping of its own: what is asked of its pages would stay with those of a heap
  const int64_t mapped = size + alignment;
  void* const begin =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(begin != MAP_FAILED, "no memory for a buffer of " + std::to_string(bytes) + " bytes");
  const auto address = reinterpret_cast<uintptr_t>(begin);
  char* const data = static_cast<char*>(begin) + (alignment - address % alignment) % alignment;
  // a system that has none, or none to spare, reads into small pages
  if (huge > 0) madvise(data, huge, MADV_HUGEPAGE);
  return std::shared_ptr<char>(data, [begin, mapped](char*) { munmap(begin, mapped); });
}

}  // namespace

struct WeightStream::State {
  struct Piece {
    int64_t offset, size;

    int64_t first_page() const { return offset / WeightStream::kPage * WeightStream::kPage; }
    int64_t lead() const { return offset - first_page(); }
    // Bytes that are read, whole pages; a file may end within the last one.
    int64_t span() const { return page_end(offset + size) - first_page(); }
  };

  struct Slot {
    std::shared_ptr<char> data;
    int64_t held = -1;    // the piece that lies in it, -1: none
    int64_t wanted = -1;  // the piece that is to be there next
    int64_t read = -1;    // the piece that is being read into it, -1: none
    int64_t given = 0, num_pending = 0;  // its bytes that a reader has taken, and reads under way
    bool is_used = false, failed = false;  // between acquire and release; a read failed
  };

  // What one reader does next: `count` bytes from `begin` of a slot's piece.
  struct Part {
    Slot* slot;
    int64_t begin, count;
  };

  std::string path;
  int descriptor = -1;
  bool is_direct = false, is_over = false;
  std::vector<Piece> pieces;
  Slot slots[kSlots];
  std::mutex mutex;
  std::condition_variable changed;
  std::string failure;  // of the last read, until somebody was told
  int64_t next = 0;     // the piece that is acquired next
  int64_t bytes_read = 0;
  double patience = 8.0, reading = 0, waiting = 0;
  int64_t num_reading = 0;   // reads under way
  Clock::time_point begun;  // of the first of them

  ~State() {
    if (descriptor >= 0) close(descriptor);
  }

  void check(int64_t piece) const {
    require(piece >= 0 && piece < static_cast<int64_t>(pieces.size()),
            "piece " + std::to_string(piece));
  }

  Slot& slot_of(int64_t piece) { return slots[piece % kSlots]; }

  // The piece that this slot holds after `piece`, in the circle of passes.
  int64_t after(int64_t piece) const {
    const int64_t count = static_cast<int64_t>(pieces.size());
    return piece + kSlots < count ? piece + kSlots : piece % kSlots;
  }

  // Passes until a piece is needed, in pieces.
  int64_t distance(int64_t piece) const {
    const int64_t count = static_cast<int64_t>(pieces.size());
    return (piece - next + count) % count;
  }

  // What to read next, of the piece that is needed first; no slot: nothing.
  Part next_part() {
    Slot* best = nullptr;
    for (Slot& slot : slots) {
      if (slot.is_used || slot.wanted < 0 || slot.held == slot.wanted) continue;
      // another piece may still be on its way here, of a pass that ended early: nothing more of it
      if (slot.read >= 0 && slot.read != slot.wanted) {
        if (slot.num_pending > 0) continue;
        slot.read = -1;
      }
      if (slot.read >= 0 && slot.given == pieces[slot.read].span()) continue;
      if (best == nullptr || distance(slot.wanted) < distance(best->wanted)) best = &slot;
    }
    if (best == nullptr) return {nullptr, 0, 0};
    if (best->read < 0) {
      best->read = best->wanted;
      best->held = -1;
      best->given = 0;
    }
    const int64_t begin = best->given;
    const int64_t count = std::min(kReadBytes, pieces[best->read].span() - begin);
    best->given += count;
    ++best->num_pending;
    return {best, begin, count};
  }

  void read(const Piece& piece, char* data, const Part& part, std::string& error);
  void work();
};

void WeightStream::State::read(const Piece& piece, char* data, const Part& part,
                               std::string& error) {
  const int64_t end = std::min(part.begin + part.count, piece.lead() + piece.size);
  for (int64_t done = part.begin; done < end;) {
    const int64_t count = part.begin + part.count - done;
    const ssize_t found = pread(descriptor, data + done, count, piece.first_page() + done);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) {
      error = path + " cannot be read at byte " + std::to_string(piece.first_page() + done) + ": " +
              std::strerror(errno);
      return;
    }
    // past the cache only the end of a file is no whole page
    const bool ends = found == 0 || (is_direct && found % kPage != 0);
    if (ends && done + found < end) {
      error = path + " ends at byte " + std::to_string(piece.first_page() + done + found) +
              ", within the weights: it was cut while the engine was using it";
      return;
    }
    done += found;
    const std::lock_guard<std::mutex> guard(mutex);
    bytes_read += found;
    changed.notify_all();  // whoever waits sees that the device answers
  }
  if (!is_direct) {
    posix_fadvise(descriptor, piece.first_page() + part.begin, part.count, POSIX_FADV_DONTNEED);
  }
}

void WeightStream::State::work() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!is_over) {
    const Part part = failure.empty() ? next_part() : Part{nullptr, 0, 0};
    if (part.slot == nullptr) {
      changed.wait(lock);
      continue;
    }
    Slot& slot = *part.slot;
    const int64_t index = slot.read;
    if (num_reading++ == 0) begun = Clock::now();
    lock.unlock();
    std::string error;
    read(pieces[index], slot.data.get(), part, error);
    lock.lock();
    if (--num_reading == 0) reading += seconds_since(begun);
    --slot.num_pending;
    if (!error.empty()) {
      failure = error;
      slot.given = pieces[index].span();  // no more of it
      slot.failed = true;
    }
    if (slot.num_pending == 0 && slot.read != slot.wanted) {
      slot.read = -1;
      slot.failed = false;
      changed.notify_all();
    } else if (slot.num_pending == 0 && slot.given == pieces[index].span()) {
      slot.held = slot.failed ? -1 : index;
      slot.read = -1;
      slot.failed = false;
      changed.notify_all();
    }
  }
}

WeightStream::WeightStream(const std::string& path, std::vector<int64_t> offsets,
                           std::vector<int64_t> sizes, bool direct)
    : state_(std::make_shared<State>()) {
  State& state = *state_;
  require(!offsets.empty() && offsets.size() == sizes.size(), "an offset and a size of each");
  state.path = path;
  for (size_t i = 0; i < offsets.size(); ++i) {
    int64_t end = 0;
    require(offsets[i] >= 0 && sizes[i] > 0 &&
                !__builtin_add_overflow(offsets[i], sizes[i], &end) && end < kMaxEnd,
            "a piece of one byte or more");
    state.pieces.push_back({offsets[i], sizes[i]});
  }
  if (direct) state.descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  state.is_direct = state.descriptor >= 0;
  if (!state.is_direct) state.descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(state.descriptor >= 0, path + ": " + std::strerror(errno));
  const int64_t count = static_cast<int64_t>(state.pieces.size());
  for (int64_t i = 0; i < std::min(kSlots, count); ++i) {
    int64_t bytes = 0;
    for (int64_t k = i; k < count; k += kSlots) bytes = std::max(bytes, state.pieces[k].span());
    state.slots[i].data = make_buffer(bytes);
    state.slots[i].wanted = i;
  }
  for (int i = 0; i < kReaders; ++i) {
    std::thread([state = state_] { state->work(); }).detach();
  }
}

WeightStream::~WeightStream() {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  state_->is_over = true;
  state_->changed.notify_all();
}

WeightStream::Bytes WeightStream::piece(int64_t index) {
  state_->check(index);
  const State::Piece& piece = state_->pieces[index];
  std::shared_ptr<char> data = state_->slot_of(index).data;
  return {data.get() + piece.lead(), piece.size, data};
}

void WeightStream::acquire(int64_t index) {
  State& state = *state_;
  state.check(index);
  std::unique_lock<std::mutex> lock(state.mutex);
  State::Slot& slot = state.slot_of(index);
  const auto begin = Clock::now();
  auto heard = begin;
  int64_t known = state.bytes_read;
  state.next = index;
  state.failure.clear();  // of reading ahead: tried once more
  // after a pass that ended early another piece may be on its way here
  slot.wanted = index;
  state.changed.notify_all();
  while (slot.held != index) {
    if (!state.failure.empty()) {
      std::string text;
      text.swap(state.failure);
      throw std::runtime_error(text);
    }
    state.changed.wait_for(lock, std::chrono::milliseconds(200));
    if (state.bytes_read != known) {
      known = state.bytes_read;
      heard = Clock::now();
    }
    if (seconds_since(heard) < state.patience || slot.held == index) continue;
    char patience[32];
    std::snprintf(patience, sizeof patience, "%g", state.patience);
    throw std::runtime_error(state.path + ": no byte of the weights was read for " + patience +
                             " seconds: the device does not answer");
  }
  slot.is_used = true;
  state.waiting += seconds_since(begin);
}

void WeightStream::release(int64_t index) {
  state_->check(index);
  const std::lock_guard<std::mutex> guard(state_->mutex);
  State::Slot& slot = state_->slot_of(index);
  slot.is_used = false;
  slot.wanted = state_->after(index);
  state_->next = (index + 1) % static_cast<int64_t>(state_->pieces.size());
  state_->changed.notify_all();
}

bool WeightStream::is_direct() const { return state_->is_direct; }

void WeightStream::set_patience(double seconds) {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  state_->patience = seconds;
}

int64_t WeightStream::bytes_read() {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->bytes_read;
}

std::vector<double> WeightStream::seconds() {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  return {state_->reading, state_->waiting};
}

}  // namespace specc

// What Python calls (kernels/weight_stream.py). A handle is a shared pointer, which programs copy
// (`stream_of`); a function that fails returns -1 and leaves the text to specc_stream_error.

using specc::WeightStream;
using specc::ranks::guarded;

#define SPECC_EXPORT extern "C" __attribute__((visibility("default")))

SPECC_EXPORT const char* specc_stream_error() { return specc::ranks::error_text.c_str(); }

SPECC_EXPORT int specc_stream_open(const char* path, const int64_t* offsets, const int64_t* sizes,
                                   int64_t count, int direct, void** handle) {
  return guarded([&] {
    *handle = new std::shared_ptr<WeightStream>(std::make_shared<WeightStream>(
        path, std::vector<int64_t>(offsets, offsets + count),
        std::vector<int64_t>(sizes, sizes + count), direct != 0));
  });
}

SPECC_EXPORT int specc_stream_acquire(void* handle, int64_t index) {
  return guarded([&] { specc::stream_of(handle)->acquire(index); });
}

SPECC_EXPORT int specc_stream_release(void* handle, int64_t index) {
  return guarded([&] { specc::stream_of(handle)->release(index); });
}

// `owner` keeps the bytes there, also without the stream, until specc_stream_free.
SPECC_EXPORT int specc_stream_piece(void* handle, int64_t index, void** data, int64_t* size,
                                    void** owner) {
  return guarded([&] {
    WeightStream::Bytes found = specc::stream_of(handle)->piece(index);
    *owner = new std::shared_ptr<char>(std::move(found.owner));
    *data = found.data;
    *size = found.size;
  });
}

SPECC_EXPORT void specc_stream_free(void* owner) {
  delete static_cast<std::shared_ptr<char>*>(owner);
}

SPECC_EXPORT int specc_stream_is_direct(void* handle) {
  return specc::stream_of(handle)->is_direct();
}

SPECC_EXPORT void specc_stream_set_patience(void* handle, double seconds) {
  specc::stream_of(handle)->set_patience(seconds);
}

SPECC_EXPORT int64_t specc_stream_bytes_read(void* handle) {
  return specc::stream_of(handle)->bytes_read();
}

// Of reading, and of waiting in acquire.
SPECC_EXPORT void specc_stream_seconds(void* handle, double* both) {
  const std::vector<double> found = specc::stream_of(handle)->seconds();
  std::copy(found.begin(), found.end(), both);
}

SPECC_EXPORT void specc_stream_close(void* handle) {
  delete static_cast<std::shared_ptr<WeightStream>*>(handle);
}
