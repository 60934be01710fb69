#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tensor.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, size) ((void)(begin), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(begin, size) ((void)(begin), (void)(size))
#endif

namespace specc {
namespace {

constexpr int64_t kAlignment = 64, kLeastChunk = 1 << 20, kHugePage = 2 << 20;
constexpr uint64_t kMagic = 0x5bec'c0de'a4e7'a000;

std::atomic<bool> poisons_freed{[] {
  const char* value = std::getenv("SPECC_POISON");
  return value != nullptr && std::strcmp(value, "1") == 0;
}()};

int64_t rounded(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

void* mapped(int64_t size) {
  return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
}

}  // namespace

void set_poison(bool poisons) { poisons_freed = poisons; }
bool poisons() { return poisons_freed; }

// Before each block. Whoever writes beyond a block destroys that of the next one.
struct alignas(kAlignment) Arena::Header {
  uint64_t magic;
  int64_t size;   // of header and block
  int64_t bytes;  // that were asked for
};

Arena::~Arena() { release_chunks(); }

void Arena::release_chunks() {
  for (const Range& chunk : chunks_) {
    ASAN_UNPOISON_MEMORY_REGION(chunk.begin, chunk.size);
    munmap(chunk.begin, chunk.size);
  }
  chunks_.clear();
  free_.clear();
  capacity_ = 0;
}

void Arena::grow(int64_t bytes) {
  const int64_t needed = rounded(std::max(bytes, kLeastChunk), 4096);
  int64_t size = std::max(needed, chunks_.empty() ? reserved_ : capacity_ / 2);
  size = rounded(size, size >= kHugePage ? kHugePage : 4096);
  void* begin = mapped(size);
  // a system that promises no more than it has
  if (begin == MAP_FAILED) begin = mapped(size = needed);
  if (begin == MAP_FAILED) fail("no memory for " + std::to_string(bytes) + " bytes of values");
#if defined(MADV_HUGEPAGE)
  if (size >= kHugePage) madvise(begin, size, MADV_HUGEPAGE);
#endif
  const Range chunk{static_cast<char*>(begin), size};
  chunks_.push_back(chunk);
  capacity_ += size;
  ++growths_;
  ASAN_POISON_MEMORY_REGION(chunk.begin, chunk.size);
  insert_free(chunk.begin, chunk.size);
}

void* Arena::take(int64_t bytes) {
  check(bytes >= 0, "a size of a value is 0 or more");
  if (bytes > limit_ - in_use_)
    fail("values of " + std::to_string(bytes) + " bytes beside " + std::to_string(in_use_) +
         "; at most " + std::to_string(limit_) + " at a time");
  const int64_t size = static_cast<int64_t>(sizeof(Header)) +
                       rounded(std::max<int64_t>(bytes, 1), kAlignment);
  const auto fits = [size](const Range& range) { return range.size >= size; };
  auto place = std::find_if(free_.begin(), free_.end(), fits);
  if (place == free_.end()) {
    grow(size);
    place = std::find_if(free_.begin(), free_.end(), fits);
  }
  char* begin = place->begin;
  if (place->size == size) {
    free_.erase(place);
  } else {
    place->begin += size;
    place->size -= size;
  }
  ASAN_UNPOISON_MEMORY_REGION(begin, sizeof(Header) + bytes);
  *reinterpret_cast<Header*>(begin) = {kMagic, size, bytes};
  in_use_ += size;
  peak_ = std::max(peak_, in_use_);
  return begin + sizeof(Header);
}

void Arena::give(void* block) {
  char* begin = static_cast<char*>(block) - sizeof(Header);
  const Header header = *reinterpret_cast<const Header*>(begin);
  check(header.magic == kMagic, "an operator has written beyond its result");
  if (poisons()) std::memset(begin, 0xff, sizeof(Header) + header.bytes);
  ASAN_POISON_MEMORY_REGION(begin, header.size);
  in_use_ -= header.size;
  insert_free(begin, header.size);
}

void Arena::insert_free(char* begin, int64_t size) {
  auto next = std::lower_bound(free_.begin(), free_.end(), begin,
                               [](const Range& range, const char* at) { return range.begin < at; });
  const bool joins_next = next != free_.end() && begin + size == next->begin;
  if (next != free_.begin()) {
    auto before = next - 1;
    if (before->begin + before->size == begin) {
      before->size += size;
      if (joins_next) {
        before->size += next->size;
        free_.erase(next);
      }
      return;
    }
  }
  if (joins_next) {
    next->begin = begin;
    next->size += size;
  } else {
    free_.insert(next, {begin, size});
  }
}

void Arena::clear() {
  in_use_ = 0;
  if (chunks_.size() > 1) {
    const int64_t all = capacity_;
    release_chunks();
    grow(all);
    return;
  }
  free_.clear();
  for (const Range& chunk : chunks_) {
    // of what is in use nobody knows the places any more
    if (poisons()) {
      ASAN_UNPOISON_MEMORY_REGION(chunk.begin, chunk.size);
      std::memset(chunk.begin, 0xff, std::min(chunk.size, peak_ + kLeastChunk));
    }
    ASAN_POISON_MEMORY_REGION(chunk.begin, chunk.size);
    free_.push_back(chunk);
  }
}

bool Arena::holds(const void* block, const void* data) {
  const char* begin = static_cast<const char*>(block);
  const auto* header = reinterpret_cast<const Header*>(begin - sizeof(Header));
  return data >= begin && data < begin + std::max<int64_t>(header->bytes, 1);
}

int64_t Arena::bytes_after(const void* block, const void* data) {
  const char* begin = static_cast<const char*>(block);
  const auto* header = reinterpret_cast<const Header*>(begin - sizeof(Header));
  return header->bytes - (static_cast<const char*>(data) - begin);
}

std::unique_ptr<Arena> ArenaPool::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return std::make_unique<Arena>(reserved_);
  std::unique_ptr<Arena> arena = std::move(free_.back());
  free_.pop_back();
  return arena;
}

void ArenaPool::give(std::unique_ptr<Arena> arena) {
  arena->clear();
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(arena));
}

std::vector<int64_t> ArenaPool::counts() {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> counts{static_cast<int64_t>(free_.size()), 0, 0, 0};
  for (const auto& arena : free_) {
    counts[1] += arena->capacity();
    counts[2] = std::max(counts[2], arena->peak());
    counts[3] += arena->growths();
  }
  return counts;
}

}  // namespace specc
