// Collectives of the ranks of a sharded engine; semantics: kernels/reference/ranks.py. A process is
// one rank of one group at most, and a group has one transport: shared memory for the ranks of a
// host (ranks_shared.cpp), TCP for those of several (ranks_sockets.cpp).
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace specc::ranks {

enum class Kind : int32_t { kNone, kAllReduce, kGatherRows, kFromFirst, kBestOfRanks };

enum class Element : int32_t { kFloat32, kBFloat16, kFloat16, kOther };

// What ranks that meet have to agree on, and all that they are told of each other.
struct Call {
  int64_t number = 0;  // of the collective, from 1
  Kind kind = Kind::kNone;
  int32_t dtype = 0;  // torch's code
  int64_t rows = 0, columns = 0, bytes = 0;

  bool is_same(const Call& other) const {
    return number == other.number && kind == other.kind && dtype == other.dtype &&
           rows == other.rows && columns == other.columns && bytes == other.bytes;
  }
  // Whether a rank's tensor goes to others.
  bool is_sent_by(int rank) const { return kind != Kind::kFromFirst || rank == 0; }
  bool is_read_by(int rank) const { return kind != Kind::kGatherRows || rank == 0; }
};

std::string describe(const Call& call);

// Says what was found, what was needed and what to do, as specc's errors do (specc/errors.py).
inline std::string three_lines(const std::string& found, const std::string& needed,
                               const std::string& what_to_do) {
  return "found:  " + found + "\nneeded: " + needed + "\ndo:     " + what_to_do;
}

[[noreturn]] inline void refuse(const std::string& found, const std::string& needed,
                                const std::string& what_to_do) {
  throw std::runtime_error(three_lines(found, needed, what_to_do));
}

inline std::string seconds_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

// Up to here every rank adds up all data of all ranks, in one exchange; above, its part of them,
// and then all take all sums.
constexpr int64_t kDirectBytes = 65536;
constexpr int kMaxRanks = 64;

// What a rank last told the others.
struct State {
  int64_t pid = 0;         // 0: not opened yet
  int64_t num_calls = 0;   // collectives that it has begun
  int64_t heartbeat_ns = -1;  // age; -1: nothing was heard
  bool is_closed = false;
};

// Bytes `offset` … `offset + bytes` of what a rank sends; valid during the call.
using Sink = std::function<void(int rank, int64_t offset, const char* data, int64_t bytes)>;

// All members may be called by any thread; collectives of one process run one after the other.
class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // y[i] = x[i] of rank 0 + x[i] of rank 1 + …, in this order on every rank. Both may not overlap.
  virtual void all_reduce(Call call, Element element, const void* x, void* y) = 0;
  // Gives what every rank that sends has, `call.bytes` each, to the sink of each rank that reads.
  virtual void share(Call call, const void* x, const Sink& sink) = 0;
  // Ends every wait of every rank with this text; the first reason stays.
  virtual void abort(const std::string& text) = 0;
  virtual std::vector<State> states() = 0;
  // Tells the others that this rank is gone; later calls fail.
  virtual void close() = 0;
  // Returns when every rank has opened the group.
  virtual void wait_for_all(double seconds) = 0;
};

// The group of this process.
std::shared_ptr<Group> group();  // throws where there is none
void open_group(const std::function<std::shared_ptr<Group>()>& make);  // or where there is one
void drop_group();  // and close it

std::shared_ptr<Group> create_shared(int size, int64_t slot_bytes, double time_limit,
                                     int* descriptor);
std::shared_ptr<Group> open_shared(const std::string& path, int rank, int size);
// `sockets[r]` is connected to rank r, its own place is not read; they belong to the group, or are
// closed where there can be none.
std::shared_ptr<Group> open_sockets(const int* sockets, int rank, int size, double time_limit);

// sum[i] = parts[0][i] + parts[1][i] + …, accumulated in float32 and rounded once.
void sum_in_order(Element element, const void* const* parts, int num_parts, int64_t count,
                  void* sum);
// The tokens of the larger score, in the order of best_of_row.h; the smaller token among equals.
// Part r is count scores (float32), then count tokens (int64), without a gap.
void best_in_order(const char* const* parts, int num_parts, int64_t count, int64_t* tokens);

}  // namespace specc::ranks
