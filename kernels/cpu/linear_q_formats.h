// Weights in ggml's formats of blocks, for linear_q.cpp: their scales and minima as floats, and
// levels of other widths than a byte or a nibble as bytes. How an engine lays them out, and what
// headers hold, is said in specc/artifact/block_formats.py.
//
// A lane is an output here, too, so that a field of a header is decoded for all of them at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "linear_q_blocks.h"
#include "linear_q_paths.h"
#include "vec.h"

namespace specc {

struct BlockFormat {
  const char* name;
  int64_t columns, header;  // of a block; bytes of its header
  int64_t bits, group;      // of a level; columns that share a scale
  int32_t middle;           // level of 0, where groups have no minima
  bool has_minima, has_table;
  // Floats [groups, 32 outputs] of headers of so many blocks.
  void (*factors)(const uint8_t* headers, int64_t blocks, float* scales, float* minima);
  // Bytes in the order of int8's units; null of levels that are read as they lie.
  void (*unpack)(const uint8_t* planes, int64_t columns, uint8_t* levels);
};

namespace quantized {

constexpr int64_t kTogether = 256;  // columns whose headers lie together
constexpr int64_t kMostGroupsTogether = kTogether / 16;

namespace lanes {

inline vec::UInt words(const uint8_t* p) {
  vec::UShort x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vec::UInt);
}

inline vec::UInt bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vec::UInt)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (vec::UInt)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  vec::UInt x;
  for (int i = 0; i < vec::kWidth; ++i) x[i] = p[i];
  return x;
#endif
}

// of fp16
inline vec::Float halves(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vec::Float)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vec::Float)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  constexpr uint32_t kLeast = 1u << 23, kInfinite = 31u << 23, kBias = 112u << 23;
  const vec::UInt image = words(p), size = (image & 0x7fff) << 13;
  const vec::UInt normal = size + kBias + (reinterpret_cast<vec::UInt>(size >= kInfinite) & kBias);
  // subnormal ones have one exponent more, and a leading bit that is taken away again
  const vec::Float one = reinterpret_cast<vec::Float>(vec::UInt{} + (kBias + kLeast));
  const vec::Float small = reinterpret_cast<vec::Float>(size + (kBias + kLeast)) - one;
  const vec::UInt found = size < kLeast ? reinterpret_cast<vec::UInt>(small) : normal;
  return reinterpret_cast<vec::Float>(found | (image & 0x8000) << 16);
#endif
}

inline vec::Float floats(vec::UInt x) {
  return __builtin_convertvector(reinterpret_cast<vec::Int>(x), vec::Float);
}
// of a signed byte in each
inline vec::Float signed_floats(vec::UInt x) {
  return __builtin_convertvector(reinterpret_cast<vec::Int>(x << 24) >> 24, vec::Float);
}

template <class F>
void each(const F& function) {
  for (int64_t output = 0; output < kBlock; output += vec::kWidth) function(output);
}

}  // namespace lanes

// q4_0, q5_0, q8_0, iq4_nl; and, with minima that are added, q4_1, q5_1
template <bool has_minima>
void factors_of_halves(const uint8_t* headers, int64_t blocks, float* scales, float* minima) {
  const int64_t count = blocks * kBlock;
  for (int64_t i = 0; i < count; i += vec::kWidth) {
    vec::store(scales + i, lanes::halves(headers + 2 * i));
    if constexpr (has_minima) vec::store(minima + i, -lanes::halves(headers + 2 * (count + i)));
  }
}

inline void factors_2_k(const uint8_t* headers, int64_t, float* scales, float* minima) {
  lanes::each([&](int64_t o) {
    const vec::Float d = lanes::halves(headers + 2 * o);
    const vec::Float least = lanes::halves(headers + 2 * (kBlock + o));
    const uint8_t* both = headers + 4 * kBlock + o;
    for (int64_t g = 0; g < 16; ++g) {
      const vec::UInt packed = lanes::bytes(both + g * kBlock);
      vec::store(scales + g * kBlock + o, d * lanes::floats(packed & 15));
      vec::store(minima + g * kBlock + o, least * lanes::floats(packed >> 4));
    }
  });
}

inline void factors_3_k(const uint8_t* headers, int64_t, float* scales, float*) {
  lanes::each([&](int64_t o) {
    const vec::Float d = lanes::halves(headers + 2 * o);
    const uint8_t* packed = headers + 2 * kBlock + o;
    for (int64_t g = 0; g < 16; ++g) {
      const vec::UInt low = lanes::bytes(packed + g % 8 * kBlock) >> (g / 8 * 4) & 15;
      const vec::UInt high = lanes::bytes(packed + (8 + g % 4) * kBlock) >> (g / 4 * 2) & 3;
      vec::store(scales + g * kBlock + o, d * (lanes::floats(low | high << 4) - 32.0f));
    }
  });
}

// q4_k, q5_k
inline void factors_4_k(const uint8_t* headers, int64_t, float* scales, float* minima) {
  lanes::each([&](int64_t o) {
    const vec::Float d = lanes::halves(headers + 2 * o);
    const vec::Float least = lanes::halves(headers + 2 * (kBlock + o));
    const uint8_t* packed = headers + 4 * kBlock + o;
    for (int64_t g = 0; g < 4; ++g) {
      const vec::UInt scale = lanes::bytes(packed + g * kBlock);
      const vec::UInt minimum = lanes::bytes(packed + (4 + g) * kBlock);
      const vec::UInt both = lanes::bytes(packed + (8 + g) * kBlock);
      const int64_t first = g * kBlock + o, second = first + 4 * kBlock;
      vec::store(scales + first, d * lanes::floats(scale & 63));
      vec::store(scales + second, d * lanes::floats((both & 15) | scale >> 6 << 4));
      vec::store(minima + first, least * lanes::floats(minimum & 63));
      vec::store(minima + second, least * lanes::floats(both >> 4 | minimum >> 6 << 4));
    }
  });
}

inline void factors_6_k(const uint8_t* headers, int64_t, float* scales, float*) {
  lanes::each([&](int64_t o) {
    const vec::Float d = lanes::halves(headers + 2 * o);
    for (int64_t g = 0; g < 16; ++g) {
      const vec::UInt scale = lanes::bytes(headers + (2 + g) * kBlock + o);
      vec::store(scales + g * kBlock + o, d * lanes::signed_floats(scale));
    }
  });
}

inline void factors_iq4_xs(const uint8_t* headers, int64_t, float* scales, float*) {
  lanes::each([&](int64_t o) {
    const vec::Float d = lanes::halves(headers + 2 * o);
    const vec::UInt high = lanes::words(headers + 2 * (kBlock + o));
    for (int64_t g = 0; g < 8; ++g) {
      const vec::UInt low = lanes::bytes(headers + (4 + g / 2) * kBlock + o) >> (g % 2 * 4) & 15;
      const vec::UInt scale = low | (high >> (2 * g) & 3) << 4;
      vec::store(scales + g * kBlock + o, d * (lanes::floats(scale) - 32.0f));
    }
  });
}

// Levels of two planes, of which the second may have no bits. Of 32 columns, 8 quads, all bytes of
// a plane lie together; a quad of 32 outputs is 128 bytes of the result.
template <int low, int high>
void unpack_planes(const uint8_t* planes, int64_t columns, uint8_t* levels) {
  constexpr int64_t kQuad = 4 * kBlock, kLow = 8 / low, kHigh = high == 0 ? 8 : 8 / high;
  constexpr uint32_t kBytes = 0x01010101;
  constexpr uint32_t kLowMask = kBytes * ((1 << low) - 1);
  constexpr uint32_t kHighMask = kBytes * (((1 << high) - 1) << low);
  const uint8_t* tops = planes + columns * low / 8 * kBlock;
  for (int64_t first = 0; first < columns; first += 32) {
    for (int64_t line = 0; line < 32 * low / 8 * kBlock; line += 64)
      __builtin_prefetch(planes + kAheadBytes + line);
    for (int64_t line = 0; line < 32 * high / 8 * kBlock; line += 64)
      __builtin_prefetch(tops + kAheadBytes + line);
    for (int64_t v = 0; v < kQuad; v += static_cast<int64_t>(sizeof(vec::UInt))) {
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) {
        vec::UInt x;
        std::memcpy(&x, planes + q / kLow * kQuad + v, sizeof x);
        x = x >> (q % kLow * low) & kLowMask;
        if constexpr (high > 0) {
          vec::UInt y;
          std::memcpy(&y, tops + q / kHigh * kQuad + v, sizeof y);
          const int by = static_cast<int>(q % kHigh) * high - low;
          x |= (by < 0 ? y << -by : y >> by) & kHighMask;
        }
        std::memcpy(levels + q * kQuad + v, &x, sizeof x);
      }
    }
    planes += 32 * low / 8 * kBlock;
    tops += 32 * high / 8 * kBlock;
    levels += 8 * kQuad;
  }
}

constexpr BlockFormat kFormats[] = {
    {"q4_0", 32, 2, 4, 32, 8, false, false, factors_of_halves<false>, nullptr},
    {"q4_1", 32, 4, 4, 32, 0, true, false, factors_of_halves<true>, nullptr},
    {"q5_0", 32, 2, 5, 32, 16, false, false, factors_of_halves<false>, unpack_planes<4, 1>},
    {"q5_1", 32, 4, 5, 32, 0, true, false, factors_of_halves<true>, unpack_planes<4, 1>},
    {"q8_0", 32, 2, 8, 32, 128, false, false, factors_of_halves<false>, nullptr},
    {"q2_k", 256, 20, 2, 16, 0, true, false, factors_2_k, unpack_planes<2, 0>},
    {"q3_k", 256, 14, 3, 16, 4, false, false, factors_3_k, unpack_planes<2, 1>},
    {"q4_k", 256, 16, 4, 32, 0, true, false, factors_4_k, nullptr},
    {"q5_k", 256, 16, 5, 32, 0, true, false, factors_4_k, unpack_planes<4, 1>},
    {"q6_k", 256, 18, 6, 16, 32, false, false, factors_6_k, unpack_planes<4, 2>},
    {"iq4_nl", 32, 2, 4, 32, 127, false, true, factors_of_halves<false>, nullptr},
    {"iq4_xs", 256, 8, 4, 32, 127, false, true, factors_iq4_xs, nullptr},
};

// 256 columns of a block of outputs, decoded; of the last ones of a row, fewer.
struct Decoded {
  alignas(64) float scales[kMostGroupsTogether * kBlock];
  alignas(64) float minima[kMostGroupsTogether * kBlock];
  alignas(64) uint8_t unpacked[kTogether * kBlock];
  const uint8_t* levels;  // as units of int8 or int4
  int64_t column_bytes, group;

  // Where the next columns lie.
  const uint8_t* read(const BlockFormat& format, const uint8_t* w, int64_t columns) {
    const int64_t blocks = columns / format.columns, headers = blocks * format.header * kBlock;
    // as far ahead as their levels are asked for, so that each line is asked for once
    const int64_t ahead = format.bits == 8 ? kInt8AheadBytes : kAheadBytes;
    for (int64_t line = 0; line < headers; line += 64) __builtin_prefetch(w + ahead + line);
    format.factors(w, blocks, scales, minima);
    group = format.group;
    w += headers;
    if (format.unpack != nullptr) format.unpack(w, columns, unpacked);
    levels = format.unpack != nullptr ? unpacked : w;
    column_bytes = (format.unpack != nullptr ? 8 : format.bits) * kBlock / 8;
    return w + columns * format.bits / 8 * kBlock;
  }

  // Of these columns, the first of which is a multiple of 128.
  ChunkOfBlock chunk(int64_t first, int64_t columns) const {
    const int64_t place = first / group * kBlock;
    return {levels + first * column_bytes, reinterpret_cast<const uint8_t*>(scales + place),
            minima + place, columns};
  }
};

// A row of a block of outputs as floats: s · (u - z) - m, each operation rounded.
inline void decode_row(const BlockFormat& format, const uint8_t* w, int64_t columns, int64_t lane,
                       float* out) {
  Decoded decoded;
  const int64_t wide = format.bits == 4 ? 8 : 4;
  for (int64_t first = 0; first < columns; first += kTogether) {
    const int64_t count = std::min(kTogether, columns - first);
    w = decoded.read(format, w, count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = i / format.group * kBlock + lane;
      const int byte = decoded.levels[(i / wide * kBlock + lane) * 4 + i % 4];
      const int level = wide == 4 ? byte : byte >> (i % 8 & 4) & 15;
      const int step = (format.has_table ? kIq4Levels[level] : level) - format.middle;
      const float value = static_cast<float>(step) * decoded.scales[place];
      out[first + i] = format.has_minima ? value - decoded.minima[place] : value;
    }
  }
}

}  // namespace quantized

}  // namespace specc
