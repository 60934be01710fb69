// The group of this process, and the C functions with which Python opens, watches and closes it
// (kernels/ranks.py). A function that fails returns -1 and leaves the text to specc_ranks_error.
#include <cstring>
#include <mutex>

#include "ranks.h"
#include "ranks_guard.h"

namespace specc::ranks {
namespace {

struct Place {
  std::mutex lock;
  std::shared_ptr<Group> group;
};

// never destroyed: a thread may wait in a collective while the process ends
Place& place() {
  static Place* const made = new Place;
  return *made;
}

}  // namespace

std::shared_ptr<Group> group() {
  const std::lock_guard guard(place().lock);
  if (place().group == nullptr)
    refuse("a collective in a process that is no rank", "a group of ranks that this process opened",
           "run an engine that is cut for several ranks by specc run, serve or bench");
  return place().group;
}

void open_group(const std::function<std::shared_ptr<Group>()>& make) {
  const std::lock_guard guard(place().lock);
  if (place().group != nullptr)
    refuse("a second group of ranks in this process", "one at a time", "close the first one");
  place().group = make();
}

void drop_group() {
  std::shared_ptr<Group> dropped;
  {
    const std::lock_guard guard(place().lock);
    dropped = std::move(place().group);
  }
  // another thread may still be in a collective, and holds it
  if (dropped != nullptr) dropped->close();
}

}  // namespace specc::ranks

using namespace specc::ranks;

#define SPECC_EXPORT extern "C" __attribute__((visibility("default")))

SPECC_EXPORT const char* specc_ranks_error() { return error_text.c_str(); }

// Makes the shared memory of a group, of which this process is rank 0; `descriptor` keeps it there
// for those who open it.
SPECC_EXPORT int specc_ranks_create(int size, int64_t slot_bytes, double time_limit,
                                    int* descriptor) {
  return guarded([&] {
    open_group([&] { return create_shared(size, slot_bytes, time_limit, descriptor); });
  });
}

SPECC_EXPORT int specc_ranks_open(const char* path, int rank, int size) {
  return guarded([&] { open_group([&] { return open_shared(path, rank, size); }); });
}

// `sockets`: one for each rank, this one's aside; they are the library's from now on.
SPECC_EXPORT int specc_ranks_open_sockets(const int* sockets, int rank, int size,
                                          double time_limit) {
  return guarded([&] {
    const std::shared_ptr<Group> made = open_sockets(sockets, rank, size, time_limit);
    open_group([&] { return made; });
  });
}

SPECC_EXPORT int specc_ranks_wait(double seconds) {
  return guarded([&] { group()->wait_for_all(seconds); });
}

SPECC_EXPORT int specc_ranks_abort(const char* text) {
  return guarded([&] { group()->abort(text); });
}

// Writes pid, number of collectives, age of the heartbeat in ns (-1: none) and whether it has
// closed, for each of `size` ranks.
SPECC_EXPORT int specc_ranks_states(int64_t* values, int size) {
  return guarded([&] {
    const std::vector<State> states = group()->states();
    if (static_cast<int>(states.size()) != size) throw std::runtime_error("specc: another size");
    for (const State& state : states) {
      *values++ = state.pid;
      *values++ = state.num_calls;
      *values++ = state.heartbeat_ns;
      *values++ = state.is_closed;
    }
  });
}

SPECC_EXPORT int specc_ranks_close() {
  return guarded([] { drop_group(); });
}
