// A row of floats that is kept from step to step: what the system hands out anew costs more to
// touch first than to compute with.
#pragma once

#include <cstdint>
#include <memory>

namespace specc {

class RowMemory {
 public:
  // Floats after the end of a row that may be written, too: whole registers need no last case.
  static constexpr int64_t kPadding = 64;

  // [size], of whatever the last use left.
  float* row(int64_t size) {
    if (size > size_) {
      data_.reset(new float[size + kPadding]);
      size_ = size;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<float[]> data_;
  int64_t size_ = 0;
};

}  // namespace specc
