// What a token does to some columns of a recurrence's state. With decays e of the rows of a state S,
// a token looks up Sᵀ(e k) and Sᵀ(e q), and S becomes e S + k δᵀ; what it reads is Sᵀ(e q) + (k · q) δ
// of the old S. So the state is read twice and written once, and not written at all where nothing
// comes after the token.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace specc::recurrence {

using vec::kLanes;
using vec::load16;
using vec::Sixteen;
using vec::store16;

// columns of a state that are taken at a time, and the sixteens of a row of them
constexpr int64_t kColumns = 32;
constexpr int kParts = kColumns / kLanes;
// sixteens whose sums have registers at one time
constexpr int kTogether = vec::kWidth == kLanes ? kParts : 1;
// sums over the rows of a state are those of even and of odd rows, so that additions need not wait
// for each other
constexpr int kSums = 2;

// A number in all lanes, as it is loaded: from a register it would take the place of a product.
inline vec::Float broadcast(const float* p) {
#if defined(__AVX512F__)
  return (vec::Float)_mm512_broadcastss_ps(_mm_load_ss(p));
#else
  return vec::splat(*p);
#endif
}

inline void multiply_add(Sixteen& sum, const Sixteen& x, vec::Float y) {
  for (int j = 0; j < kLanes / vec::kWidth; ++j) vec::multiply_add(sum.at[j], x.at[j], y);
}
inline Sixteen scaled(const Sixteen& x, vec::Float y) {
  return each(x, [&](vec::Float a) { return a * y; });
}

// e^x; NaN stays NaN.
inline Sixteen exponential(const Sixteen& x) {
  const Sixteen e =
      vec::exp_of_nonpositive(each(x, [](vec::Float a) { return a > 0.0f ? -a : a; }));
  return each(x, e, [](vec::Float a, vec::Float b) { return a > 0.0f ? 1.0f / b : b; });
}

// Rows of some columns of a state.
struct Columns {
  float* data;
  int64_t stride;

  float* at(int64_t row, int part) const { return data + row * stride + part * kLanes; }
  void prefetch(int64_t row, int part) const { __builtin_prefetch(at(row, part), 1, 2); }
};

// What a token is to some columns of a head's state.
struct Inputs {
  const float* k;        // [DK]
  const float* decays;   // e: [DK], or one
  const float* keys;     // [DK], e k
  const float* queries;  // [DK], e q; null where nothing is read
  float key_query;       // k · q
  float beta;
  float v[kColumns];
};

// each(row, sum) for all rows; the sum of a row says to which of the sums it belongs.
template <class Each>
inline void by_row(int64_t rows, const Each& each) {
  int64_t row = 0;
  for (; row + kSums <= rows; row += kSums) {
    each(row, 0);
    each(row + 1, 1);
  }
  if (row < rows) each(row, 0);
}

// What a token writes [kColumns], and what it reads; meanwhile rows that come next are asked for.
template <bool kHasBeta, bool kReads>
void look_up(int64_t rows, const Inputs& in, Columns state, Columns ahead, float* delta,
             float* out) {
  const float *const keys = in.keys, *const queries = in.queries;
  for (int first = 0; first < kParts; first += kTogether) {
    Sixteen known[kSums][kTogether], read[kSums][kTogether];
    for (int sum = 0; sum < kSums; ++sum)
      for (int p = 0; p < kTogether; ++p) known[sum][p] = read[sum][p] = vec::splat16(0);
    by_row(rows, [&](int64_t row, int sum) {
      const vec::Float k = broadcast(keys + row), q = kReads ? broadcast(queries + row) : k;
#pragma GCC unroll 2
      for (int p = 0; p < kTogether; ++p) {
        ahead.prefetch(row, first + p);
        const Sixteen s = load16(state.at(row, first + p));
        if constexpr (kHasBeta) multiply_add(known[sum][p], s, k);
        if constexpr (kReads) multiply_add(read[sum][p], s, q);
      }
    });
    for (int p = 0; p < kTogether; ++p) {
      const int64_t place = (first + p) * kLanes;
      Sixteen d = load16(in.v + place);
      if constexpr (kHasBeta) d = (d - (known[0][p] + known[1][p])) * in.beta;
      store16(delta + place, d);
      if constexpr (kReads) {
        Sixteen total = read[0][p] + read[1][p];
        multiply_add(total, d, vec::splat(in.key_query));
        store16(out + place, total);
      }
    }
  }
}
// Without beta, a token that reads nothing looks up nothing.
template <>
inline void look_up<false, false>(int64_t, const Inputs& in, Columns, Columns, float* delta,
                                  float*) {
  for (int p = 0; p < kParts; ++p) store16(delta + p * kLanes, load16(in.v + p * kLanes));
}

// The state after a token; both may be one.
template <bool kDecaysRows>
void update(int64_t rows, const Inputs& in, const float* delta, Columns from, Columns to) {
  // what stores might change would be loaded anew for each row
  const float *const keys = in.k, *const decays = in.decays;
  const vec::Float of_head = broadcast(decays);
  Sixteen d[kParts];
  for (int p = 0; p < kParts; ++p) d[p] = load16(delta + p * kLanes);
  for (int64_t row = 0; row < rows; ++row) {
    const vec::Float k = broadcast(keys + row);
    const vec::Float decay = kDecaysRows ? broadcast(decays + row) : of_head;
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
      Sixteen s = scaled(load16(from.at(row, p)), decay);
      multiply_add(s, d[p], k);
      store16(to.at(row, p), s);
    }
  }
}

// Both, for one kind of recurrence.
struct Turn {
  void (*look_up)(int64_t, const Inputs&, Columns, Columns, float*, float*);
  void (*update)(int64_t, const Inputs&, const float*, Columns, Columns);

  template <bool kReads>
  static Turn of(bool decays_rows, bool has_beta) {
    return {has_beta ? recurrence::look_up<true, kReads> : recurrence::look_up<false, kReads>,
            decays_rows ? recurrence::update<true> : recurrence::update<false>};
  }
};

}  // namespace specc::recurrence
