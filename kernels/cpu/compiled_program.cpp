#include "compiled_program.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <iterator>
#include <limits>
#include <memory>
#include <unordered_map>

#include "failure.h"
#include "threads.h"

namespace specc {

CompiledProgram::CompiledProgram(const std::string& package)
    : loader_(package, "model", /*run_single_threaded=*/true),
      num_threads_(at::get_num_threads()) {}

void CompiledProgram::set_num_threads(int64_t count) {
  TORCH_CHECK(1 <= count && count <= std::numeric_limits<int>::max(), "1 thread or more, not ",
              count);
  num_threads_ = static_cast<int>(count);
}

void CompiledProgram::set_narrow_rows(int64_t count) {
  TORCH_CHECK(count >= 1, "1 row or more, not ", count);
  narrow_rows_ = count;
}

std::vector<std::string> CompiledProgram::weight_names() { return loader_.get_constant_fqns(); }

void CompiledProgram::bind_weights(const std::vector<std::string>& names,
                                   const std::vector<at::Tensor>& weights) {
  TORCH_CHECK(names.size() == weights.size(), "a name for each weight");
  watched_.clear();
  weights_ = weights;
  for (const at::Tensor& weight : weights_)  // mostly views of one mapped file
    watched_.add(weight.storage().data(), weight.storage().nbytes());
  std::unordered_map<std::string, at::Tensor> map;
  for (size_t i = 0; i < names.size(); ++i) map.emplace(names[i], weights[i]);
  loader_.load_constants(map, /*use_inactive=*/false, /*check_full_update=*/true,
                         /*user_managed=*/true);
}

void CompiledProgram::bind_caches(std::vector<at::Tensor> caches) { caches_ = std::move(caches); }

void CompiledProgram::expect_hidden(std::vector<int64_t> sizes, const at::Tensor& like) {
  hidden_sizes_ = std::move(sizes);
  hidden_dtype_ = like.scalar_type();
}

void CompiledProgram::check_hidden(const at::Tensor& hidden, int64_t tokens) const {
  bool fits = hidden.defined() && hidden.is_cpu() && hidden.scalar_type() == hidden_dtype_ &&
              hidden.dim() == static_cast<int64_t>(hidden_sizes_.size());
  for (size_t i = 0; fits && i < hidden_sizes_.size(); ++i)
    fits = hidden.size(i) == (hidden_sizes_[i] < 0 ? tokens : hidden_sizes_[i]);
  TORCH_CHECK(fits, "a segment's hidden value has another dtype or other sizes");
}

// Compiled code reads its inputs by the sizes of some of them, and checks nothing.
void CompiledProgram::check_flat(const std::vector<at::Tensor>& inputs) const {
  struct Input {
    const char* name;
    at::ScalarType dtype;
    int64_t dim;
  };
  static constexpr Input kInputs[] = {
      {"tokens", at::kLong, 1},    {"positions", at::kLong, 1}, {"q_start", at::kInt, 1},
      {"slot", at::kInt, 1},       {"cache_len", at::kInt, 1},  {"ancestors", at::kLong, 2},
      {"block_table", at::kInt, 2}, {"logit_rows", at::kLong, 1}};
  static_assert(std::size(kInputs) == kNumFlat);
  const bool takes_hidden = !hidden_sizes_.empty();
  const size_t count = std::size(kInputs) + takes_mass_ + takes_hidden;
  TORCH_CHECK(inputs.size() == count, "a program takes ", count, " inputs, not ", inputs.size());
  for (size_t i = 0; i < std::size(kInputs); ++i) {
    const at::Tensor& input = inputs[i];
    TORCH_CHECK(input.defined() && input.is_cpu() && input.scalar_type() == kInputs[i].dtype &&
                    input.dim() == kInputs[i].dim,
                "a program's ", kInputs[i].name, " has another dtype or number of dimensions");
  }
  const int64_t tokens = inputs[0].size(0), batch = inputs[4].size(0);
  TORCH_CHECK(inputs[1].size(0) == tokens && inputs[3].size(0) == tokens &&
                  inputs[5].size(0) == tokens && inputs[2].size(0) == batch + 1 &&
                  inputs[6].size(0) == batch,
              "a program's tokens and their metadata have different sizes");
  if (takes_hidden) check_hidden(inputs.back(), tokens);
  if (!takes_mass_) return;
  // it is written to: what is no float32 in one piece would be a copy of it
  const at::Tensor& mass = inputs[std::size(kInputs)];
  TORCH_CHECK(mass.defined() && mass.is_cpu() && mass.scalar_type() == at::kFloat &&
                  mass.dim() == 2 && mass.is_contiguous(),
              "a program's mass has another dtype, number of dimensions or layout");
}

at::Tensor CompiledProgram::run(std::vector<at::Tensor> inputs) {
  c10::InferenceMode guard;
  TORCH_CHECK(!inputs.empty(), "the tokens of a pass");
  if (takes_mass_ && inputs.size() == kNumFlat) inputs.push_back(at::empty({1, 0}, at::kFloat));
  if (is_flat_) check_flat(inputs);
  const bool is_narrow = inputs[0].numel() <= narrow_rows_;
  // compiled code takes the strides of its example inputs for granted
  for (at::Tensor& input : inputs) input = input.contiguous();
  inputs.insert(inputs.end(), caches_.begin(), caches_.end());
  if (!is_narrow) return run_loops_on(num_threads_, std::move(inputs));
  if (num_threads_ == 1 || omp_in_parallel() || has_team_.test_and_set(std::memory_order_acquire))
    return run_loops_on(1, std::move(inputs));
  const std::unique_ptr<std::atomic_flag, void (*)(std::atomic_flag*)> given_back(
      &has_team_, [](std::atomic_flag* flag) { flag->clear(std::memory_order_release); });
  at::Tensor result;
  with_team(num_threads_, order_, [&] { result = run_loops_on(1, std::move(inputs)); });
  return result;
}

// Runs the program on the calling thread.
at::Tensor CompiledProgram::run_loops_on(int loops, std::vector<at::Tensor>&& inputs) {
  const PassThreads threads(num_threads_, loops);
  FailureText failure;
  try {
    return loader_.boxed_run(std::move(inputs))[0];
  } catch (const std::exception&) {
    TORCH_CHECK(failure.text.empty(), failure.text);
    throw;
  }
}

}  // namespace specc
