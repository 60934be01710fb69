#include "bus_errors.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace specc {
namespace {

// Read by the handler, which may take no lock: a place is free while it has no end.
struct Place {
  std::atomic<uintptr_t> begin{0}, end{0};
  int users = 0;  // two programs may have the same weights
};
constexpr int kPlaces = 4096;
Place places[kPlaces];
std::atomic<int> used_places{0};
std::mutex mutex;
struct sigaction before;
static_assert(std::atomic<uintptr_t>::is_always_lock_free);

bool is_watched(uintptr_t address) {
  const int count = used_places.load();
  for (int i = 0; i < count; ++i)
    if (address < places[i].end.load() && address >= places[i].begin.load()) return true;
  return false;
}

void report_bus_error(int, siginfo_t* info, void*) {
  static constexpr char kText[] =
      "found:  memory-mapped weights were cut while the engine was using them\n"
      "needed: engine files that stay as they are while the engine runs\n"
      "do:     copy the engine again; replace engines by renaming, never in place\n";
  const bool is_fault = info->si_code > 0;  // else somebody sent the signal
  if (is_fault && is_watched(reinterpret_cast<uintptr_t>(info->si_addr)))
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kText, sizeof kText - 1);
  // the instruction that faulted runs again and meets who was here before, with the same address
  sigaction(SIGBUS, &before, nullptr);
  if (!is_fault) raise(SIGBUS);
}

void explain_bus_errors() {
  // once a process: whoever came later may go on to this handler, which must not go on to them
  static const bool is_installed = [] {
    struct sigaction action {};
    action.sa_sigaction = report_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    // `before` is complete before the handler can run
    return sigaction(SIGBUS, nullptr, &before) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;
  }();
  (void)is_installed;
}

}  // namespace

void watch_memory(const void* data, size_t bytes) {
  if (data == nullptr || bytes == 0) return;
  explain_bus_errors();
  const std::lock_guard<std::mutex> lock(mutex);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  Place* free = nullptr;
  for (Place& place : places) {
    const bool is_free = place.users == 0;
    if (!is_free && place.begin.load() == begin) {
      place.end.store(std::max<uintptr_t>(place.end.load(), begin + bytes));
      ++place.users;
      return;
    }
    if (is_free && free == nullptr) free = &place;
  }
  if (free == nullptr) return;
  free->users = 1;
  free->begin.store(begin);
  free->end.store(begin + bytes);
  const int count = static_cast<int>(free - places) + 1;
  if (count > used_places.load()) used_places.store(count);
}

void forget_memory(const void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Place& place : places)
    if (place.users > 0 && place.begin.load() == reinterpret_cast<uintptr_t>(data)) {
      if (--place.users == 0) place.end.store(0);
      return;
    }
}

void WatchedMemory::add(const void* data, size_t bytes) {
  if (std::find(watched_.begin(), watched_.end(), data) != watched_.end()) return;
  watched_.push_back(data);
  watch_memory(data, bytes);
}

void WatchedMemory::clear() {
  for (const void* data : watched_) forget_memory(data);
  watched_.clear();
}

}  // namespace specc
