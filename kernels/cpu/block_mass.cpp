// specc::block_mass: scores as in attention, but what is kept of them is a sum for each block. Units
// of work are the KV heads of sequences that vote; each has sums of its own, which are added up in
// order, so that the result does not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_tensors.h"
#include "kv_rows.h"
#include "refusal.h"
#include "team.h"
#include "threads.h"
#include "vec.h"

namespace specc {
namespace {

using namespace vec;

constexpr int64_t kMostVoters = 32;
// rows of queries that read a key together
constexpr int64_t kRows = 8;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What it reads and writes; semantics: kernels/operators/block_mass.py.
struct BlockMass {
  // of which k, v, v_cache, window, sink and out are not read
  TreeAttention pass;
  float* mass;  // [B or more, columns]
  int64_t row_stride, columns;

  // Whether a sequence votes.
  bool votes(int64_t b) const { return columns > 0 && mass[b * row_stride] >= 0; }
};

// A sequence that votes.
struct Sequence {
  int64_t index, length;        // rows up to the last that the pass writes
  std::vector<int64_t> voters;  // tokens
};

std::vector<Sequence> find_sequences(const BlockMass& a) {
  const TreeAttention& pass = a.pass;
  std::vector<Sequence> found;
  for (int64_t b = 0; b < pass.batch; ++b) {
    if (!a.votes(b)) continue;
    Sequence made{b, 0, {}};
    for (int64_t t = pass.q_start[b]; t < pass.q_start[b + 1]; ++t) {
      if (pass.slot[t] < 0) continue;
      made.length = std::max<int64_t>(made.length, pass.slot[t] + 1);
      made.voters.push_back(t);
    }
    if (made.voters.empty()) continue;
    const int64_t used = (made.length + pass.block_size - 1) / pass.block_size;
    if (used > a.columns)
      refuse(std::to_string(a.columns) + " columns of mass",
             std::to_string(used) + ": one for each block of sequence " + std::to_string(b));
    if (static_cast<int64_t>(made.voters.size()) > kMostVoters)
      made.voters.erase(made.voters.begin(), made.voters.end() - kMostVoters);
    found.push_back(std::move(made));
  }
  return found;
}

bool is_visible(const TreeAttention& a, int64_t length, int64_t token, int64_t column) {
  if (a.ancestors == nullptr) return column <= a.position[token];
  if (column < length) return true;
  const int64_t node = column - length;
  if (node / 64 >= a.num_words) return false;
  const uint64_t word = static_cast<uint64_t>(a.ancestors[token * a.num_words + node / 64]);
  return word >> (node % 64) & 1;
}

// Votes of all heads of a group, into sums [blocks]; T of queries, S of rows in the cache.
template <class T, class S>
class Unit {
 public:
  Unit(const BlockMass& a, const Sequence& sequence, int64_t head, float* sums)
      : a_(a.pass), sequence_(sequence), head_(head), sums_(sums),
        group_(a.pass.num_heads / a.pass.num_kv_heads),
        stride_((sequence.length + kWidth - 1) / kWidth * kWidth) {}

  void run() {
    const int64_t rows = group_ * static_cast<int64_t>(sequence_.voters.size());
    queries_.resize(kRows * a_.head_dim);
    key_.resize(a_.head_dim);
    scores_.resize(kRows * stride_);
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t count = std::min(kRows, rows - first);
      load_queries(first, count);
      score(first, count);
      for (int64_t r = 0; r < count; ++r) add_votes(scores_.data() + r * stride_);
    }
  }

 private:
  int64_t voter(int64_t row) const { return sequence_.voters[row / group_]; }

  void load_queries(int64_t first, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
      const T* q = static_cast<const T*>(a_.q) + voter(first + r) * a_.q_token_stride +
                   (head_ * group_ + (first + r) % group_) * a_.q_head_stride;
      for (int64_t d = 0; d < a_.head_dim; ++d) queries_[r * a_.head_dim + d] = to_float(q[d]);
    }
  }

  // Powers of two that weights are, and -inf for what is not seen.
  void score(int64_t first, int64_t count) {
    const int32_t* table = a_.block_table + sequence_.index * a_.blocks_per_sequence;
    const int64_t committed = a_.cache_len[sequence_.index];
    const float scale = a_.scale * 1.44269504088896f;  // log2(e)
    std::fill(scores_.begin(), scores_.end(), kNothing);
    for (int64_t i = 0; i < sequence_.length; ++i) {
      const S* key = static_cast<const S*>(a_.k_cache) +
                     table[i / a_.block_size] * a_.k_block_stride +
                     i % a_.block_size * a_.k_row_stride + head_ * a_.k_cache_head_stride;
      read_row(key, a_.head_dim, key_.data());
      for (int64_t r = 0; r < count; ++r) {
        if (!is_visible(a_, committed, voter(first + r), i)) continue;
        const float* q = queries_.data() + r * a_.head_dim;
        float sum = 0;
        for (int64_t d = 0; d < a_.head_dim; ++d) sum += q[d] * key_[d];
        scores_[r * stride_ + i] = sum * scale;
      }
    }
  }

  void add_votes(float* scores) {
    Float best = splat(kNothing), total = splat(0);
    for (int64_t i = 0; i < stride_; i += kWidth) best = vec::max(best, load(scores + i));
    const float most = vec::max(best);
    if (most == kNothing) return;
    for (int64_t i = 0; i < stride_; i += kWidth) {
      const Float weight = exp2_of_nonpositive(load(scores + i) - most);
      total += weight;
      store(scores + i, weight);
    }
    const float factor = 1 / vec::sum(total);
    for (int64_t block = 0; block * a_.block_size < sequence_.length; ++block) {
      const int64_t end = std::min(sequence_.length, (block + 1) * a_.block_size);
      float sum = 0;
      for (int64_t i = block * a_.block_size; i < end; ++i) sum += scores[i];
      sums_[block] += sum * factor;
    }
  }

  const TreeAttention& a_;
  const Sequence& sequence_;
  const int64_t head_;
  float* sums_;
  const int64_t group_, stride_;
  std::vector<float> queries_, key_, scores_;
};

template <class T, class S = T>
void run(const BlockMass& a, const std::vector<Sequence>& sequences, int num_threads) {
  const int64_t heads = a.pass.num_kv_heads;
  const int64_t units = heads * static_cast<int64_t>(sequences.size());
  std::vector<float> sums(units * a.columns);
  std::atomic<int64_t> next{0};
  in_parallel(num_threads, [&](int64_t, int64_t, const auto&) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;)
      Unit<T, S>(a, sequences[i / heads], i % heads, sums.data() + i * a.columns).run();
  });
  for (int64_t i = 0; i < units; ++i) {
    float* mass = a.mass + sequences[i / heads].index * a.row_stride;
    for (int64_t c = 0; c < a.columns; ++c) mass[c] += sums[i * a.columns + c];
  }
}

void block_mass(const BlockMass& a, int num_threads) {
  bool is_any = false;
  for (int64_t b = 0; b < a.pass.batch; ++b) is_any |= a.votes(b);
  if (!is_any) return;
  check_bounds(a.pass);
  const std::vector<Sequence> sequences = find_sequences(a);
  if (a.pass.dtype == DType::kFloat32 && a.pass.holds_int8)
    run<float, int8_t>(a, sequences, num_threads);
  else if (a.pass.holds_int8)
    run<BFloat16, int8_t>(a, sequences, num_threads);
  else if (a.pass.dtype == DType::kFloat32)
    run<float>(a, sequences, num_threads);
  else
    run<BFloat16>(a, sequences, num_threads);
}

}  // namespace
}  // namespace specc

namespace specc::operators {
namespace {

void block_mass(const Tensor& q, const Tensor& k_cache, const Tensor& q_start,
                const Tensor& position, const Tensor& slot, const Tensor& cache_len,
                const Tensor* ancestors, const Tensor& block_table, const Tensor& mass,
                double scale) {
  check(mass.dim == 2 && mass.dtype == kFloat32 && mass.is_dense_row(), "mass is [M, C] float32");
  // nobody votes: the case of nearly all passes
  if (mass.sizes[1] == 0) return;
  check(q.dim == 3 && k_cache.dim == 4, "q has 3 dimensions, and the cache 4");
  check(q.is_dense_row() && k_cache.is_dense_row(),
        "the last dimension of q and the cache is contiguous");
  check(q.dtype == k_cache.dtype || k_cache.dtype == kInt8,
        "q and the cache have one dtype, or the cache int8");
  check(q.sizes[2] > 0 && columns_of(k_cache) == q.sizes[2], "the cache fits q");
  check(q.sizes[0] > 0 && k_cache.sizes[2] > 0 && q.sizes[0] % k_cache.sizes[2] == 0,
        "the number of KV heads divides that of heads");
  BlockMass a{};
  TreeAttention& pass = a.pass;
  pass.dtype = to_dtype(q);
  pass.holds_int8 = k_cache.dtype != q.dtype;
  pass.num_heads = q.sizes[0];
  pass.num_kv_heads = k_cache.sizes[2];
  set_queries(pass, q);
  set_key_cache(pass, k_cache);
  set_tokens(pass, q_start, position, slot, cache_len, ancestors, block_table, {&mass});
  pass.scale = static_cast<float>(scale);
  check(mass.sizes[0] >= pass.batch, "mass has a row for each sequence");
  a.mass = mass.as<float>();
  a.row_stride = mass.strides[0];
  a.columns = mass.sizes[1];
  specc::block_mass(a, kernel_threads());
}

}  // namespace

SPECC_OPERATOR("specc::block_mass", block_mass);

}  // namespace specc::operators
