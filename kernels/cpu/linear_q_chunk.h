// Products of a chunk of a block of outputs with some rows, for linear_q.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "ahead.h"
#include "kernels.h"
#include "linear_q_blocks.h"
#include "linear_q_formats.h"
#include "linear_q_paths.h"

namespace specc::quantized {

constexpr int64_t kChunkQuads = kChunk / 4;
constexpr int64_t kUnitBytes = 4 * kBlock;

// What levels are: integers, or codes of integers that a table has: values of e2m1 times 2, whose
// scales are exponents of e8m0, or e4m3 times a factor, or those of iq4_nl and iq4_xs.
enum Kind { kInt8, kInt4, kMxfp4, kNvfp4, kIq4 };
constexpr int kMiddles[] = {128, 8, 12, 12, 127};
template <Kind kind>
constexpr const uint8_t* kTable = kind == kIq4 ? kIq4Levels : kTwiceE2m1;
// What stands for 0: the same level everywhere, one for each group, or none, and a group has a
// number that is taken off.
enum class Offset { kMiddle, kZeros, kMinima };

// What a row has in a group beside its integers.
struct GroupOfRow {
  float factor;       // of its integers; NaN where the row has one, or an infinity
  int32_t high, low;  // minus the sums of the integers' parts, by the weights' common zero point
  float sum;          // of the integers, times the factor, where weights have minima
};

template <class P, Kind kind>
typename P::Float load_scales(const uint8_t* scales, const float* factors, int output) {
  if constexpr (kind == kMxfp4)
    return P::load_exponents(scales + output) * P::splat(0.5f);
  else if constexpr (kind == kNvfp4)
    return P::load_e4m3(scales + output) * P::load_floats(factors + output) * P::splat(0.5f);
  else
    return P::load_floats(scales + output * 4);
}

// sums[m][0..32) += x[m, chunk] . w[chunk] for `rows` rows of x, group after group.
template <class P, int bits, Kind kind, Offset offset, Ahead ahead, int rows>
void multiply_chunk(const Layout& layout, const ChunkOfBlock& chunk, const int32_t* x,
                    const GroupOfRow* of_row, float* sums) {
  constexpr int64_t kRowInts = kChunkQuads * P::kInts;
  constexpr int kQuads = kind == kInt8 ? 1 : 2;
  constexpr int kRegisters = kBlock / P::kLanes;
  // sums in registers from group to group: measured, elsewhere it takes longer
  constexpr bool kKeeps = rows == 1 || (bits < 24 && kind != kInt8);
  for (int first = 0; first < kRegisters; first += P::kAtOnce) {
    typename P::Float total[rows][P::kAtOnce];
    if constexpr (kKeeps) {
#pragma GCC unroll 6
      for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < P::kAtOnce; ++v)
          total[m][v] = P::load_floats(sums + m * kBlock + (first + v) * P::kLanes);
    }
    const uint8_t* w = chunk.w;
    const uint8_t* scales = chunk.scales;
    const float* floats = chunk.floats;
    const int32_t* of_group = x;
    const GroupOfRow* group = of_row;
    for (int64_t column = 0; column < chunk.columns; column += layout.group, ++group) {
      if (layout.group_header > 0) scales = w;
      typename P::Sums acc[rows][P::kAtOnce];
#pragma GCC unroll 2
      for (int v = 0; v < P::kAtOnce; ++v) {
        if constexpr (offset == Offset::kZeros) {
          const auto zeros = P::load_zeros(scales + kScalesBytes + (first + v) * P::kLanes * 2);
#pragma GCC unroll 6
          for (int m = 0; m < rows; ++m)
            P::start(acc[m][v], P::multiply(zeros, P::splat(group[m * kMostGroups].high)),
                     P::multiply(zeros, P::splat(group[m * kMostGroups].low)));
        } else {
#pragma GCC unroll 6
          for (int m = 0; m < rows; ++m)
            P::start(acc[m][v], P::splat(group[m * kMostGroups].high),
                     P::splat(group[m * kMostGroups].low));
        }
      }
      const int64_t columns = std::min(layout.group, chunk.columns - column);
      const int64_t units = parts_of(columns, layout.columns_of_unit);
      const uint8_t* unit = w + layout.group_header + first * P::kLanes * 4;
      const int32_t* of_unit = of_group;
      for (int64_t i = 0; i < units; ++i, unit += kUnitBytes) {
        if (first == 0)
          prefetch<ahead, kUnitBytes, kind == kInt8 ? kInt8AheadBytes : kAheadBytes>(unit);
        typename P::Columns columns_of[P::kAtOnce][kQuads];
#pragma GCC unroll 2
        for (int v = 0; v < P::kAtOnce; ++v) {
          const auto bytes = P::load(unit + v * P::kLanes * 4);
          if constexpr (kind == kInt8) {
            columns_of[v][0] = P::columns(bytes);
          } else if constexpr (kind == kInt4) {
            columns_of[v][0] = P::columns(P::low_nibbles(bytes));
            columns_of[v][1] = P::columns(P::high_nibbles(bytes));
          } else {
            columns_of[v][0] = P::columns(P::look_up(kTable<kind>, P::low_nibbles(bytes)));
            columns_of[v][1] = P::columns(P::look_up(kTable<kind>, P::high_nibbles(bytes)));
          }
        }
#pragma GCC unroll 2
        for (int q = 0; q < kQuads; ++q, of_unit += P::kInts)
#pragma GCC unroll 6
          for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
            for (int v = 0; v < P::kAtOnce; ++v)
              P::multiply(acc[m][v], columns_of[v][q], of_unit + m * kRowInts);
      }
#pragma GCC unroll 2
      for (int v = 0; v < P::kAtOnce; ++v) {
        const auto scale = load_scales<P, kind>(scales, floats, (first + v) * P::kLanes);
#pragma GCC unroll 6
        for (int m = 0; m < rows; ++m) {
          auto sum = P::to_float(P::high(acc[m][v]));
          if constexpr (bits == 24) sum = sum * P::splat(256.0f) + P::to_float(P::low(acc[m][v]));
          const auto factor = scale * P::splat(group[m * kMostGroups].factor);
          float* of_row = sums + m * kBlock + (first + v) * P::kLanes;
          auto next = (kKeeps ? total[m][v] : P::load_floats(of_row)) + sum * factor;
          if constexpr (offset == Offset::kMinima)
            next = next - P::load_floats(floats + (first + v) * P::kLanes) *
                              P::splat(group[m * kMostGroups].sum);
          if constexpr (kKeeps)
            total[m][v] = next;
          else
            P::store(of_row, next);
        }
      }
      w += layout.group_header + units * kUnitBytes;
      scales += layout.next_scales;
      if constexpr (offset == Offset::kMinima) floats += kBlock;
      of_group += layout.group / 4 * P::kInts;
    }
    if constexpr (kKeeps) {
#pragma GCC unroll 6
      for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < P::kAtOnce; ++v)
          P::store(sums + m * kBlock + (first + v) * P::kLanes, total[m][v]);
    }
  }
}

using MultiplyChunk = void (*)(const Layout&, const ChunkOfBlock&, const int32_t*,
                               const GroupOfRow*, float*);

template <class P, int bits, Kind kind, Offset offset, Ahead ahead, int... less_one>
MultiplyChunk select(int64_t rows, std::integer_sequence<int, less_one...>) {
  static constexpr MultiplyChunk kOfRows[] = {
      multiply_chunk<P, bits, kind, offset, ahead, less_one + 1>...};
  return kOfRows[rows - 1];
}

template <class P, int bits, Ahead ahead>
MultiplyChunk select(const LinearQ& a, int64_t rows) {
  constexpr auto heights = std::make_integer_sequence<int, P::kTileRows>();
  // measured: with groups the second level is slower at any number of rows
  constexpr Ahead of_4 = ahead == Ahead::kSecondLevel ? Ahead::kFirstLevel : ahead;
  using enum Offset;
  if (a.format != nullptr) {
    const bool has_minima = a.format->has_minima;
    if (a.format->has_table) return select<P, bits, kIq4, kMiddle, of_4>(rows, heights);
    if (a.format->bits == 4)
      return has_minima ? select<P, bits, kInt4, kMinima, of_4>(rows, heights)
                        : select<P, bits, kInt4, kMiddle, of_4>(rows, heights);
    // what is unpacked is in the cache, and was asked for when it was
    if (has_minima) return select<P, bits, kInt8, kMinima, Ahead::kNowhere>(rows, heights);
    return a.format->unpack != nullptr
               ? select<P, bits, kInt8, kMiddle, Ahead::kNowhere>(rows, heights)
               : select<P, bits, kInt8, kMiddle, of_4>(rows, heights);
  }
  if (is_nvfp4(a)) return select<P, bits, kNvfp4, kMiddle, of_4>(rows, heights);
  if (a.is_float) return select<P, bits, kMxfp4, kMiddle, of_4>(rows, heights);
  if (a.bits == 8 && a.has_zeros) return select<P, bits, kInt8, kZeros, ahead>(rows, heights);
  if (a.bits == 8) return select<P, bits, kInt8, kMiddle, ahead>(rows, heights);
  if (a.has_zeros) return select<P, bits, kInt4, kZeros, of_4>(rows, heights);
  return select<P, bits, kInt4, kMiddle, of_4>(rows, heights);
}

}  // namespace specc::quantized
