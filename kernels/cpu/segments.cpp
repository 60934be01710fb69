#include "segments.h"

#include <array>
#include <utility>

#include "weight_stream.h"

namespace specc {
namespace {

// A piece of the stream while a segment reads it, also one that fails.
class Held {
 public:
  Held(WeightStream* stream, int64_t piece) : stream_(stream), piece_(piece) {
    if (piece_ >= 0) stream_->acquire(piece_);
  }
  ~Held() {
    if (piece_ >= 0) stream_->release(piece_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  WeightStream* stream_;
  int64_t piece_;
};

// What a segment returned, until the next one has run.
class HandedOn {
 public:
  explicit HandedOn(Arena& arena) : arena_(arena) {}
  ~HandedOn() { replace(nullptr); }
  HandedOn(const HandedOn&) = delete;
  HandedOn& operator=(const HandedOn&) = delete;

  void replace(void* block) {
    if (block_ != nullptr) arena_.give(block_);
    block_ = block;
  }
  void* release() { return std::exchange(block_, nullptr); }

 private:
  Arena& arena_;
  void* block_ = nullptr;
};

}  // namespace

void SegmentedProgram::add(std::shared_ptr<Callee> program, int64_t piece) {
  check(program != nullptr, "a program");
  check(piece < 0 || stream_ != nullptr, "a stream first");
  segments_.push_back({std::move(program), piece});
}

void SegmentedProgram::set_num_threads(int64_t count) {
  for (Segment& segment : segments_) segment.program->set_num_threads(count);
}

int64_t SegmentedProgram::num_threads() const {
  check(!segments_.empty(), "a segment first");
  return segments_[0].program->num_threads();
}

Tensor SegmentedProgram::call(std::span<const Tensor> given, Arena& arena, void*& block) {
  check(!segments_.empty(), "a segment first");
  std::vector<Tensor> inputs(given.begin(), given.end());
  if (takes_mass_ && inputs.size() == kNumFlat + takes_states_)
    inputs.push_back(shaped(std::array<int64_t, 2>{1, 0}, Element::kFloat32));
  const size_t count = inputs.size();
  HandedOn hidden(arena);
  Tensor made;
  for (const Segment& segment : segments_) {
    const Held held(stream_.get(), segment.piece);
    void* own = nullptr;
    made = segment.program->call(inputs, arena, own);
    hidden.replace(own);
    inputs.resize(count);
    inputs.push_back(made);
  }
  block = hidden.release();
  return made;
}

}  // namespace specc
