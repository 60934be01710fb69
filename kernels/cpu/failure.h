// Why a C function that compiled code called has failed: that code passes on a number, no text.
#pragma once

#include <string>

namespace specc {

// Takes the text of a failure in this thread; null: nobody does, and it goes to stderr.
inline thread_local std::string* failure_text = nullptr;

class FailureText {
 public:
  FailureText() : before_(failure_text) { failure_text = &text; }
  ~FailureText() { failure_text = before_; }
  FailureText(const FailureText&) = delete;
  FailureText& operator=(const FailureText&) = delete;

  std::string text;

 private:
  std::string* before_;
};

}  // namespace specc
