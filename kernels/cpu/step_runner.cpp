#include "step_runner.h"

#include <algorithm>
#include <string>

#include "clock.h"
#include "threads.h"

namespace specc {

StepRunner::StepRunner(std::shared_ptr<const Code> code, std::shared_ptr<ArenaPool> pool)
    : frame_(std::move(code)), pool_(std::move(pool)) {}

void StepRunner::set(int64_t slot, const Tensor& value) {
  check_tensor(value);
  frame_.set(slot, value);
}

const Tensor& StepRunner::get(int64_t slot) const {
  const Value& value = frame_.get(slot);
  check(value.kind == Value::Kind::kTensor, "a tensor that a stage has made");
  check_tensor(value.tensor);
  return value.tensor;
}

void StepRunner::run(std::span<const Tensor> inputs, int64_t first, int64_t last) {
  if (first == 0) {
    end();
    for (size_t i = 0; i < inputs.size(); ++i) set(static_cast<int64_t>(i), inputs[i]);
  }
  run_stages(first, last);
  seconds_of_all_ = seconds_;
}

void StepRunner::run_stages(int64_t first, int64_t last) {
  const int64_t count = frame_.num_stages();
  if (!(0 <= first && first <= last && last <= count))
    fail("stages " + std::to_string(first) + " to " + std::to_string(last) + " of " +
         std::to_string(count));
  // nothing between two programs is worth a barrier; each program sets its own
  const PassThreads threads(kernel_threads(), 1);
  check(frame_.get(0).kind == Value::Kind::kTensor && frame_.get(0).tensor.dim >= 1,
        "the inputs of a step");
  const int64_t batch = frame_.get(0).tensor.sizes[0];
  if (first == 0) {
    is_new_batch_ = batch != batch_;
    batch_ = -1;  // should a stage throw, nothing of it is kept
    seconds_.assign(count, 0.0);
    program_seconds_.assign(count, 0.0);
    is_whole_ = true;
  } else if (first != next_stage_) {
    is_whole_ = false;
  }
  // the first run may begin anywhere
  seconds_.resize(count);
  program_seconds_.resize(count);
  if (arena_ == nullptr) arena_ = pool_->take();
  for (int64_t i = first; i < last; ++i) {
    const auto begin = Clock::now();
    double in_programs = 0;
    try {
      frame_.run_stage(i, *arena_, is_new_batch_, in_programs);
    } catch (...) {
      end();
      throw;
    }
    seconds_[i] = seconds_since(begin);
    program_seconds_[i] = in_programs;
  }
  next_stage_ = last;
  // a stage that somebody else stood in for has not computed what it keeps for this batch size
  if (last == count && is_whole_) batch_ = batch;
}

void StepRunner::end() {
  if (arena_ == nullptr) return;
  frame_.forget();
  pool_->give(std::move(arena_));
}

void StepRunner::read(std::span<const int64_t> results) {
  for (const int64_t slot : results) {
    const Tensor& value = get(slot);
    check(value.is_contiguous(), "results are contiguous");
    if (value.dtype == Element::kInt32) {
      found_.insert(found_.end(), value.as<int32_t>(), value.as<int32_t>() + value.count());
    } else {
      check(value.dtype == Element::kInt64, "results are integers");
      found_.insert(found_.end(), value.as<int64_t>(), value.as<int64_t>() + value.count());
    }
  }
}

void StepRunner::step(std::span<const int64_t> rows, const Tensor& block_table,
                      std::span<const int64_t> results, int64_t first, int64_t last, bool stays) {
  found_.clear();
  if (first == 0) {
    end();
    set_inputs(rows, block_table);
  }
  run_stages(first, last);
  read(results);
  seconds_of_all_ = seconds_;
  if (last == frame_.num_stages() && !stays) end();
}

void StepRunner::steps(std::vector<int64_t> rows, const Tensor& block_table,
                       std::span<const int64_t> results, int64_t count,
                       std::span<const int64_t> ends) {
  if (count < 1) fail("1 step or more, not " + std::to_string(count));
  check(results.size() >= 3, "results to go on from");
  check(block_table.dim == 2, "a block table of two dimensions");
  const int64_t batch = block_table.sizes[0], last = frame_.num_stages();
  end();
  found_.clear();
  seconds_of_all_.clear();
  for (int64_t i = 0; i < count; ++i) {
    end();
    set_inputs(rows, block_table);
    run_stages(0, last);
    const size_t begin = found_.size();
    read(results);
    const Tensor& output = get(results[1]);
    check(output.dim == 2, "output tokens of two dimensions");
    const int64_t width = output.sizes[1];
    seconds_of_all_.insert(seconds_of_all_.end(), seconds_.begin(), seconds_.end());
    end();
    const std::span<const int64_t> own(found_.begin() + static_cast<int64_t>(begin), found_.end());
    check(static_cast<int64_t>(own.size()) >= batch * (width + 2), "results of each sequence");
    if (i + 1 < count && !go_on(own, batch, width, ends, rows)) break;
  }
}

// Makes `rows` those of the next step; false where a token ends a sequence.
bool StepRunner::go_on(std::span<const int64_t> found, int64_t batch, int64_t width,
                       std::span<const int64_t> ends, std::vector<int64_t>& rows) {
  const int64_t stride = static_cast<int64_t>(rows.size()) / batch, num_last = stride - 1;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t emitted = found[b] + 1;
    check(emitted >= 0 && emitted <= width, "a number of accepted tokens");
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

void StepRunner::set_inputs(std::span<const int64_t> rows, const Tensor& block_table) {
  check(block_table.dim == 2, "a block table of two dimensions");
  const int64_t batch = block_table.sizes[0], count = static_cast<int64_t>(rows.size());
  const int64_t stride = batch ? count / batch : 0;
  check(batch > 0 && stride >= 2 && count == batch * stride,
        "a row of tokens and a length for each sequence of the block table");
  tokens_.resize(batch * (stride - 1));
  lengths_.resize(batch);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* row = rows.data() + b * stride;
    std::copy(row, row + stride - 1, tokens_.data() + b * (stride - 1));
    lengths_[b] = static_cast<int32_t>(row[stride - 1]);
  }
  Tensor tokens = shaped(std::array<int64_t, 2>{batch, stride - 1}, Element::kInt64);
  tokens.data = tokens_.data();
  Tensor lengths = shaped(std::array<int64_t, 1>{batch}, Element::kInt32);
  lengths.data = lengths_.data();
  set(0, tokens);
  set(1, lengths);
  set(2, block_table);
}

}  // namespace specc
