#include "step_runner.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "clock.h"
#include "segments.h"
#include "threads.h"

namespace specc {

StepRunner::StepRunner(int64_t num_values) {
  TORCH_CHECK(num_values >= 1, "1 value or more, not ", num_values);
  values_.resize(num_values);
}

int64_t StepRunner::known(int64_t slot) const {
  TORCH_CHECK(slot >= 0 && slot < static_cast<int64_t>(values_.size()), "a known value, not ",
              slot);
  return slot;
}

void StepRunner::set_constant(int64_t slot, const at::Tensor& value) {
  values_[known(slot)] = value;
}

void StepRunner::pass_on(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots) known(slot);
  passed_on_ = slots;
}

at::Tensor StepRunner::get(int64_t slot) { return values_[known(slot)].toTensor(); }

StepRunner::Instruction& StepRunner::last() {
  TORCH_CHECK(!stages_.empty() && !stages_.back().empty(), "an instruction first");
  return stages_.back().back();
}

StepRunner::Instruction& StepRunner::add(Kind kind, int64_t result) {
  TORCH_CHECK(!stages_.empty(), "begin_stage first");
  known(result);
  Instruction& made = stages_.back().emplace_back();
  made.kind = kind;
  made.result = result;
  return made;
}

void StepRunner::call(const std::string& name, const std::string& overload, int64_t result,
                      bool is_static) {
  Instruction& made = add(Kind::kOperator, result);
  made.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  made.is_static = is_static;
}

void StepRunner::call_program(const c10::intrusive_ptr<CompiledProgram>& program, int64_t result) {
  add(Kind::kProgram, result).program = program;
}

void StepRunner::call_segments(const c10::intrusive_ptr<SegmentedProgram>& program,
                               int64_t result) {
  add(Kind::kProgram, result).program = program;
}

void StepRunner::getitem(int64_t tuple, int64_t index, int64_t result) {
  Instruction& made = add(Kind::kGetItem, result);
  made.a = known(tuple);
  made.b = index;
}

void StepRunner::size(int64_t tensor, int64_t dim, int64_t result) {
  Instruction& made = add(Kind::kSize, result);
  made.a = known(tensor);
  made.b = dim;
}

void StepRunner::arithmetic(const std::string& sign, int64_t result) {
  TORCH_CHECK(sign == "add" || sign == "mul", "add or mul, not ", sign);
  add(sign == "add" ? Kind::kAdd : Kind::kMul, result);
}

void StepRunner::value(int64_t slot) {
  last().arguments.push_back({Argument::Source::kValue, known(slot), {}});
}

void StepRunner::literal(const c10::IValue& constant) {
  last().arguments.push_back({Argument::Source::kLiteral, 0, constant});
}

void StepRunner::list(int64_t count) {
  TORCH_CHECK(count >= 0, "a list of 0 arguments or more, not ", count);
  last().arguments.push_back({Argument::Source::kList, count, {}});
}

void StepRunner::release(int64_t slot) { last().last_used.push_back(known(slot)); }

c10::IValue StepRunner::argument(const Instruction& instruction, size_t& next,
                                 const c10::TypePtr& type) {
  TORCH_CHECK(next < instruction.arguments.size(), "an argument is missing");
  const Argument& item = instruction.arguments[next++];
  if (item.source == Argument::Source::kValue) return values_[item.slot];
  if (item.source == Argument::Source::kLiteral) return item.literal;
  c10::TypePtr list_type = type;
  if (auto optional = type->cast<c10::OptionalType>()) list_type = optional->getElementType();
  const c10::TypePtr element = list_type->expectRef<c10::ListType>().getElementType();
  c10::impl::GenericList list(element);
  for (int64_t i = 0; i < item.slot; ++i) list.push_back(argument(instruction, next, element));
  return list;
}

void StepRunner::execute_operator(const Instruction& instruction) {
  torch::jit::Stack stack;
  const auto& schema = instruction.op->schema().arguments();
  stack.reserve(schema.size());
  size_t next = 0;
  for (const auto& expected : schema) stack.push_back(argument(instruction, next, expected.type()));
  instruction.op->callBoxed(stack);
  if (stack.size() == 1) {
    values_[instruction.result] = std::move(stack[0]);
  } else if (!stack.empty()) {
    values_[instruction.result] = c10::ivalue::Tuple::create(std::move(stack));
  }
}

void StepRunner::execute(const Instruction& instruction) {
  if (instruction.is_static && !is_new_batch_) return;
  size_t next = 0;
  switch (instruction.kind) {
    case Kind::kOperator:
      execute_operator(instruction);
      return;
    case Kind::kProgram: {
      std::vector<at::Tensor> inputs;
      inputs.reserve(instruction.arguments.size());
      for (const Argument& item : instruction.arguments) {
        if (item.source == Argument::Source::kValue) {
          inputs.push_back(values_[item.slot].toTensor());
        } else {  // no ancestors: a causal pass, which compiled programs know by the width 0
          TORCH_CHECK(!inputs.empty(), "the tokens of a pass come first");
          inputs.push_back(at::empty({inputs[0].size(0), 0}, at::kLong));
        }
      }
      const auto begin = Clock::now();
      values_[instruction.result] = instruction.program->run(std::move(inputs));
      in_programs_ += seconds_since(begin);
      return;
    }
    case Kind::kGetItem: {
      const auto& elements = values_[instruction.a].toTupleRef().elements();
      TORCH_CHECK(instruction.b >= 0 && instruction.b < static_cast<int64_t>(elements.size()),
                  "item ", instruction.b, " of ", elements.size());
      const c10::IValue item = elements[instruction.b];  // the result may take the tuple's place
      values_[instruction.result] = item;
      return;
    }
    case Kind::kSize:
      values_[instruction.result] = values_[instruction.a].toTensor().size(instruction.b);
      return;
    case Kind::kAdd:
    case Kind::kMul: {
      const int64_t a = argument(instruction, next, c10::IntType::get()).toInt();
      const int64_t b = argument(instruction, next, c10::IntType::get()).toInt();
      int64_t result = 0;
      TORCH_CHECK(!(instruction.kind == Kind::kAdd ? __builtin_add_overflow(a, b, &result)
                                                   : __builtin_mul_overflow(a, b, &result)),
                  "a size is no int64");
      values_[instruction.result] = result;
      return;
    }
  }
}

void StepRunner::run(const std::vector<at::Tensor>& inputs, int64_t first, int64_t last) {
  TORCH_CHECK(inputs.size() <= values_.size(), "a known value for each input");
  if (first == 0)
    for (size_t i = 0; i < inputs.size(); ++i) values_[i] = inputs[i];
  run_stages(first, last);
}

void StepRunner::run_stages(int64_t first, int64_t last) {
  c10::InferenceMode guard;
  TORCH_CHECK(0 <= first && first <= last && last <= static_cast<int64_t>(stages_.size()),
              "stages ", first, " to ", last, " of ", stages_.size());
  // nothing between two programs is worth a barrier; each program sets its own
  const PassThreads threads(kernel_threads(), 1);
  const int64_t batch = values_[0].toTensor().size(0);
  if (first == 0) {
    forget_passed_on({});  // of a step that ended early, or that was read after its end
    is_new_batch_ = batch != batch_;
    batch_ = -1;  // should a stage throw, nothing of it is kept
    seconds_.assign(stages_.size(), 0.0);
    program_seconds_.assign(stages_.size(), 0.0);
    is_whole_ = true;
  } else if (first != next_stage_) {
    is_whole_ = false;
  }
  // the first run may begin anywhere, and stages may have been added
  seconds_.resize(stages_.size());
  program_seconds_.resize(stages_.size());
  for (int64_t i = first; i < last; ++i) {
    const auto begin = Clock::now();
    in_programs_ = 0;
    for (const Instruction& instruction : stages_[i]) {
      execute(instruction);
      for (const int64_t slot : instruction.last_used) values_[slot] = c10::IValue();
    }
    seconds_[i] = seconds_since(begin);
    program_seconds_[i] = in_programs_;
  }
  next_stage_ = last;
  // a stage that somebody else stood in for has not computed what it keeps for this batch size
  if (last == static_cast<int64_t>(stages_.size()) && is_whole_) batch_ = batch;
}

void StepRunner::forget_passed_on(const std::vector<int64_t>& kept) {
  for (const int64_t slot : passed_on_)
    if (std::find(kept.begin(), kept.end(), slot) == kept.end()) values_[slot] = c10::IValue();
}

std::tuple<std::vector<int64_t>, std::vector<double>> StepRunner::step(
    const std::vector<int64_t>& rows, const at::Tensor& block_table,
    const std::vector<int64_t>& results, int64_t first, int64_t last,
    const std::vector<int64_t>& kept) {
  c10::InferenceMode guard;
  if (first == 0) set_inputs(rows, block_table);
  run_stages(first, last);
  std::vector<int64_t> found;
  for (int64_t slot : results) {
    const at::Tensor value = get(slot);
    TORCH_CHECK(value.is_contiguous(), "results are contiguous");
    if (value.scalar_type() == at::kInt) {
      const int32_t* data = value.const_data_ptr<int32_t>();
      found.insert(found.end(), data, data + value.numel());
    } else {
      const int64_t* data = value.const_data_ptr<int64_t>();
      found.insert(found.end(), data, data + value.numel());
    }
  }
  if (last == static_cast<int64_t>(stages_.size())) forget_passed_on(kept);
  return {found, seconds_};
}

std::tuple<std::vector<int64_t>, std::vector<double>> StepRunner::steps(
    std::vector<int64_t> rows, const at::Tensor& block_table, const std::vector<int64_t>& results,
    int64_t count, const std::vector<int64_t>& ends) {
  TORCH_CHECK(count >= 1, "1 step or more, not ", count);
  TORCH_CHECK(results.size() >= 3, "results to go on from");
  const int64_t batch = block_table.size(0), last = static_cast<int64_t>(stages_.size());
  std::vector<int64_t> found;
  std::vector<double> seconds;
  for (int64_t i = 0; i < count; ++i) {
    const auto [own, own_seconds] = step(rows, block_table, results, 0, last, {});
    found.insert(found.end(), own.begin(), own.end());
    seconds.insert(seconds.end(), own_seconds.begin(), own_seconds.end());
    if (i + 1 < count && !go_on(own, batch, get(results[1]).size(1), ends, rows)) break;
  }
  return {found, seconds};
}

// Makes `rows` those of the next step; false where a token ends a sequence.
bool StepRunner::go_on(const std::vector<int64_t>& found, int64_t batch, int64_t width,
                       const std::vector<int64_t>& ends, std::vector<int64_t>& rows) {
  const int64_t stride = static_cast<int64_t>(rows.size()) / batch, num_last = stride - 1;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t emitted = found[b] + 1;
    const int64_t* tokens = found.data() + batch + b * width;
    for (int64_t i = 0; i < emitted; ++i)
      if (std::find(ends.begin(), ends.end(), tokens[i]) != ends.end()) return false;
    int64_t* row = rows.data() + b * stride;
    const int64_t kept = std::max<int64_t>(0, num_last - emitted);
    std::copy(row + num_last - kept, row + num_last, row);
    std::copy(tokens + emitted - (num_last - kept), tokens + emitted, row + kept);
    row[num_last] = found[batch * (1 + width) + b];
  }
  return true;
}

void StepRunner::set_inputs(const std::vector<int64_t>& rows, const at::Tensor& block_table) {
  TORCH_CHECK(values_.size() >= 3, "values for the inputs of a step");
  const int64_t batch = block_table.size(0);
  const int64_t stride = batch ? static_cast<int64_t>(rows.size()) / batch : 0;
  TORCH_CHECK(batch > 0 && stride >= 2 && static_cast<int64_t>(rows.size()) == batch * stride,
              "a row of tokens and a length for each sequence of the block table");
  at::Tensor last_tokens = at::empty({batch, stride - 1}, at::kLong);
  at::Tensor cache_len = at::empty({batch}, at::kInt);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* row = rows.data() + b * stride;
    std::copy(row, row + stride - 1, last_tokens.data_ptr<int64_t>() + b * (stride - 1));
    cache_len.data_ptr<int32_t>()[b] = static_cast<int32_t>(row[stride - 1]);
  }
  values_[0] = std::move(last_tokens);
  values_[1] = std::move(cache_len);
  values_[2] = block_table;
}

std::vector<at::Tensor> StepRunner::outputs(const std::vector<int64_t>& slots) {
  std::vector<at::Tensor> found;
  found.reserve(slots.size());
  for (int64_t slot : slots) found.push_back(get(slot));
  return found;
}

}  // namespace specc
