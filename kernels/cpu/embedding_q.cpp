// Rows of a quantized weight, decoded one by one: what an embedding looks up. The weight may be that
// of the output projection, which `linear_q` multiplies by.

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear_q_blocks.h"
#include "linear_q_formats.h"
#include "tensors.h"
#include "threads.h"

namespace specc::operators {
namespace {

using quantized::kBlock;
using quantized::kChunk;
using quantized::kScalesBytes;
using quantized::kZerosBytes;
using quantized::parts_of;

// values below which a second thread costs more than it brings
constexpr int64_t kSerialValues = 1 << 18;

template <class T>
T read(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// What e4m3 stands for; its codes of NaN are refused before they get here.
std::array<float, 256> values_of_e4m3() {
  std::array<float, 256> values;
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                     : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    const float value = (code & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : size;
    values[static_cast<size_t>(code)] = code & 128 ? -value : value;
  }
  return values;
}
const std::array<float, 256> kE4m3 = values_of_e4m3();
constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Reads rows of a weight of so many columns, K. A layout is a way to fill this in.
struct RowDecoder {
  LinearQ of{};       // what it says of a weight
  int64_t bytes = 0;  // of a block

  // One row of a block, `lane`, as K floats: the bits of `dequantize`.
  void decode(const uint8_t* block, int64_t lane, float* out) const {
    if (of.format != nullptr) {
      quantized::decode_row(*of.format, block, of.k, lane, out);
      return;
    }
    const quantized::Layout layout(of);
    const bool is_mx = quantized::has_byte_scales(of);
    const int64_t header = is_mx ? layout.chunk_header
                                 : kScalesBytes + (of.has_zeros ? kZerosBytes : 0);
    const int64_t of_header = is_mx ? kChunk : of.group == 0 ? of.k : of.group;
    const bool has_factors = quantized::is_nvfp4(of);
    const float factor = has_factors ? read<float>(block + 4 * lane) : 1.0f;
    if (has_factors) block += kScalesBytes;
    for (int64_t first = 0; first < of.k; first += of_header) {
      const int64_t columns = std::min(of_header, of.k - first);
      const uint8_t* units = block + header;
      if (is_mx) {
        each_level(layout, units, lane, columns, [&](int64_t column, int level) {
          const uint8_t scale = block[column / of.group * kBlock + lane];
          out[first + column] =
              kE2m1[level] * (has_factors ? kE4m3[scale] * factor : power_of_two(scale));
        });
      } else {
        const auto scale = read<float>(block + 4 * lane);
        const int zero = of.has_zeros ? read<int16_t>(block + kScalesBytes + 2 * lane)
                                      : 1 << (of.bits - 1);
        each_level(layout, units, lane, columns, [&](int64_t column, int level) {
          const float value = of.is_float ? kE4m3[static_cast<size_t>(level)]
                                          : static_cast<float>(level - zero);
          out[first + column] = value * scale;
        });
      }
      block += header + parts_of(columns, layout.columns_of_unit) * layout.unit_bytes;
    }
  }

 private:
  // put(column, level) for the columns of a lane, whose units of 2 or 4 bytes are in all units.
  template <class Put>
  void each_level(const quantized::Layout& layout, const uint8_t* units, int64_t lane,
                  int64_t columns, const Put& put) const {
    units += lane * (layout.unit_bytes / kBlock);
    for (int64_t first = 0; first < columns; first += layout.columns_of_unit) {
      const int64_t count = std::min(layout.columns_of_unit, columns - first);
      for (int64_t i = 0; i < count; ++i)
        put(first + i, of.bits == 8 ? units[i] : units[i & 3] >> (i & 4) & 15);
      units += layout.unit_bytes;
    }
  }

  static float power_of_two(uint32_t exponent) {
    const uint32_t bits = exponent << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// Of a layout's name: `int8`, `int4-g64-zeros`, `fp8-g128`, `mxfp4`, `nvfp4`, `q4_k`; see
// specc/artifact/quantized_layout.py.
RowDecoder decoder_of(std::string_view name, int64_t columns) {
  RowDecoder made;
  made.of.k = columns;
  if ((made.of.format = block_format(name)) != nullptr) {
    made.of.bits = made.of.format->bits;
    made.of.group = made.of.format->group;
    made.bytes = block_bytes(made.of);
    return made;
  }
  const std::string_view kind = name.substr(0, name.find('-'));
  std::string_view rest = name.substr(kind.size());
  const bool is_e2m1 = kind == "mxfp4" || kind == "nvfp4";
  made.of.is_float = kind == "fp8" || is_e2m1;
  made.of.bits = kind == "int4" || is_e2m1 ? 4 : 8;
  check(made.of.is_float || kind == "int8" || kind == "int4", "no layout of weights has this name");
  if (is_e2m1) made.of.group = kind == "mxfp4" ? 32 : 16;
  if (rest.starts_with("-g")) {
    const char* end = rest.data() + rest.size();
    const auto [stop, error] = std::from_chars(rest.data() + 2, end, made.of.group);
    check(error == std::errc(), "no layout of weights has this name");
    rest.remove_prefix(static_cast<size_t>(stop - rest.data()));
  }
  made.of.has_zeros = rest == "-zeros";
  check(rest.empty() || made.of.has_zeros, "no layout of weights has this name");
  made.bytes = block_bytes(made.of);
  return made;
}

Tensor embedding_q(const Tensor& w, const Tensor& tokens, int64_t num_embeddings, int64_t width,
                   std::string_view layout) {
  check_index(tokens, 1, kInt64, "tokens is [T] int64");
  check(w.dim == 2 && w.dtype == kUInt8 && w.is_contiguous(),
        "a quantized weight is uint8 [blocks, bytes], contiguous");
  check(num_embeddings >= 0 && width >= 0, "outputs and columns are 0 or more");
  const RowDecoder decoder = decoder_of(layout, width);
  check(w.sizes[0] == parts_of(num_embeddings, kBlock) && w.sizes[1] == decoder.bytes,
        "the blocks are those of all outputs and columns");
  const int64_t count = tokens.sizes[0];
  const auto* ids = tokens.as<int64_t>();
  for (int64_t t = 0; t < count; ++t)
    check(ids[t] >= 0 && ids[t] < num_embeddings, "a token outside of the embedding");
  const Tensor out = empty({count, width}, kFloat32);
  const int threads = count * width < kSerialValues ? 1 : kernel_threads();
  in_parallel(threads, [&](int64_t thread, int64_t of, const auto&) {
    for (int64_t t = count * thread / of; t < count * (thread + 1) / of; ++t)
      decoder.decode(w.as<uint8_t>() + ids[t] / kBlock * decoder.bytes, ids[t] % kBlock,
                     out.as<float>() + t * width);
  });
  return out;
}

}  // namespace

SPECC_OPERATOR("specc::embedding_q", embedding_q);

}  // namespace specc::operators
