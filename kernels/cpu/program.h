// A model of an engine, or a segment of one, as a step or Python calls it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "bus_errors.h"
#include "frame.h"
#include "team.h"

namespace specc {

// Inputs of every program; places of states, the mass of blocks and a hidden value may follow.
constexpr size_t kNumFlat = 8;

// Instructions whose weights and caches are bound from outside.
class Program : public Callee {
 public:
  // inputs: slots of what a call gives, in the order of RUNTIME_INPUTS (passes/program.py).
  Program(std::shared_ptr<const Code> code, std::vector<int64_t> inputs, int64_t result);

  // Threads of every pass, whichever thread calls; at first those of the thread that loads.
  void set_num_threads(int64_t count) override;
  int64_t num_threads() const override { return num_threads_; }
  // In passes of up to this many rows the operators between products run on one thread, since they
  // take less time than the barriers would; the kernels that read weights and caches use all, as a
  // team (team.h).
  void set_narrow_rows(int64_t count);

  // A weight or a cache; its memory is used as it is and has to outlive the program.
  void bind(int64_t slot, const Tensor& tensor);
  // Memory of a mapped file that weights lie in.
  void watch(const void* data, size_t bytes) { watched_.add(data, bytes); }
  // From here on, `call` refuses what is not flat tokens with their metadata: its callers may be
  // graphs of an engine that somebody has edited. A program that takes the mass of blocks, too, is
  // given one of no columns where there is none.
  void expect_flat_inputs(bool takes_mass) { is_flat_ = true, takes_mass_ = takes_mass; }
  // It takes one more input, after those of every program: [B, 2] places of states, and nodes that
  // are certain.
  void expect_states() { takes_states_ = true; }
  // It takes one more, after those: [Nt, 1] the adapter of each token. Without it none has one.
  void expect_adapters() { takes_adapters_ = true; }
  // Of a segment: it takes one more input, last, of these sizes (-1: one for each token).
  void expect_hidden(std::vector<int64_t> sizes, Element dtype);
  // Values take at most so many bytes at a time, or four times what weights and inputs take.
  void set_reserve(int64_t bytes) { reserve_ = bytes; }

  Tensor call(std::span<const Tensor> inputs, Arena& arena, void*& block) override;

 private:
  std::unique_ptr<Frame> take_frame();
  Tensor run(Frame& frame, std::span<const Tensor> inputs, Arena& arena, void*& block);
  void run_loops_on(int loops, Frame& frame, Arena& arena);
  void check_hidden(const Tensor& hidden, int64_t tokens) const;
  void check_flat(std::span<const Tensor> inputs) const;
  // Inputs without the mass of blocks and a hidden value.
  size_t num_known() const { return kNumFlat + takes_states_ + takes_adapters_; }

  const std::shared_ptr<const Code> code_;
  const std::vector<int64_t> inputs_;
  const int64_t result_;
  std::vector<std::pair<int64_t, Tensor>> bound_;
  int64_t bound_bytes_ = 0, reserve_ = 0;
  WatchedMemory watched_;
  int num_threads_;
  int64_t narrow_rows_ = 64;
  bool is_flat_ = false, takes_states_ = false, takes_adapters_ = false, takes_mass_ = false;
  std::vector<int64_t> hidden_sizes_;
  Element hidden_dtype_ = Element::kFloat32;
  WeightOrder order_;
  std::atomic_flag has_team_;  // a pass of another thread uses the order
  std::mutex mutex_;
  std::vector<std::unique_ptr<Frame>> frames_;  // that nobody uses
};

}  // namespace specc
