// Asking for weights before they are multiplied. The hardware prefetcher follows a stream only to
// the end of its 4 KB page.
#pragma once

#include <cstdint>

namespace specc {

// Into which level of the caches: the first where reading is all that takes time; the second where
// many rows are computed meanwhile. A core waits for few lines of the first level at once, so that
// what is asked for there would hold up the loads of the products, and reading and computing would
// take turns. kShared: into the second, a half by each of two tiles of rows (linear.cpp).
enum class Ahead { kNowhere, kFirstLevel, kSecondLevel, kShared };

// `bytes` of a unit, lines of 64, `distance` after it.
template <Ahead ahead, int64_t bytes, int64_t distance>
inline void prefetch(const void* unit) {
  if constexpr (ahead != Ahead::kNowhere)
#pragma GCC unroll 2
    for (int64_t line = 0; line < bytes; line += 64)
      __builtin_prefetch(static_cast<const char*>(unit) + distance + line, 0,
                         ahead == Ahead::kFirstLevel ? 3 : 2);
}

}  // namespace specc
