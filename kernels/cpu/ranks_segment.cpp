#include "ranks_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

// version.cpp
extern "C" const char specc_interface[];

namespace specc::ranks {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kMaxSlotBytes = int64_t{1} << 30;
constexpr timespec kNap = {0, 50'000'000};

int64_t slots_begin(int64_t num_ranks) {
  const int64_t used = sizeof(Header) + num_ranks * sizeof(Cell);
  return (used + kPage - 1) / kPage * kPage;
}

int64_t bytes_of(int64_t num_ranks, int64_t slot_bytes) {
  return slots_begin(num_ranks) + 2 * num_ranks * slot_bytes;
}

std::string system_error() { return std::strerror(errno); }

int unnamed_file() {
#ifdef __linux__
  const int made = ::memfd_create("specc-ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made >= 0) return made;
#endif
  char path[] = "/tmp/specc-ranks-XXXXXX";
  const int file = ::mkstemp(path);
  if (file < 0)
    refuse("no file for the ranks' shared memory: " + system_error(), "memfd_create, or room in /tmp",
           "free some memory");
  ::unlink(path);
  return file;
}

char* map(int file, int64_t num_bytes) {
  void* memory = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED)
    refuse("the ranks' shared memory cannot be mapped: " + system_error(),
           std::to_string(num_bytes) + " bytes of address space", "use fewer ranks");
  return static_cast<char*>(memory);
}

}  // namespace

Segment::Segment(char* memory, int64_t num_bytes) : memory_(memory), num_bytes_(num_bytes) {}

Segment::Segment(Segment&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      num_bytes_(other.num_bytes_),
      num_ranks_(other.num_ranks_),
      slot_bytes_(other.slot_bytes_),
      time_limit_(other.time_limit_),
      slots_(other.slots_) {}

Segment::~Segment() {
  if (memory_ != nullptr) ::munmap(memory_, num_bytes_);
}

Segment Segment::create(int num_ranks, int64_t slot_bytes, double time_limit, int* descriptor) {
  if (num_ranks < 1 || num_ranks > kMaxRanks)
    refuse(std::to_string(num_ranks) + " ranks", "1 … " + std::to_string(kMaxRanks),
           "choose another number of ranks");
  if (slot_bytes < 64 || slot_bytes > kMaxSlotBytes || slot_bytes % 64 != 0)
    refuse("slots of " + std::to_string(slot_bytes) + " bytes", "a multiple of 64 up to 1 GiB",
           "choose another size");
  if (!(time_limit > 0 && time_limit < 1e9))
    refuse("a time limit of " + std::to_string(time_limit) + " s", "more than 0",
           "choose another limit");
  const int file = unnamed_file();
  const int64_t num_bytes = bytes_of(num_ranks, slot_bytes);
  try {
    if (::ftruncate(file, num_bytes) != 0)
      refuse("no room for the ranks' shared memory: " + system_error(),
             std::to_string(num_bytes) + " bytes", "free some memory");
#ifdef __linux__
    // a file that is cut would kill whoever reads after its end
    ::fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
#endif
    Segment made(map(file, num_bytes), num_bytes);
    Header& header = *new (made.memory_) Header{};
    std::strncpy(header.version, specc_interface, sizeof header.version - 1);
    made.num_ranks_ = static_cast<int>(header.num_ranks = num_ranks);
    made.slot_bytes_ = header.slot_bytes = slot_bytes;
    made.time_limit_ = header.time_limit = time_limit;
    header.num_bytes = num_bytes;
    made.slots_ = made.memory_ + slots_begin(num_ranks);
    for (int r = 0; r < num_ranks; ++r) new (&made.cell(r)) Cell{};
    *descriptor = file;
    return made;
  } catch (...) {
    ::close(file);
    throw;
  }
}

Segment Segment::open(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    refuse("the ranks' shared memory " + path + " cannot be opened: " + system_error(),
           "rank 0 of the same user on this machine, with the group open",
           "start the ranks again");
  struct stat status {};
  const bool is_known = ::fstat(file, &status) == 0;
  const int64_t num_bytes = is_known ? status.st_size : 0;
  Segment opened(nullptr, num_bytes);
  try {
    if (num_bytes >= bytes_of(1, 64)) opened.memory_ = map(file, num_bytes);
  } catch (...) {
    ::close(file);
    throw;
  }
  ::close(file);
  char version[sizeof(Header::version)] = {};
  std::strncpy(version, specc_interface, sizeof version - 1);
  if (opened.memory_ == nullptr ||
      std::memcmp(opened.header().version, version, sizeof version) != 0)
    refuse(path + " is no shared memory of ranks, or of another version of specc",
           "what rank 0 of this engine has made", "start all ranks with one engine and version");
  const Header& header = opened.header();
  const int64_t num_ranks = header.num_ranks, slot_bytes = header.slot_bytes;
  if (num_ranks < 1 || num_ranks > kMaxRanks || slot_bytes < 64 || slot_bytes > kMaxSlotBytes ||
      slot_bytes % 64 != 0 || header.num_bytes != num_bytes ||
      bytes_of(num_ranks, slot_bytes) != num_bytes)
    refuse(path + " has damaged sizes", "what rank 0 of this engine has made",
           "start the ranks again");
  opened.num_ranks_ = static_cast<int>(num_ranks);
  opened.slot_bytes_ = slot_bytes;
  opened.time_limit_ = header.time_limit;
  opened.slots_ = opened.memory_ + slots_begin(num_ranks);
  return opened;
}

int64_t Segment::now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Segment::sleep(std::atomic<uint32_t>& word, uint32_t seen) {
#ifdef __linux__
  // not FUTEX_PRIVATE: others wake it from their processes
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &kNap, nullptr, 0);
#else
  constexpr timespec nap = {0, 50'000};
  if (word.load() == seen) ::nanosleep(&nap, nullptr);
#endif
}

void Segment::wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void Segment::abort(const std::string& text) const {
  auto expected = static_cast<uint32_t>(AbortState::kNone);
  Header& head = header();
  if (head.abort_state.compare_exchange_strong(
          expected, static_cast<uint32_t>(AbortState::kBeingWritten))) {
    std::memcpy(head.abort_text, text.data(), std::min(text.size(), kTextBytes - 1));
    head.abort_state.store(static_cast<uint32_t>(AbortState::kWritten), std::memory_order_release);
  }
  for (int r = 0; r < num_ranks_; ++r) wake(cell(r).turn);
}

std::string Segment::abort_text() const {
  const Header& head = header();
  // who writes it may be killed at it
  for (const int64_t end = now_ns() + 1'000'000'000; now_ns() < end;) {
    if (head.abort_state.load(std::memory_order_acquire) ==
        static_cast<uint32_t>(AbortState::kWritten))
      return std::string(head.abort_text, ::strnlen(head.abort_text, kTextBytes - 1));
  }
  return three_lines("a rank that ended the group without a reason", "every rank at work",
                     "start the ranks again");
}

}  // namespace specc::ranks
