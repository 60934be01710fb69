// The step of an engine, which calls compiled programs without Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "compiled_program.h"

namespace specc {

class SegmentedProgram;

// A step: instructions over numbered values. Python encodes the graphs of a step program once
// (runtime/backends/cpu/compiled_program.py); then a step is one call.
class StepRunner : public torch::CustomClassHolder {
 public:
  explicit StepRunner(int64_t num_values);

  // Values 0 … are inputs in the order of `run`; constants are set once.
  void set_constant(int64_t slot, const at::Tensor& value);
  void begin_stage() { stages_.emplace_back(); }
  // An operator by name and overload; arguments follow in the order of its schema.
  void call(const std::string& name, const std::string& overload, int64_t result, bool is_static);
  void call_program(const c10::intrusive_ptr<CompiledProgram>& program, int64_t result);
  void call_segments(const c10::intrusive_ptr<SegmentedProgram>& program, int64_t result);
  void getitem(int64_t tuple, int64_t index, int64_t result);
  // `size` of dimension `dim`, and integer arithmetic on sizes: a * b or a + b.
  void size(int64_t tensor, int64_t dim, int64_t result);
  void arithmetic(const std::string& sign, int64_t result);
  // Arguments of the last instruction.
  void value(int64_t slot);
  void literal(const c10::IValue& constant);
  // The next `count` arguments form one list.
  void list(int64_t count);
  // Nobody reads this value after the last instruction: its memory is free from there on.
  void release(int64_t slot);
  // Values that stages hand to each other: their memory is free when the step has ended.
  void pass_on(const std::vector<int64_t>& slots);

  // Run stages [first, last); values 0 … inputs.size() - 1 are set before stage 0.
  void run(const std::vector<at::Tensor>& inputs, int64_t first, int64_t last);
  // Stages [first, last) of a step from host integers to host integers: row b of `rows` holds the
  // last tokens of sequence b and its committed rows, read before stage 0; the result is
  // the content of `results`, one after the other. Inputs 0, 1 and 2 of the step are last_tokens,
  // cache_len and block_table. Also returns seconds(). Values of the slots `kept` stay after the
  // last stage, for `get`.
  std::tuple<std::vector<int64_t>, std::vector<double>> step(const std::vector<int64_t>& rows,
                                                             const at::Tensor& block_table,
                                                             const std::vector<int64_t>& results,
                                                             int64_t first, int64_t last,
                                                             const std::vector<int64_t>& kept);
  // Whole steps from there on, `count` at most, each from where the one before has ended; the last
  // is one that brings a sequence a token of `ends`. The first three results are num_accepted [B],
  // output_tokens [B, P] and next_cache_len [B]. Returns what `step` does of each, one after the
  // other: nothing between two steps waits for whoever reads them.
  std::tuple<std::vector<int64_t>, std::vector<double>> steps(std::vector<int64_t> rows,
                                                              const at::Tensor& block_table,
                                                              const std::vector<int64_t>& results,
                                                              int64_t count,
                                                              const std::vector<int64_t>& ends);
  at::Tensor get(int64_t slot);
  std::vector<at::Tensor> outputs(const std::vector<int64_t>& slots);
  // Seconds that each stage took in its last run, and the part of it inside programs.
  std::vector<double> seconds() { return seconds_; }
  std::vector<double> program_seconds() { return program_seconds_; }

 private:
  enum class Kind { kOperator, kProgram, kGetItem, kSize, kAdd, kMul };
  struct Argument {
    enum class Source { kValue, kLiteral, kList } source;
    int64_t slot = 0;  // or the length of a list
    c10::IValue literal;
  };
  struct Instruction {
    Kind kind;
    int64_t result;
    // depends on the batch size alone, and keeps its value while that stays
    bool is_static = false;
    std::vector<Argument> arguments;
    std::vector<int64_t> last_used;  // values
    std::optional<c10::OperatorHandle> op;
    c10::intrusive_ptr<Program> program;
    int64_t a = 0, b = 0;
  };

  Instruction& add(Kind kind, int64_t result);
  Instruction& last();
  int64_t known(int64_t slot) const;  // slot; throws where there is none
  void set_inputs(const std::vector<int64_t>& rows, const at::Tensor& block_table);
  static bool go_on(const std::vector<int64_t>& found, int64_t batch, int64_t width,
                    const std::vector<int64_t>& ends, std::vector<int64_t>& rows);
  void run_stages(int64_t first, int64_t last);
  void forget_passed_on(const std::vector<int64_t>& kept);
  void execute(const Instruction& instruction);
  void execute_operator(const Instruction& instruction);
  c10::IValue argument(const Instruction& instruction, size_t& next, const c10::TypePtr& type);

  std::vector<c10::IValue> values_;
  std::vector<int64_t> passed_on_;
  std::vector<std::vector<Instruction>> stages_;
  std::vector<double> seconds_, program_seconds_;
  double in_programs_ = 0;  // of the current stage
  int64_t batch_ = -1;
  bool is_new_batch_ = true;
  int64_t next_stage_ = 0;
  bool is_whole_ = true;  // no stage of the current step was left out
};

}  // namespace specc
