// A compiled program: one model of an engine, or a segment of one.
#pragma once

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <atomic>
#include <string>
#include <vector>

#include "bus_errors.h"
#include "team.h"

namespace specc {

// Inputs of every program; the mass of blocks and a hidden value may follow.
constexpr size_t kNumFlat = 8;

// What a step calls: a model.
class Program : public torch::CustomClassHolder {
 public:
  // The runtime inputs in the order of RUNTIME_INPUTS (passes/program.py) → logits [R, V].
  virtual at::Tensor run(std::vector<at::Tensor> inputs) = 0;
};

// One model, or a segment of one: an AOTInductor package whose weights and caches are bound from
// outside.
class CompiledProgram : public Program {
 public:
  explicit CompiledProgram(const std::string& package);

  // Threads of every pass, whichever thread calls; at first those of the thread that loads.
  void set_num_threads(int64_t count);
  int64_t num_threads() { return num_threads_; }
  // In passes of up to this many rows the loops that Inductor generated run on one thread, since
  // they take less time than the barriers would; the kernels that read weights and caches use all,
  // as a team (team.h).
  void set_narrow_rows(int64_t count);

  // Names of the constants that bind_weights has to give.
  std::vector<std::string> weight_names();
  // The tensors' memory is used as it is and has to outlive the program; they are kept alive here.
  void bind_weights(const std::vector<std::string>& names, const std::vector<at::Tensor>& weights);
  // k and v of each layer, in the order of the graph's inputs.
  void bind_caches(std::vector<at::Tensor> caches);
  // From here on, `run` refuses what is not flat tokens with their metadata: its callers may be
  // graphs of an engine that somebody has edited. A program that takes the mass of blocks, too, is
  // given one of no columns where there is none.
  void expect_flat_inputs(bool takes_mass) { is_flat_ = true, takes_mass_ = takes_mass; }
  // Of a segment: it takes one more input, last, of these sizes (-1: one for each token) and of the
  // dtype of `like`.
  void expect_hidden(std::vector<int64_t> sizes, const at::Tensor& like);
  // Of a segment: the result is what the next one takes, too.
  at::Tensor run(std::vector<at::Tensor> inputs) override;

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
  std::vector<at::Tensor> weights_, caches_;
  WatchedMemory watched_;  // destroyed before the weights
  int num_threads_;
  int64_t narrow_rows_ = 64;
  bool is_flat_ = false, takes_mass_ = false;
  std::vector<int64_t> hidden_sizes_;
  at::ScalarType hidden_dtype_ = at::kFloat;
  WeightOrder order_;
  std::atomic_flag has_team_;  // a pass of another thread uses the order

  at::Tensor run_loops_on(int loops, std::vector<at::Tensor>&& inputs);
  void check_hidden(const at::Tensor& hidden, int64_t tokens) const;
  void check_flat(const std::vector<at::Tensor>& inputs) const;
};

}  // namespace specc
