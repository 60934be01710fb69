// The oracle is gumbel_reference. A counter of Philox has four words for four tokens, 128 apart:
// lanes of a register are counters that follow each other, and so are their tokens.
#include "noise.h"

#include <algorithm>
#include <cmath>

#include "exact_math.h"
#include "vec.h"

namespace specc {
namespace {

using vec::Float;
using vec::Int;
using vec::kWidth;
using vec::Many;
using vec::UInt;
typedef uint64_t Wide __attribute__((vector_size(4 * kWidth)));

// tokens that take the same word of consecutive counters
constexpr int64_t kLanes = 128;
constexpr int kRounds = 10;
constexpr uint32_t kFactors[] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kSteps[] = {0x9E3779B9, 0xBB67AE85};
constexpr float kLargestUniform = 1.0f - 0x1p-24f;
// bounds of the noise: w is in [2^-33, 1 - 2^-24]
constexpr float kLeastNoise = -2.83f, kMostNoise = 22.9f;

// Products of the lower halves of 64-bit lanes; the upper halves may hold anything.
inline Wide multiply(Wide a, Wide b) {
#if defined(__AVX512F__)
  return (Wide)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
  return (Wide)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
#endif
}

inline Wide wide(uint32_t x) { return Wide{} + x; }

template <int... I>
inline Wide every_other(uint64_t first, std::integer_sequence<int, I...>) {
  return Wide{(first + 2 * I)...};
}

// Registers of counters at a time: with one alone, most of the time is waiting.
constexpr int kVectors = kWidth == 16 ? 2 : 1;
constexpr int64_t kStep = kVectors * kWidth;
// Random bits of the tokens that share counters: register i of word j is that of tokens
// first + j * kLanes + i * kWidth, …
struct Words {
  UInt at[4][kVectors];
};

// Philox 4x32-10 (Salmon et al., SC 2011, §3.3) of kStep counters at a time.
class Philox {
 public:
  explicit Philox(const Noise& noise) {
    const uint64_t seed = static_cast<uint64_t>(noise.seed);
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    for (int i = 0; i < kRounds; ++i, low += kSteps[0], high += kSteps[1])
      keys_[i][0] = wide(low), keys_[i][1] = wide(high);
    const uint64_t offset = static_cast<uint64_t>(noise.offset);
    start_[0] = wide(noise.purpose);
    start_[1] = wide(static_cast<uint32_t>(offset));
    start_[2] = wide(static_cast<uint32_t>(offset >> 32));
  }

  Words words(uint32_t first) const {
    // even counters and odd ones: products take two lanes
    constexpr std::make_integer_sequence<int, kWidth / 2> lanes;
    constexpr int kChains = 2 * kVectors;
    Wide c[4][kChains];
    for (int i = 0; i < kChains; ++i) {
      c[0][i] = every_other(first + i / 2 * kWidth + i % 2, lanes);
      c[1][i] = start_[0], c[2][i] = start_[1], c[3][i] = start_[2];
    }
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round) {
      Wide products[2][kChains];
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) {
        products[0][i] = multiply(c[0][i], wide(kFactors[0]));
        products[1][i] = multiply(c[2][i], wide(kFactors[1]));
      }
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) {
        c[0][i] = (products[1][i] >> 32) ^ c[1][i] ^ keys_[round][0];
        c[2][i] = (products[0][i] >> 32) ^ c[3][i] ^ keys_[round][1];
        c[1][i] = products[1][i];
        c[3][i] = products[0][i];
      }
    }
    Words words;
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < kVectors; ++i)
        words.at[j][i] = reinterpret_cast<UInt>((c[j][2 * i] & 0xFFFFFFFF) |
                                                (c[j][2 * i + 1] << 32));
    return words;
  }

 private:
  Wide keys_[kRounds][2];
  Wide start_[3];
};

inline Float fraction_of(UInt bits) {
  const Float w = __builtin_convertvector(bits, Float) * 0x1p-32f + 0x1p-33f;
  return w > kLargestUniform ? vec::splat(kLargestUniform) : w;
}

// -log(-log(1 - w)) of fractions w.
template <int N>
inline Many<N> gumbel(const Many<N>& w) {
  Many<N> fraction, exponent;
  vec::split(-w + 1.0f, fraction, exponent);
  // next to 1 the difference above has lost what w still knows
  for (int j = 0; j < N; ++j)
    fraction.at[j] = exponent.at[j] == 0.0f ? -w.at[j] : fraction.at[j];
  const Many<N> exponential = -vec::log_of_split(fraction, exponent);
  vec::split(exponential, fraction, exponent);
  return -vec::log_of_split(fraction, exponent);
}

// At least gumbel(bits), at a tenth of its cost: -log(-log(1 - w)) <= -log(w), and a float's bits,
// read as an integer, are a logarithm to base 2 that is at most .0861 too small.
inline Float bound(UInt bits) {
  constexpr float kLogTwo = 0.69314718f, kMargin = 1e-3f;
  constexpr float kScale = kLogTwo / (1 << 23), kOffset = kLogTwo * (127 + 32) + kMargin;
  const Float x = __builtin_convertvector(bits, Float);
  return kOffset - kScale * __builtin_convertvector(reinterpret_cast<Int>(x), Float);
}

// A row of logits by registers, which begin at any token: those of a counter are fixed.
template <typename T>
class Registers {
 public:
  explicit Registers(const Row& row)
      : first(row.first), end(row.first + row.vocab),
        logits_(static_cast<const T*>(row.logits)), factor_(vec::splat(row.factor)) {}

  const int64_t first, end;

  // The first token that shares counters with any of the row.
  int64_t first_group() const { return first / (4 * kLanes) * (4 * kLanes); }
  // Whether the tokens of a register are all of this row.
  bool has(int64_t token) const { return token >= first && token + kWidth <= end; }

  // s of tokens token …; -inf for those outside the row
  Float load(int64_t token) const {
    if (has(token)) return vec::load(logits_ + (token - first)) * factor_;
    Float s = vec::splat(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < kWidth; ++i)
      if (token + i >= first && token + i < end)
        s[i] = vec::to_float(logits_[token + i - first]) * factor_[0];
    return s;
  }

 private:
  const T* logits_;
  Float factor_;
};

template <typename T>
void scan(const Row& row, const Noise& noise, float least, int64_t k, Best* best) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Registers<T> registers(row);
  const Philox philox(noise);
  // what is dropped, and -inf, is not looked at
  const Float floor = vec::splat(std::max(row.cut, -std::numeric_limits<float>::max()));
  int64_t count = 0;
  // the last of the k best is not below it; what may be equal is looked at: its token may be lower
  float bar = least + kLeastNoise;
  auto offer = [&](float value, int64_t token) {
    auto comes_before = [&](const Best& other) {
      if (is_better(value, other.value)) return true;
      return !is_better(other.value, value) && token < other.token;
    };
    if (count == k && !comes_before(best[k - 1])) return;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && comes_before(best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = {value, token};
    if (count == k && !(best[k - 1].value < bar)) bar = best[k - 1].value;
  };
  for (int64_t group = registers.first_group(); group < registers.end; group += 4 * kLanes) {
    for (int64_t lane = 0; lane < kLanes && group + lane < registers.end; lane += kStep) {
      auto token_of = [&](int j, int i) { return group + lane + j * kLanes + i * kWidth; };
      Float s[4][kVectors];
      Int is_out[4][kVectors], all_out = ~Int{};
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < kVectors; ++i) {
          s[j][i] = registers.load(token_of(j, i));
          // false for NaN, which ranks first
          is_out[j][i] = (s[j][i] < floor) | (s[j][i] + kMostNoise < bar);
          all_out &= is_out[j][i];
        }
      if (!lanes_of(~all_out)) continue;
      const Words words = philox.words(static_cast<uint32_t>(group / 4 + lane));
      all_out = ~Int{};
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < kVectors; ++i) {
          is_out[j][i] |= s[j][i] + bound(words.at[j][i]) < bar;
          all_out &= is_out[j][i];
        }
      if (!lanes_of(~all_out)) continue;
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < kVectors; ++i) {
          uint32_t lanes = lanes_of(~is_out[j][i]);
          if (!lanes) continue;
          const Float value = s[j][i] + gumbel(Many<1>{{fraction_of(words.at[j][i])}}).at[0];
          for (; lanes; lanes &= lanes - 1) {
            const int at = __builtin_ctz(lanes);
            if (token_of(j, i) + at < registers.end) offer(value[at], token_of(j, i) + at);
          }
        }
    }
  }
  // too few are left: dropped ones follow
  for (int64_t token = registers.first; count < k; ++token) {
    auto is_token = [token](const Best& other) { return other.token == token; };
    if (std::none_of(best, best + count, is_token)) best[count++] = {-kInfinity, token};
  }
}

template <typename T>
void add(const Row& row, const Noise& noise, float* out) {
  const Float dropped = vec::splat(-std::numeric_limits<float>::infinity());
  const Registers<T> registers(row);
  const Philox philox(noise);
  for (int64_t group = registers.first_group(); group < registers.end; group += 4 * kLanes) {
    for (int64_t lane = 0; lane < kLanes && group + lane < registers.end; lane += kStep) {
      const Words words = philox.words(static_cast<uint32_t>(group / 4 + lane));
      Many<4 * kVectors> w;
      for (int j = 0; j < 4 * kVectors; ++j)
        w.at[j] = fraction_of(words.at[j / kVectors][j % kVectors]);
      const Many<4 * kVectors> noises = gumbel(w);
      for (int j = 0; j < 4 * kVectors; ++j) {
        const int64_t token = group + lane + j / kVectors * kLanes + j % kVectors * kWidth;
        if (token >= registers.end) break;
        const Float s = registers.load(token);
        const Float value = s < row.cut ? dropped : s + noises.at[j];
        const int64_t place = token - registers.first;
        if (registers.has(token))
          vec::store(out + place, value);
        else
          for (int64_t i = 0; i < kWidth; ++i)
            if (place + i >= 0 && place + i < row.vocab) out[place + i] = value[i];
      }
    }
  }
}

}  // namespace

float uniform(const Noise& noise) {
  return fraction_of(Philox(noise).words(0).at[0][0])[0];
}

void best_with_noise(const Row& row, const Noise& noise, float least, int64_t k, Best* best) {
  row.dtype == DType::kFloat32 ? scan<float>(row, noise, least, k, best)
                               : scan<vec::BFloat16>(row, noise, least, k, best);
}

void add_noise(const Row& row, const Noise& noise, float* out) {
  row.dtype == DType::kFloat32 ? add<float>(row, noise, out)
                               : add<vec::BFloat16>(row, noise, out);
}

}  // namespace specc
