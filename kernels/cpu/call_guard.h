// What every function of specc.h does with an exception.
#pragma once

#include <exception>
#include <new>
#include <string>

namespace specc {

// Of the last function of this thread that failed; what specc_error() says.
inline thread_local std::string call_error;

// 0, or -1 with the text of what was thrown in `call_error`.
template <typename F>
int call_guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    call_error = "specc: no memory";
  } catch (const std::exception& error) {
    call_error = error.what();
  } catch (...) {
    call_error = "specc: a call failed";
  }
  return -1;
}

}  // namespace specc
