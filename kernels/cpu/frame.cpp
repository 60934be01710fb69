#include "frame.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "clock.h"
#include "strided_copy.h"

namespace specc {
namespace {

std::atomic<PythonCall> python_call{nullptr};

enum : int64_t { kNothing = 0, kTensorValue = 1, kIntegerValue = 2 };

void write_value(const Value& value, int64_t* row) {
  switch (value.kind) {
    case Value::Kind::kTensor: {
      const Tensor& tensor = value.tensor;
      row[0] = kTensorValue;
      row[1] = reinterpret_cast<int64_t>(tensor.data);
      row[2] = static_cast<int64_t>(tensor.dtype);
      row[3] = tensor.dim;
      std::copy_n(tensor.sizes, kMostDims, row + 4);
      std::copy_n(tensor.strides, kMostDims, row + 4 + kMostDims);
      row[20] = tensor.bytes;
      return;
    }
    case Value::Kind::kInt:
    case Value::Kind::kBool:
      row[0] = kIntegerValue;
      row[1] = value.integer;
      return;
    default:
      row[0] = kNothing;
  }
}

Tensor read_tensor(const int64_t* row) {
  check(row[0] == kTensorValue, "a call of Python returns tensors");
  Tensor tensor;
  tensor.data = reinterpret_cast<void*>(row[1]);
  tensor.dtype = static_cast<Element>(row[2]);
  tensor.dim = static_cast<int32_t>(row[3]);
  std::copy_n(row + 4, kMostDims, tensor.sizes);
  std::copy_n(row + 4 + kMostDims, kMostDims, tensor.strides);
  tensor.bytes = row[20];
  check_tensor(tensor);
  return tensor;
}

Tensor copy_of(const Tensor& from) {
  const Tensor to = empty(std::span(from.sizes, from.dim), from.dtype);
  copy_strided(from, to.data);
  return to;
}

bool lies_in(const Tensor& inner, const Tensor& outer) {
  const char *data = static_cast<const char*>(inner.data), *begin = static_cast<char*>(outer.data);
  return data >= begin && data < begin + outer.bytes;
}

int64_t floor_div(int64_t a, int64_t b) {
  check(b != 0, "a size is divided by 0");
  check(b != -1 || a != std::numeric_limits<int64_t>::min(), "a size is no int64");
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

int64_t compute(Arithmetic sign, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflows = false;
  switch (sign) {
    case Arithmetic::kAdd: overflows = __builtin_add_overflow(a, b, &result); break;
    case Arithmetic::kSub: overflows = __builtin_sub_overflow(a, b, &result); break;
    case Arithmetic::kMul: overflows = __builtin_mul_overflow(a, b, &result); break;
    case Arithmetic::kNeg: overflows = __builtin_sub_overflow(int64_t{0}, a, &result); break;
    case Arithmetic::kFloorDiv: return floor_div(a, b);
    case Arithmetic::kMod: {
      check(b != 0, "a size is divided by 0");
      if (b == -1) return 0;
      const int64_t rest = a % b;
      return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }
    case Arithmetic::kLe: return a <= b;
    case Arithmetic::kLt: return a < b;
    case Arithmetic::kGe: return a >= b;
    case Arithmetic::kGt: return a > b;
    case Arithmetic::kEq: return a == b;
    case Arithmetic::kMax: return std::max(a, b);
    case Arithmetic::kMin: return std::min(a, b);
  }
  check(!overflows, "a size is no int64");
  return result;
}

int64_t integer_of(const Value& value) {
  check(value.kind == Value::Kind::kInt || value.kind == Value::Kind::kBool, "a size is an integer");
  return value.integer;
}

}  // namespace

void set_python_call(PythonCall call) { python_call = call; }

// Results of operators while an instruction runs: blocks of the arena.
class Frame::FreshBlocks : public Allocator {
 public:
  FreshBlocks(Arena& arena, std::vector<void*>& fresh) : arena_(arena), fresh_(fresh) {
    allocator_of_call = this;
  }
  ~FreshBlocks() override { allocator_of_call = before_; }

  void* allocate(int64_t bytes) override {
    void* block = arena_.take(bytes);
    fresh_.push_back(block);
    return block;
  }

 private:
  Allocator* const before_ = allocator_of_call;
  Arena& arena_;
  std::vector<void*>& fresh_;
};

// The same, of instructions whose results stay from step to step.
class Frame::StaticMemory : public Allocator {
 public:
  explicit StaticMemory(std::vector<Memory>& made) : made_(made) { allocator_of_call = this; }
  ~StaticMemory() override { allocator_of_call = before_; }

  void* allocate(int64_t bytes) override {
    check(bytes >= 0 && bytes < (int64_t{1} << 46), "a size of a value");
    const auto rounded = static_cast<size_t>(std::max<int64_t>(bytes, 1) + 63) / 64 * 64;
    Memory memory(std::aligned_alloc(64, rounded));
    if (memory == nullptr) fail("no memory of " + std::to_string(bytes) + " bytes");
    made_.push_back(std::move(memory));
    return made_.back().get();
  }

 private:
  Allocator* const before_ = allocator_of_call;
  std::vector<Memory>& made_;
};

Frame::Frame(std::shared_ptr<const Code> code) : code_(std::move(code)) {
  check(code_ != nullptr && code_->is_finished_, "a finished program");
  values_.resize(code_->num_slots_);
  blocks_.resize(code_->num_slots_);
  lists_.resize(code_->lists_.size());
  static_.resize(code_->instructions_.size());
  arguments_.reserve(code_->arguments_.size());
  for (const Argument& argument : code_->arguments_) {
    switch (argument.source) {
      case Argument::Source::kSlot: arguments_.push_back(&values_[argument.index]); break;
      case Argument::Source::kLiteral:
        arguments_.push_back(&code_->literals_[argument.index]);
        break;
      case Argument::Source::kList: arguments_.push_back(&lists_[argument.index]); break;
    }
  }
  for (const Instruction& instruction : code_->instructions_)
    if (!instruction.is_static)
      for (int32_t i = 0; i < instruction.num_results; ++i)
        made_.push_back(instruction.first_result + i);
}

Frame::~Frame() = default;

void Frame::set(int64_t slot, const Tensor& tensor) {
  Value& value = values_[code_->known(slot)];
  value.kind = Value::Kind::kTensor;
  value.tensor = tensor;
}

const Value& Frame::get(int64_t slot) const { return values_[code_->known(slot)]; }

void* Frame::give_away(int64_t slot) {
  const void* data = get(slot).tensor.data;
  for (void*& block : blocks_) {
    if (block == nullptr || !Arena::holds(block, data)) continue;
    return std::exchange(block, nullptr);
  }
  return nullptr;
}

const Value& Frame::item(const Argument& argument) const {
  return argument.source == Argument::Source::kSlot ? values_[argument.index]
                                                    : code_->literals_[argument.index];
}

void Frame::fill_list(int32_t index) {
  const List& list = code_->lists_[index];
  Value& value = lists_[index];
  value.ints.clear();
  value.reals.clear();
  value.tensors.clear();
  value.kind = Value::Kind::kInts;
  bool has_reals = false, has_tensors = false;
  for (int32_t i = 0; i < list.count; ++i) {
    const Value::Kind kind = item(code_->items_[list.first + i]).kind;
    has_reals |= kind == Value::Kind::kReal;
    has_tensors |= kind == Value::Kind::kTensor || kind == Value::Kind::kNone;
  }
  for (int32_t i = 0; i < list.count; ++i) {
    const Value& each = item(code_->items_[list.first + i]);
    if (has_tensors) {
      Tensor absent;
      absent.dim = -1;
      check(each.kind == Value::Kind::kTensor || each.kind == Value::Kind::kNone,
            "a list of tensors and of numbers");
      value.tensors.push_back(each.kind == Value::Kind::kNone ? absent : each.tensor);
    } else if (has_reals) {
      value.reals.push_back(each.kind == Value::Kind::kReal
                                ? each.real
                                : static_cast<double>(integer_of(each)));
    } else {
      value.ints.push_back(integer_of(each));
    }
  }
  if (has_tensors) value.kind = Value::Kind::kTensors;
  else if (has_reals) value.kind = Value::Kind::kReals;
}

void Frame::fill_lists(const Instruction& instruction) {
  for (int32_t i = 0; i < instruction.num_arguments; ++i) {
    const Argument& argument = code_->arguments_[instruction.first_argument + i];
    if (argument.source == Argument::Source::kList) fill_list(argument.index);
  }
}

void Frame::put(const Instruction& instruction, int32_t result, const Tensor& tensor) {
  Value& value = values_[instruction.first_result + result];
  value.kind = Value::Kind::kTensor;
  value.tensor = tensor;
}

void Frame::run_operator(const Instruction& instruction) {
  fill_lists(instruction);
  call_.arguments = {arguments_.data() + instruction.first_argument,
                     static_cast<size_t>(instruction.num_arguments)};
  call_.num_results = 0;
  instruction.op->run(call_);
  check(static_cast<int32_t>(call_.num_results) >= instruction.num_results,
        "an operator has fewer results than are read");
  for (int32_t i = 0; i < instruction.num_results; ++i) put(instruction, i, call_.results[i]);
}

void Frame::run_python(const Instruction& instruction) {
  const PythonCall call = python_call;
  check(call != nullptr, "an operator without a kernel is called by Python");
  const int64_t rows = std::max(instruction.num_arguments, instruction.num_results);
  if (static_cast<int64_t>(message_.size()) < rows * kWordsOfValue)
    message_.resize(rows * kWordsOfValue);
  for (int32_t i = 0; i < instruction.num_arguments; ++i)
    write_value(*arguments_[instruction.first_argument + i], message_.data() + i * kWordsOfValue);
  if (call(instruction.number, instruction.num_arguments, instruction.num_results,
           message_.data()) != 0)
    throw PythonFailed();
  for (int32_t i = 0; i < instruction.num_results; ++i) {
    Tensor made = read_tensor(message_.data() + i * kWordsOfValue);
    bool is_view = false;
    if (instruction.is_view && made.data != nullptr) {
      for (int32_t j = 0; j < instruction.num_arguments && !is_view; ++j) {
        const Value& value = *arguments_[instruction.first_argument + j];
        is_view = value.kind == Value::Kind::kTensor && lies_in(made, value.tensor);
      }
    }
    put(instruction, i, is_view ? made : copy_of(made));
  }
}

void Frame::run_call(const Instruction& instruction, Arena& arena, double& seconds_in_calls) {
  inputs_.clear();
  for (int32_t i = 0; i < instruction.num_arguments; ++i) {
    const Value& value = *arguments_[instruction.first_argument + i];
    if (value.kind == Value::Kind::kTensor) {
      inputs_.push_back(value.tensor);
      continue;
    }
    // no ancestors: a causal pass, which programs know by the width 0
    check(value.kind == Value::Kind::kNone && !inputs_.empty() && inputs_[0].dim >= 1,
          "a program takes tensors");
    inputs_.push_back(shaped(std::array<int64_t, 2>{inputs_[0].sizes[0], 0}, Element::kInt64));
  }
  const auto begin = Clock::now();
  void* block = nullptr;
  const Tensor made = instruction.callee->call(inputs_, arena, block);
  if (block != nullptr) fresh_.push_back(block);
  put(instruction, 0, made);
  seconds_in_calls += seconds_since(begin);
}

void Frame::run_arithmetic(const Instruction& instruction) {
  const Value* const* arguments = arguments_.data() + instruction.first_argument;
  const int64_t a = integer_of(*arguments[0]);
  const int64_t b = instruction.num_arguments > 1 ? integer_of(*arguments[1]) : 0;
  Value& value = values_[instruction.first_result];
  value.kind = Value::Kind::kInt;
  value.integer = compute(instruction.arithmetic, a, b);
}

// Operators that are not registered as views return memory of their own.
void Frame::check_results(const Instruction& instruction) const {
  for (int32_t i = 0; i < instruction.num_results; ++i) {
    const Tensor& made = values_[instruction.first_result + i].tensor;
    if (made.data == nullptr) continue;
    bool is_own = false;
    for (const void* block : fresh_) is_own |= Arena::holds(block, made.data);
    check(is_own, "an operator returns memory that is not its own");
  }
}

// Gives each new block to the result that lies in it longest; what nobody returned is free again.
void Frame::own(const Instruction& instruction, Arena& arena) {
  if (!instruction.is_view) check_results(instruction);
  for (void*& block : fresh_) {
    int32_t owner = -1;
    for (int32_t i = 0; i < instruction.num_results; ++i) {
      const int32_t slot = instruction.first_result + i;
      if (!Arena::holds(block, values_[slot].tensor.data)) continue;
      if (owner < 0 || code_->last_use_[slot] > code_->last_use_[owner]) owner = slot;
    }
    if (owner >= 0)
      blocks_[owner] = block;
    else
      arena.give(block);
    block = nullptr;
  }
  fresh_.clear();
}

void Frame::run(const Instruction& instruction, Arena& arena, double& seconds_in_calls) {
  switch (instruction.kind) {
    case Instruction::Kind::kOperator: run_operator(instruction); return;
    case Instruction::Kind::kPython: run_python(instruction); return;
    case Instruction::Kind::kCall: run_call(instruction, arena, seconds_in_calls); return;
    case Instruction::Kind::kArithmetic: run_arithmetic(instruction); return;
    case Instruction::Kind::kSize: {
      const Value& of = *arguments_[instruction.first_argument];
      check(of.kind == Value::Kind::kTensor, "the size of a tensor");
      int64_t dim = instruction.number;
      if (dim < 0) dim += of.tensor.dim;
      check(dim >= 0 && dim < of.tensor.dim, "a dimension of a tensor");
      Value& value = values_[instruction.first_result];
      value.kind = Value::Kind::kInt;
      value.integer = of.tensor.sizes[dim];
      return;
    }
  }
}

void Frame::run_stage(int64_t stage, Arena& arena, bool with_static, double& seconds_in_calls) {
  check(stage >= 0 && stage < num_stages(), "a stage of a program");
  const auto count = static_cast<int32_t>(code_->instructions_.size());
  const int32_t first = code_->stages_[stage];
  const int32_t last = stage + 1 < num_stages() ? code_->stages_[stage + 1] : count;
  const FreshBlocks memory(arena, fresh_);
  for (int32_t i = first; i < last; ++i) {
    const Instruction& instruction = code_->instructions_[i];
    if (instruction.is_static) {
      if (!with_static) continue;
      static_[i].clear();
      const StaticMemory own(static_[i]);
      run(instruction, arena, seconds_in_calls);
      continue;
    }
    fresh_.clear();
    run(instruction, arena, seconds_in_calls);
    if (instruction.kind != Instruction::Kind::kSize &&
        instruction.kind != Instruction::Kind::kArithmetic)
      own(instruction, arena);
    for (int32_t j = 0; j < instruction.num_dead; ++j) {
      void*& block = blocks_[code_->dead_[instruction.first_dead + j]];
      if (block != nullptr) arena.give(block);
      block = nullptr;
    }
  }
}

void Frame::forget(Arena& arena) {
  for (void*& block : blocks_) {
    if (block != nullptr) arena.give(block);
    block = nullptr;
  }
  // of an instruction that failed
  for (void* block : fresh_)
    if (block != nullptr) arena.give(block);
  fresh_.clear();
  for (const int32_t slot : made_) values_[slot].kind = Value::Kind::kNone;
}

void Frame::forget() {
  std::fill(blocks_.begin(), blocks_.end(), nullptr);
  fresh_.clear();
  for (const int32_t slot : made_) values_[slot].kind = Value::Kind::kNone;
}

}  // namespace specc
