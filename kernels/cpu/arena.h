// Memory of the values that a program makes: one range, which its operators share by turns.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace specc {

// Blocks of one range, each aligned to 64 bytes; the first free place that is large enough. Used by
// one thread at a time. Where there is no place any more, more memory is taken from the system;
// `clear` makes one range of it all, so that a step whose sizes have been seen takes nothing.
class Arena {
 public:
  // reserved: bytes to begin with; pages that nobody touches cost nothing.
  explicit Arena(int64_t reserved = 0) : reserved_(reserved) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Throws where it would hold more than `limit`, or where the system has no more.
  void* take(int64_t bytes);
  void give(void* block);
  // Everything is given back.
  void clear();

  // At most so many bytes at a time, of the program that runs.
  void set_limit(int64_t bytes) { limit_ = bytes; }
  int64_t limit() const { return limit_; }

  int64_t capacity() const { return capacity_; }
  int64_t in_use() const { return in_use_; }
  int64_t peak() const { return peak_; }
  // How often the system was asked for memory.
  int64_t growths() const { return growths_; }

  // Whether `data` lies in this block.
  static bool holds(const void* block, const void* data);
  // Bytes of this block from `data` on.
  static int64_t bytes_after(const void* block, const void* data);

 private:
  struct Range {
    char* begin;
    int64_t size;
  };
  struct Header;

  void grow(int64_t bytes);
  void release_chunks();
  void insert_free(char* begin, int64_t size);

  std::vector<Range> chunks_, free_;  // by address
  int64_t reserved_, capacity_ = 0, in_use_ = 0, peak_ = 0, growths_ = 0;
  int64_t limit_ = int64_t{1} << 46;
};

// Freed memory is filled with what no value is (NaN, -1), so that a read of it shows. Also where
// the environment has SPECC_POISON=1.
void set_poison(bool poisons);
bool poisons();

// Arenas of an engine: as many as it has programs in progress.
class ArenaPool {
 public:
  explicit ArenaPool(int64_t reserved) : reserved_(reserved) {}

  std::unique_ptr<Arena> take();
  void give(std::unique_ptr<Arena> arena);
  // Of those that nobody uses: their number, bytes, and how often they grew.
  std::vector<int64_t> counts();

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Arena>> free_;  // the one that was used last is taken first
  int64_t reserved_;
};

// One that is held for a while.
class HeldArena {
 public:
  explicit HeldArena(ArenaPool& pool) : pool_(pool), arena_(pool.take()) {}
  ~HeldArena() { pool_.give(std::move(arena_)); }
  HeldArena(const HeldArena&) = delete;
  HeldArena& operator=(const HeldArena&) = delete;

  Arena& operator*() const { return *arena_; }

 private:
  ArenaPool& pool_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace specc
