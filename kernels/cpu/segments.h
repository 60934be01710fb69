// A model's segments as one program: each runs on what the one before it hands on.
#pragma once

#include <vector>

#include "compiled_program.h"
#include "weight_stream.h"

namespace specc {

class SegmentedProgram : public Program {
 public:
  explicit SegmentedProgram(bool takes_mass) : takes_mass_(takes_mass) {}

  // The next segment; `piece` is that of the stream in which its weights lie, -1: they stay.
  void add(const c10::intrusive_ptr<CompiledProgram>& program, int64_t piece);
  // `handle`: of specc_stream_open.
  void set_stream(int64_t handle) { stream_ = stream_of(reinterpret_cast<const void*>(handle)); }
  at::Tensor run(std::vector<at::Tensor> inputs) override;
  // Of all segments.
  void set_num_threads(int64_t count);

 private:
  struct Segment {
    c10::intrusive_ptr<CompiledProgram> program;
    int64_t piece;
  };
  std::vector<Segment> segments_;
  std::shared_ptr<WeightStream> stream_;
  bool takes_mass_;
};

}  // namespace specc
