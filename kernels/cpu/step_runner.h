// The step of an engine, which calls programs without Python.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "frame.h"

namespace specc {

// A step: instructions in stages, over values that stages hand to each other. Python encodes the
// graphs of a step program once (runtime/backends/cpu/encoder.py); then a step is one call.
class StepRunner {
 public:
  // num_inputs: values 0 … are inputs in the order of `run`.
  StepRunner(std::shared_ptr<const Code> code, std::shared_ptr<ArenaPool> pool);

  // A value from outside, before a stage or between two of them; its memory is the caller's.
  void set(int64_t slot, const Tensor& value);
  // As it is until the step ends; see `end`.
  const Tensor& get(int64_t slot) const;

  // Run stages [first, last); values 0 … inputs.size() - 1 are set before stage 0.
  void run(std::span<const Tensor> inputs, int64_t first, int64_t last);
  // Stages [first, last) of a step from host integers to host integers: row b of `rows` holds the
  // last tokens of sequence b and its committed rows, read before stage 0; `found()` is
  // the content of `results`, one after the other. Inputs 0, 1 and 2 of the step are last_tokens,
  // cache_len and block_table. Where the last stage ends the step, unless it `stays` for `get`.
  void step(std::span<const int64_t> rows, const Tensor& block_table,
            std::span<const int64_t> results, int64_t first, int64_t last, bool stays);
  // Whole steps from there on, `count` at most, each from where the one before has ended; the last
  // is one that brings a sequence a token of `ends`. The first three results are num_accepted [B],
  // output_tokens [B, P] and next_cache_len [B]. `found()` and `seconds()` are those of each, one
  // after the other: nothing between two steps waits for whoever reads them.
  void steps(std::vector<int64_t> rows, const Tensor& block_table,
             std::span<const int64_t> results, int64_t count, std::span<const int64_t> ends);
  // Values of a step that stayed are gone.
  void end();

  const std::vector<int64_t>& found() const { return found_; }
  // Seconds that each stage took in its last run, and the part of it inside programs.
  const std::vector<double>& seconds() const { return seconds_of_all_; }
  const std::vector<double>& program_seconds() const { return program_seconds_; }

 private:
  void set_inputs(std::span<const int64_t> rows, const Tensor& block_table);
  static bool go_on(std::span<const int64_t> found, int64_t batch, int64_t width,
                    std::span<const int64_t> ends, std::vector<int64_t>& rows);
  void run_stages(int64_t first, int64_t last);
  void read(std::span<const int64_t> results);

  Frame frame_;
  const std::shared_ptr<ArenaPool> pool_;
  std::unique_ptr<Arena> arena_;  // of a step in progress
  std::vector<int64_t> tokens_, found_;
  std::vector<int32_t> lengths_;
  std::vector<double> seconds_, seconds_of_all_, program_seconds_;
  int64_t batch_ = -1;
  bool is_new_batch_ = true;
  int64_t next_stage_ = 0;
  bool is_whole_ = true;  // no stage of the current step was left out
};

}  // namespace specc
