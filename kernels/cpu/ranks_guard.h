// What the C functions that Python calls (kernels/ranks.py) do with an exception.
#pragma once

#include <exception>
#include <string>

namespace specc::ranks {

// of the last function of this thread that failed
inline thread_local std::string error_text;

// 0, or -1 with the text of what was thrown in `error_text`.
template <typename F>
int guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    error_text = error.what();
    return -1;
  }
}

}  // namespace specc::ranks
