#include "program.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "strided_copy.h"
#include "threads.h"

namespace specc {
namespace {

// values that are alive at a time: so much, and so many times what the inputs take
constexpr int64_t kLeastBytes = int64_t{1} << 30, kTimes = 4;

// What a program may hold of an arena while it runs.
class Limit {
 public:
  Limit(Arena& arena, int64_t bytes) : arena_(arena), before_(arena.limit()) {
    arena_.set_limit(bytes);
  }
  ~Limit() { arena_.set_limit(before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  Arena& arena_;
  const int64_t before_;
};

// Blocks of an arena that end with a call.
class Blocks {
 public:
  explicit Blocks(Arena& arena) : arena_(arena) {}
  ~Blocks() {
    for (void* block : taken_) arena_.give(block);
  }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  // The same values in one piece.
  Tensor contiguous(const Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    Tensor made = shaped(std::span(tensor.sizes, tensor.dim), tensor.dtype);
    made.data = taken_.emplace_back(arena_.take(made.bytes));
    copy_strided(tensor, made.data);
    return made;
  }

 private:
  Arena& arena_;
  std::vector<void*> taken_;
};

}  // namespace

Program::Program(std::shared_ptr<const Code> code, std::vector<int64_t> inputs, int64_t result)
    : code_(std::move(code)),
      inputs_(std::move(inputs)),
      result_(result),
      num_threads_(omp_get_max_threads()) {
  const Frame frame(code_);  // throws for a slot that there is not
  for (const int64_t slot : inputs_) frame.get(slot);
  frame.get(result_);
}

void Program::set_num_threads(int64_t count) {
  if (count < 1 || count > std::numeric_limits<int>::max())
    fail("1 thread or more, not " + std::to_string(count));
  num_threads_ = static_cast<int>(count);
}

void Program::set_narrow_rows(int64_t count) {
  if (count < 1) fail("1 row or more, not " + std::to_string(count));
  narrow_rows_ = count;
}

void Program::bind(int64_t slot, const Tensor& tensor) {
  check_tensor(tensor);
  const std::lock_guard lock(mutex_);
  frames_.clear();
  bound_.emplace_back(slot, tensor);
  bound_bytes_ += tensor.bytes;
}

void Program::expect_hidden(std::vector<int64_t> sizes, Element dtype) {
  hidden_sizes_ = std::move(sizes);
  hidden_dtype_ = dtype;
}

void Program::check_hidden(const Tensor& hidden, int64_t tokens) const {
  bool fits = hidden.dtype == hidden_dtype_ &&
              hidden.dim == static_cast<int64_t>(hidden_sizes_.size());
  for (size_t i = 0; fits && i < hidden_sizes_.size(); ++i)
    fits = hidden.sizes[i] == (hidden_sizes_[i] < 0 ? tokens : hidden_sizes_[i]);
  check(fits, "a segment's hidden value has another dtype or other sizes");
}

// Operators check what they get, but not that inputs of a pass say the same of it.
void Program::check_flat(std::span<const Tensor> inputs) const {
  struct Input {
    const char* name;
    Element dtype;
    int64_t dim;
  };
  static constexpr std::array<Input, kNumFlat> kInputs{{{"tokens", Element::kInt64, 1},
                                                        {"positions", Element::kInt64, 1},
                                                        {"q_start", Element::kInt32, 1},
                                                        {"slot", Element::kInt32, 1},
                                                        {"cache_len", Element::kInt32, 1},
                                                        {"ancestors", Element::kInt64, 2},
                                                        {"block_table", Element::kInt32, 2},
                                                        {"logit_rows", Element::kInt64, 1}}};
  const bool takes_hidden = !hidden_sizes_.empty();
  const size_t count = num_known() + takes_mass_ + takes_hidden;
  if (inputs.size() != count)
    fail("a program takes " + std::to_string(count) + " inputs, not " +
         std::to_string(inputs.size()));
  for (size_t i = 0; i < kNumFlat; ++i)
    if (inputs[i].dtype != kInputs[i].dtype || inputs[i].dim != kInputs[i].dim)
      fail(std::string("a program's ") + kInputs[i].name +
           " has another dtype or number of dimensions");
  const int64_t tokens = inputs[0].sizes[0], batch = inputs[4].sizes[0];
  check(inputs[1].sizes[0] == tokens && inputs[3].sizes[0] == tokens &&
            inputs[5].sizes[0] == tokens && inputs[2].sizes[0] == batch + 1 &&
            inputs[6].sizes[0] == batch,
        "a program's tokens and their metadata have different sizes");
  if (takes_states_) {
    const Tensor& states = inputs[kNumFlat];
    check(states.dtype == Element::kInt32 && states.dim == 2 && states.sizes[0] == batch &&
              states.sizes[1] == 2,
          "a program's places of states have another dtype or other sizes");
  }
  if (takes_adapters_) {
    const Tensor& adapters = inputs[num_known() - 1];
    check(adapters.dtype == Element::kInt32 && adapters.dim == 2 && adapters.sizes[0] == tokens &&
              adapters.sizes[1] == 1,
          "a program's adapters have another dtype or other sizes");
  }
  if (takes_hidden) check_hidden(inputs.back(), tokens);
  if (!takes_mass_) return;
  // it is written to: what is no float32 in one piece would be a copy of it
  const Tensor& mass = inputs[num_known()];
  check(mass.dtype == Element::kFloat32 && mass.dim == 2 && mass.is_contiguous(),
        "a program's mass has another dtype, number of dimensions or layout");
}

std::unique_ptr<Frame> Program::take_frame() {
  {
    const std::lock_guard lock(mutex_);
    if (!frames_.empty()) {
      std::unique_ptr<Frame> frame = std::move(frames_.back());
      frames_.pop_back();
      return frame;
    }
  }
  auto frame = std::make_unique<Frame>(code_);
  for (const auto& [slot, tensor] : bound_) frame->set(slot, tensor);
  return frame;
}

Tensor Program::call(std::span<const Tensor> given, Arena& arena, void*& block) {
  std::vector<Tensor> inputs(given.begin(), given.end());
  check(!inputs.empty(), "the tokens of a pass");
  for (const Tensor& input : inputs) check_tensor(input);
  std::vector<int32_t> no_adapters;
  if (takes_adapters_ && inputs.size() == num_known() - 1) {
    no_adapters.assign(static_cast<size_t>(inputs[0].count()), -1);
    Tensor none = shaped(std::array<int64_t, 2>{inputs[0].count(), 1}, Element::kInt32);
    none.data = no_adapters.data();
    inputs.push_back(none);
  }
  if (takes_mass_ && inputs.size() == num_known())
    inputs.push_back(shaped(std::array<int64_t, 2>{1, 0}, Element::kFloat32));
  if (is_flat_) check_flat(inputs);
  if (inputs.size() != inputs_.size())
    fail("a program takes " + std::to_string(inputs_.size()) + " inputs, not " +
         std::to_string(inputs.size()));
  int64_t bytes = bound_bytes_;
  for (const Tensor& input : inputs) bytes += input.bytes;
  const Limit limit(arena, std::max(kLeastBytes + kTimes * bytes, 2 * reserve_));
  std::unique_ptr<Frame> frame = take_frame();
  try {
    const Tensor made = run(*frame, inputs, arena, block);
    frame->forget(arena);
    const std::lock_guard lock(mutex_);
    frames_.push_back(std::move(frame));
    return made;
  } catch (...) {
    frame->forget(arena);
    throw;
  }
}

Tensor Program::run(Frame& frame, std::span<const Tensor> inputs, Arena& arena, void*& block) {
  Blocks copies(arena);
  for (size_t i = 0; i < inputs.size(); ++i)
    frame.set(inputs_[i], copies.contiguous(inputs[i]));
  const bool is_narrow = inputs[0].count() <= narrow_rows_;
  if (!is_narrow) {
    run_loops_on(num_threads_, frame, arena);
  } else if (num_threads_ == 1 || omp_in_parallel() || team_of_pass != nullptr ||
             has_team_.test_and_set(std::memory_order_acquire)) {
    run_loops_on(1, frame, arena);
  } else {
    const std::unique_ptr<std::atomic_flag, void (*)(std::atomic_flag*)> given_back(
        &has_team_, [](std::atomic_flag* flag) { flag->clear(std::memory_order_release); });
    with_team(num_threads_, order_, [&] { run_loops_on(1, frame, arena); });
  }
  const Value& result = frame.get(result_);
  check(result.kind == Value::Kind::kTensor, "a program returns a tensor");
  check_tensor(result.tensor);
  Tensor made = result.tensor;
  block = frame.give_away(result_);
  if (block != nullptr) return made;
  // an input, or a weight
  made = shaped(std::span(made.sizes, made.dim), made.dtype);
  block = arena.take(made.bytes);
  made.data = block;
  copy_strided(result.tensor, block);
  return made;
}

void Program::run_loops_on(int loops, Frame& frame, Arena& arena) {
  const PassThreads threads(num_threads_, loops);
  double seconds = 0;
  for (int64_t stage = 0; stage < frame.num_stages(); ++stage)
    frame.run_stage(stage, arena, true, seconds);
}

}  // namespace specc
