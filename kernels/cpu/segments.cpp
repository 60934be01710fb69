#include "segments.h"

#include <ATen/ops/empty.h>

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

}  // namespace

void SegmentedProgram::add(const c10::intrusive_ptr<CompiledProgram>& program, int64_t piece) {
  TORCH_CHECK(piece < 0 || stream_, "a stream first");
  segments_.push_back({program, piece});
}

void SegmentedProgram::set_num_threads(int64_t count) {
  for (Segment& segment : segments_) segment.program->set_num_threads(count);
}

at::Tensor SegmentedProgram::run(std::vector<at::Tensor> inputs) {
  TORCH_CHECK(!segments_.empty(), "a segment first");
  if (takes_mass_ && inputs.size() == kNumFlat) inputs.push_back(at::empty({1, 0}, at::kFloat));
  at::Tensor hidden;
  for (const Segment& segment : segments_) {
    std::vector<at::Tensor> given = inputs;
    if (hidden.defined()) given.push_back(std::move(hidden));
    const Held held(stream_.get(), segment.piece);
    hidden = segment.program->run(std::move(given));
  }
  return hidden;
}

}  // namespace specc
