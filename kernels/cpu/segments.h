// A model's segments as one program: each runs on what the one before it hands on.
#pragma once

#include <memory>
#include <vector>

#include "program.h"

namespace specc {

class WeightStream;

class SegmentedProgram : public Callee {
 public:
  SegmentedProgram(bool takes_mass, bool takes_states)
      : takes_mass_(takes_mass), takes_states_(takes_states) {}

  // The next segment; `piece` is that of the stream in which its weights lie, -1: they stay.
  void add(std::shared_ptr<Callee> program, int64_t piece);
  void set_stream(std::shared_ptr<WeightStream> stream) { stream_ = std::move(stream); }
  Tensor call(std::span<const Tensor> inputs, Arena& arena, void*& block) override;
  // Of all segments.
  void set_num_threads(int64_t count) override;
  int64_t num_threads() const override;

 private:
  struct Segment {
    std::shared_ptr<Callee> program;
    int64_t piece;
  };
  std::vector<Segment> segments_;
  std::shared_ptr<WeightStream> stream_;
  bool takes_mass_, takes_states_;
};

}  // namespace specc
