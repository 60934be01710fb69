// A process that reads beyond the end of a mapped file gets SIGBUS: let it say why it dies.
#pragma once

#include <cstddef>
#include <vector>

namespace specc {

// A SIGBUS in watched memory is explained on stderr; any other goes where it went before. Memory
// that finds no free place among some thousand is not watched.
void watch_memory(const void* data, size_t bytes);
void forget_memory(const void* data);

// Memory that is watched as long as this lives.
class WatchedMemory {
 public:
  WatchedMemory() = default;
  ~WatchedMemory() { clear(); }
  WatchedMemory(const WatchedMemory&) = delete;
  WatchedMemory& operator=(const WatchedMemory&) = delete;

  void add(const void* data, size_t bytes);
  void clear();

 private:
  std::vector<const void*> watched_;
};

}  // namespace specc
