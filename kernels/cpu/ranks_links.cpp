// Links between two ranks, besides the group of a process: values go one way. Python
// (kernels/ranks.py) knows them by number. As groups do, both sides say what they pass on, so a
// receiver that expects something else gets an error and no wrong values.
#include <cstring>
#include <map>
#include <mutex>

#include "ranks.h"
#include "ranks_guard.h"

namespace specc::ranks {
namespace {

struct Links {
  std::mutex lock;
  std::map<int, std::shared_ptr<Group>> groups;
  int last = 0;
};

// never destroyed: a thread may wait in a link while the process ends
Links& links() {
  static Links* const made = new Links;
  return *made;
}

int add(std::shared_ptr<Group> group) {
  Links& all = links();
  const std::lock_guard guard(all.lock);
  all.groups.emplace(++all.last, std::move(group));
  return all.last;
}

// Held by whoever uses it: another thread may close it meanwhile.
std::shared_ptr<Group> link(int number) {
  Links& all = links();
  const std::lock_guard guard(all.lock);
  const auto found = all.groups.find(number);
  if (found == all.groups.end())
    refuse("link " + std::to_string(number) + ", which is closed", "one that is open",
           "load the engine again");
  return found->second;
}

}  // namespace
}  // namespace specc::ranks

using namespace specc::ranks;

#define SPECC_EXPORT extern "C" __attribute__((visibility("default")))

SPECC_EXPORT const char* specc_links_error() { return error_text.c_str(); }

// Makes the shared memory of a link, of which this process is the sender.
SPECC_EXPORT int specc_links_create(int64_t slot_bytes, double time_limit, int* descriptor,
                                    int* number) {
  return guarded([&] { *number = add(create_shared(2, slot_bytes, time_limit, descriptor)); });
}

SPECC_EXPORT int specc_links_open(const char* path, int* number) {
  return guarded([&] { *number = add(open_shared(path, 1, 2)); });
}

// `sockets`: two, of which the one of the other rank is the library's from now on.
SPECC_EXPORT int specc_links_open_sockets(const int* sockets, int rank, double time_limit,
                                          int* number) {
  return guarded([&] { *number = add(open_sockets(sockets, rank, 2, time_limit)); });
}

// The sender, rank 0 of the two, gives `bytes` at `data`; the receiver takes as many there.
SPECC_EXPORT int specc_links_pass(int number, void* data, int dtype, int64_t rows, int64_t columns,
                                  int64_t bytes) {
  return guarded([&] {
    const std::shared_ptr<Group> both = link(number);
    Call call;
    call.kind = Kind::kFromFirst;
    call.dtype = dtype;
    call.rows = rows;
    call.columns = columns;
    call.bytes = bytes;
    const bool receives = both->rank() != 0;
    both->share(call, data, [&](int, int64_t offset, const char* part, int64_t size) {
      if (receives && size > 0)
        std::memcpy(static_cast<char*>(data) + offset, part, size);
    });
  });
}

SPECC_EXPORT int specc_links_abort(int number, const char* text) {
  return guarded([&] { link(number)->abort(text); });
}

SPECC_EXPORT int specc_links_close(int number) {
  return guarded([&] {
    std::shared_ptr<Group> dropped;
    {
      Links& all = links();
      const std::lock_guard guard(all.lock);
      const auto found = all.groups.find(number);
      if (found == all.groups.end()) return;
      dropped = std::move(found->second);
      all.groups.erase(found);
    }
    dropped->close();
  });
}
