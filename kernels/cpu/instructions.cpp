#include "instructions.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace specc {
namespace {

constexpr int64_t kMostSlots = 1 << 22, kMostItems = 1 << 16, kMostResultsOfPython = 1 << 12;

constexpr std::array<std::pair<std::string_view, Arithmetic>, 13> kSigns{{
    {"add", Arithmetic::kAdd}, {"sub", Arithmetic::kSub}, {"mul", Arithmetic::kMul},
    {"floordiv", Arithmetic::kFloorDiv}, {"mod", Arithmetic::kMod}, {"neg", Arithmetic::kNeg},
    {"le", Arithmetic::kLe}, {"lt", Arithmetic::kLt}, {"ge", Arithmetic::kGe},
    {"gt", Arithmetic::kGt}, {"eq", Arithmetic::kEq}, {"max", Arithmetic::kMax},
    {"min", Arithmetic::kMin},
}};

std::string quoted(std::string_view text) { return "'" + std::string(text.substr(0, 80)) + "'"; }

}  // namespace

Code::Code(int64_t num_slots) {
  if (num_slots < 0 || num_slots > kMostSlots)
    fail("a program of " + std::to_string(num_slots) + " values");
  num_slots_ = static_cast<int32_t>(num_slots);
  is_input_.resize(num_slots);
}

int32_t Code::known(int64_t slot) const {
  if (slot < 0 || slot >= num_slots_)
    fail("value " + std::to_string(slot) + " of " + std::to_string(num_slots_));
  return static_cast<int32_t>(slot);
}

void Code::input(int64_t slot) { is_input_[known(slot)] = true; }
void Code::keep(int64_t slot) { kept_.push_back(known(slot)); }

void Code::begin_stage() {
  check(!is_finished_, "a finished program stays as it is");
  stages_.push_back(static_cast<int32_t>(instructions_.size()));
}

Instruction& Code::add(Instruction::Kind kind, int64_t first_result, int64_t num_results) {
  check(!is_finished_, "a finished program stays as it is");
  check(!stages_.empty(), "a stage is begun first");
  check(open_items_ == 0, "a list has fewer items than it says");
  check(num_results >= 0 && num_results <= kMostItems, "a number of results");
  if (num_results > 0) known(first_result), known(first_result + num_results - 1);
  check(instructions_.size() < kMostSlots, "a program has no more instructions");
  Instruction& made = instructions_.emplace_back();
  made.kind = kind;
  made.first_argument = static_cast<int32_t>(arguments_.size());
  made.first_result = num_results > 0 ? static_cast<int32_t>(first_result) : 0;
  made.num_results = static_cast<int32_t>(num_results);
  return made;
}

void Code::operator_call(std::string_view name, int64_t first_result, int64_t num_results,
                         bool is_static) {
  const Operator* op = find_operator(name);
  if (op == nullptr) fail("no operator " + quoted(name));
  check(num_results <= static_cast<int64_t>(kMostResults), "an operator has fewer results");
  Instruction& made = add(Instruction::Kind::kOperator, first_result, num_results);
  made.op = op;
  made.is_view = op->is_view;
  made.is_static = is_static;
}

void Code::python_call(int64_t id, std::string name, int64_t first_result, int64_t num_results,
                       bool is_view, bool is_static) {
  check(num_results <= kMostResultsOfPython, "an operator has fewer results");
  Instruction& made = add(Instruction::Kind::kPython, first_result, num_results);
  made.number = id;
  made.is_view = is_view;
  made.is_static = is_static;
  python_names_.push_back(std::move(name));
}

void Code::size_of(int64_t slot, int64_t dim, int64_t result) {
  add(Instruction::Kind::kSize, result, 1).number = dim;
  this->slot(slot);
}

void Code::arithmetic(std::string_view sign, int64_t result) {
  const auto found = std::find_if(kSigns.begin(), kSigns.end(),
                                  [sign](const auto& entry) { return entry.first == sign; });
  if (found == kSigns.end()) fail("no arithmetic " + quoted(sign));
  add(Instruction::Kind::kArithmetic, result, 1).arithmetic = found->second;
}

void Code::call(std::shared_ptr<Callee> callee, int64_t result) {
  check(callee != nullptr, "a program to call");
  add(Instruction::Kind::kCall, result, 1).callee = callee.get();
  callees_.push_back(std::move(callee));
}

void Code::argument(Argument argument) {
  check(!is_finished_, "a finished program stays as it is");
  check(!instructions_.empty(), "an instruction first");
  if (open_items_ > 0) {
    check(argument.source != Argument::Source::kList, "a list of lists");
    items_.push_back(argument);
    --open_items_;
    return;
  }
  arguments_.push_back(argument);
  Instruction& last = instructions_.back();
  check(++last.num_arguments <= kMostItems, "an instruction has fewer arguments");
}

void Code::slot(int64_t slot) { argument({Argument::Source::kSlot, known(slot)}); }

void Code::literal(Value value) {
  argument({Argument::Source::kLiteral, static_cast<int32_t>(literals_.size())});
  literals_.push_back(std::move(value));
}

void Code::scalar(const Tensor& value) {
  check(value.dim == 0, "a tensor of no dimensions");
  check_tensor(value);
  std::array<char, 8>& memory = scalars_.emplace_back();
  std::memcpy(memory.data(), value.data, bytes_of(value.dtype));
  Value made;
  made.kind = Value::Kind::kTensor;
  made.tensor = value;
  made.tensor.data = memory.data();
  literal(std::move(made));
}

void Code::list(int64_t count) {
  check(count >= 0 && count <= kMostItems, "a list of 0 items or more");
  argument({Argument::Source::kList, static_cast<int32_t>(lists_.size())});
  lists_.push_back({static_cast<int32_t>(items_.size()), static_cast<int32_t>(count)});
  open_items_ = static_cast<int32_t>(count);
}

template <class Visit>
void Code::visit_slots(const Instruction& instruction, const Visit& visit) const {
  for (int32_t i = 0; i < instruction.num_arguments; ++i) {
    const Argument& argument = arguments_[instruction.first_argument + i];
    if (argument.source == Argument::Source::kSlot) visit(argument.index);
    if (argument.source != Argument::Source::kList) continue;
    const List& list = lists_[argument.index];
    for (int32_t j = 0; j < list.count; ++j)
      if (const Argument& item = items_[list.first + j]; item.source == Argument::Source::kSlot)
        visit(item.index);
  }
}

// Values are defined before they are read, and once; so there are no cycles.
void Code::check_order() const {
  std::vector<bool> is_defined = is_input_;
  for (const Instruction& instruction : instructions_) {
    visit_slots(instruction, [&](int32_t slot) {
      if (!is_defined[slot]) fail("value " + std::to_string(slot) + " is read before it is made");
    });
    for (int32_t i = 0; i < instruction.num_results; ++i) {
      const int32_t slot = instruction.first_result + i;
      if (is_defined[slot]) fail("value " + std::to_string(slot) + " is made twice");
      is_defined[slot] = true;
    }
    const int32_t count = instruction.num_arguments;
    switch (instruction.kind) {
      case Instruction::Kind::kOperator:
        if (count != instruction.op->num_arguments)
          fail(std::string(instruction.op->name) + " takes " +
               std::to_string(instruction.op->num_arguments) + " arguments, not " +
               std::to_string(count));
        break;
      case Instruction::Kind::kPython:
      case Instruction::Kind::kCall:
        break;
      case Instruction::Kind::kSize:
        check(count == 1, "the size of one value");
        break;
      case Instruction::Kind::kArithmetic:
        check(count == (instruction.arithmetic == Arithmetic::kNeg ? 1 : 2),
              "arithmetic of another number of values");
        break;
    }
  }
  for (const int32_t slot : kept_)
    if (!is_defined[slot]) fail("value " + std::to_string(slot) + " is kept, but never made");
}

// The memory of a value is needed as long as anybody reads the value, or what may be a view of it:
// from the last instruction to the first, so that views of views count, too.
void Code::find_lifetimes() {
  last_use_.assign(num_slots_, -1);
  for (const int32_t slot : kept_) last_use_[slot] = kNever;
  const auto count = static_cast<int32_t>(instructions_.size());
  for (int32_t i = count - 1; i >= 0; --i) {
    const Instruction& instruction = instructions_[i];
    int32_t until = i;
    for (int32_t j = 0; j < instruction.num_results; ++j) {
      int32_t& last = last_use_[instruction.first_result + j];
      last = std::max(last, i);
      if (instruction.is_view) until = std::max(until, last);
    }
    visit_slots(instruction, [&](int32_t slot) {
      last_use_[slot] = std::max(last_use_[slot], until);
    });
  }
  // what came from outside, or stays for later steps, owns nothing here
  std::vector<std::vector<int32_t>> dying(count);
  for (const Instruction& instruction : instructions_) {
    if (instruction.is_static) continue;
    for (int32_t j = 0; j < instruction.num_results; ++j) {
      const int32_t slot = instruction.first_result + j;
      if (last_use_[slot] != kNever) dying[last_use_[slot]].push_back(slot);
    }
  }
  for (int32_t i = 0; i < count; ++i) {
    instructions_[i].first_dead = static_cast<int32_t>(dead_.size());
    instructions_[i].num_dead = static_cast<int32_t>(dying[i].size());
    dead_.insert(dead_.end(), dying[i].begin(), dying[i].end());
  }
}

void Code::finish() {
  check(!is_finished_, "a program is finished once");
  check(open_items_ == 0, "a list has fewer items than it says");
  check_order();
  find_lifetimes();
  is_finished_ = true;
}

}  // namespace specc
