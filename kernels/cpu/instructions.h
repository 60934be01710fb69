// A program as instructions over numbered values, and how long each value is needed.
#pragma once

#include <array>
#include <climits>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "arena.h"
#include "operator.h"

namespace specc {

// What an instruction calls: a model.
class Callee {
 public:
  virtual ~Callee() = default;
  // The result lies in `block`, which is one of `arena` and the caller's.
  virtual Tensor call(std::span<const Tensor> inputs, Arena& arena, void*& block) = 0;
  virtual void set_num_threads(int64_t count) = 0;
  virtual int64_t num_threads() const = 0;
};

// Where an argument comes from.
struct Argument {
  enum class Source : uint8_t { kSlot, kLiteral, kList } source;
  int32_t index;  // of the slot, the literal or the list
};

// Items of a list of which some are values.
struct List {
  int32_t first, count;  // of the items
};

enum class Arithmetic : int32_t {
  kAdd, kSub, kMul, kFloorDiv, kMod, kNeg, kLe, kLt, kGe, kGt, kEq, kMax, kMin
};

struct Instruction {
  enum class Kind : uint8_t { kOperator, kPython, kSize, kArithmetic, kCall } kind;
  // depends on the batch size alone, and keeps its value while that stays
  bool is_static = false;
  // results may lie in the memory of arguments
  bool is_view = false;
  int32_t first_argument = 0, num_arguments = 0;
  int32_t first_result = 0, num_results = 0;
  int32_t first_dead = 0, num_dead = 0;  // results nobody reads after this instruction
  union {
    const Operator* op;  // kOperator
    int64_t number;      // kSize: the dimension; kPython: what Python knows the call by
    Arithmetic arithmetic;
    Callee* callee;
  };
};

// Built instruction by instruction, then `finish`ed, then never changed. Each value is defined
// once: it is an input, set from outside, or the result of one instruction.
class Code {
 public:
  explicit Code(int64_t num_slots);

  void input(int64_t slot);
  // Needed until the end: what is returned, and what stages hand to each other.
  void keep(int64_t slot);
  void begin_stage();

  void operator_call(std::string_view name, int64_t first_result, int64_t num_results,
                     bool is_static);
  // A call that Python runs: arguments are those of its values that are the program's.
  void python_call(int64_t id, std::string name, int64_t first_result, int64_t num_results,
                   bool is_view, bool is_static);
  void size_of(int64_t slot, int64_t dim, int64_t result);
  void arithmetic(std::string_view sign, int64_t result);
  void call(std::shared_ptr<Callee> callee, int64_t result);

  // Arguments of the last instruction. After `list(n)` the next n are its items.
  void slot(int64_t slot);
  void literal(Value value);
  // A tensor of no dimensions; its value is copied.
  void scalar(const Tensor& value);
  void list(int64_t count);

  // Checks everything, once, and finds when values die.
  void finish();

  // Names of what Python runs, in their order.
  const std::vector<std::string>& python_names() const { return python_names_; }
  // A value's last reader, views counted; for tests.
  int64_t last_use(int64_t slot) const { return last_use_.at(slot); }

 private:
  friend class Frame;
  static constexpr int32_t kNever = INT32_MAX;

  int32_t known(int64_t slot) const;
  Instruction& add(Instruction::Kind kind, int64_t first_result, int64_t num_results);
  void argument(Argument argument);
  void check_order() const;
  void find_lifetimes();
  template <class Visit>
  void visit_slots(const Instruction& instruction, const Visit& visit) const;

  int32_t num_slots_;
  bool is_finished_ = false;
  std::vector<bool> is_input_;
  std::vector<int32_t> kept_;
  std::vector<Instruction> instructions_;
  std::vector<Argument> arguments_, items_;
  std::vector<List> lists_;
  int32_t open_items_ = 0;  // of the list that was begun
  std::vector<Value> literals_;
  std::deque<std::array<char, 8>> scalars_;
  std::vector<int32_t> stages_;  // first instruction of each
  std::vector<int32_t> last_use_, dead_;
  std::vector<std::shared_ptr<Callee>> callees_;
  std::vector<std::string> python_names_;
};

}  // namespace specc
