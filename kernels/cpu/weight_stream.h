// Weights that do not fit in memory: pieces of a file, read around a pass into two buffers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace specc {

// A thread reads piece i + 1 while piece i is used. Pieces are used in order, pass after pass;
// piece i lies in slot i % 2, always at the same address. After the last piece of a pass the first
// ones of the next are read, so that a pass reads each piece once.
//
// Reads go past the page cache (O_DIRECT) where the file system can: a pass reads in a circle, so
// nothing in that cache would ever be read again. Where it cannot, pages are given back after use.
class WeightStream {
 public:
  // Offsets and sizes in bytes of the file, of each piece. A slot begins with the piece's page:
  // the piece itself lies `offset % kPage` bytes after the slot's first byte.
  WeightStream(const std::string& path, std::vector<int64_t> offsets, std::vector<int64_t> sizes,
               bool direct);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  static constexpr int64_t kPage = 4096, kSlots = 2;

  struct Bytes {
    char* data;
    int64_t size;
    std::shared_ptr<char> owner;  // of the slot, which outlives the stream with it
  };
  // The bytes of a piece, in its slot; what they are is known after `acquire`.
  Bytes piece(int64_t index);
  // Waits until a piece is in its slot; throws where it cannot be read, or where nothing is read
  // for `patience` seconds.
  void acquire(int64_t index);
  // Its slot may be overwritten.
  void release(int64_t index);

  bool is_direct() const;
  void set_patience(double seconds);
  // Bytes that were asked of the file, whole pages; seconds of reading, and of waiting in acquire.
  int64_t bytes_read();
  std::vector<double> seconds();

 private:
  struct State;
  // the thread holds it, too: one that hangs in a read outlives the stream
  std::shared_ptr<State> state_;
};

// The stream of a handle of specc_stream_open.
inline const std::shared_ptr<WeightStream>& stream_of(const void* handle) {
  return *static_cast<const std::shared_ptr<WeightStream>*>(handle);
}

}  // namespace specc
