// The values of a program while it runs.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "arena.h"
#include "instructions.h"

namespace specc {

// Runs a call that Python makes: `message` holds the values of `count` arguments, and gets those of
// the results. A value is a row of kWordsOfValue words: kind (0 none, 1 tensor, 2 integer), then the
// integer, or data, dtype, number of dimensions, 8 sizes, 8 strides, bytes. Returns 0, or 1 where it
// failed; why is Python's.
using PythonCall = int32_t (*)(int64_t id, int64_t count, int64_t num_results, int64_t* message);
constexpr int64_t kWordsOfValue = 21;

// For all programs of the process.
void set_python_call(PythonCall call);
// Thrown where Python's call failed.
class PythonFailed : public std::runtime_error {
 public:
  PythonFailed() : std::runtime_error("specc: a call of Python failed") {}
};

// A finished program's values. Not for two threads at a time; a program has as many frames as run.
class Frame {
 public:
  explicit Frame(std::shared_ptr<const Code> code);
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  // A value from outside; its memory has to outlive the run.
  void set(int64_t slot, const Tensor& tensor);
  const Value& get(int64_t slot) const;
  // Where a value lies in a block of this frame: the block, which is the caller's from here on.
  void* give_away(int64_t slot);

  // Stage by stage, of one arena until `forget`; `seconds_in_calls` grows by what callees take.
  // Static instructions are run where `with_static`.
  void run_stage(int64_t stage, Arena& arena, bool with_static, double& seconds_in_calls);
  int64_t num_stages() const { return static_cast<int64_t>(code_->stages_.size()); }
  // Gives all that is left to the arena, and forgets the values that instructions make, except
  // static ones.
  void forget(Arena& arena);
  // The same, where the arena is cleared as a whole.
  void forget();

 private:
  struct Freed {
    void operator()(void* data) const { std::free(data); }
  };
  using Memory = std::unique_ptr<void, Freed>;
  class FreshBlocks;
  class StaticMemory;

  void run(const Instruction& instruction, Arena& arena, double& seconds_in_calls);
  void run_operator(const Instruction& instruction);
  void run_python(const Instruction& instruction);
  void run_call(const Instruction& instruction, Arena& arena, double& seconds_in_calls);
  void run_arithmetic(const Instruction& instruction);
  void fill_lists(const Instruction& instruction);
  void fill_list(int32_t index);
  const Value& item(const Argument& argument) const;
  void put(const Instruction& instruction, int32_t result, const Tensor& tensor);
  void own(const Instruction& instruction, Arena& arena);
  void check_results(const Instruction& instruction) const;

  const std::shared_ptr<const Code> code_;
  std::vector<Value> values_, lists_;
  std::vector<const Value*> arguments_;
  std::vector<void*> blocks_;  // of each value
  std::vector<void*> fresh_;   // of the instruction that runs
  std::vector<std::vector<Memory>> static_;  // of each instruction
  std::vector<int32_t> made_;                // values that instructions make, but for static ones
  std::vector<int64_t> message_;
  std::vector<Tensor> inputs_;
  Call call_;
};

}  // namespace specc
