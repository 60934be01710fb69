// Files of an engine for examples/decode.cpp, and what it refuses: found, needed, do.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"
#include "specc.h"

using Kind = Json::Kind;

constexpr const char* kAgain = "compile the engine again";

[[noreturn]] inline void refuse(const std::string& found, const std::string& needed,
                         const std::string& todo = kAgain) {
  throw std::runtime_error("found:  " + found + "\nneeded: " + needed + "\ndo:     " + todo);
}

inline void done(int status) {
  if (status != 0)
    refuse(std::string("a program that cannot run: ") + specc_error(),
           "a graph of this version of specc");
}

// Pages that are written to become the process's own.
struct MappedFile {
  explicit MappedFile(const std::filesystem::path& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found{};
    void* mapped = MAP_FAILED;
    if (file >= 0 && fstat(file, &found) == 0 && found.st_size > 0)
      mapped = mmap(nullptr, found.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    if (file >= 0) close(file);
    if (mapped == MAP_FAILED) refuse(path.string() + ", which cannot be read", "a file");
    data = static_cast<char*>(mapped), size = found.st_size;
  }
  ~MappedFile() { munmap(data, size); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data;
  int64_t size;
};

inline Json read_json(const std::filesystem::path& path) try {
  const MappedFile file(path);
  return Json::parse({file.data, static_cast<size_t>(file.size)});
} catch (const std::runtime_error& error) {
  if (std::string_view(error.what()).starts_with("found:")) throw;
  refuse(path.string() + ": " + error.what(), "a complete file of an engine");
}

struct Dtype {
  std::string_view name, stored;  // in graphs, and in safetensors files
  int32_t code;
  int64_t bytes;
};
constexpr Dtype kDtypes[] = {
    {"uint8", "U8", SPECC_UINT8, 1},          {"int8", "I8", SPECC_INT8, 1},
    {"int16", "I16", SPECC_INT16, 2},         {"int32", "I32", SPECC_INT32, 4},
    {"int64", "I64", SPECC_INT64, 8},         {"float16", "F16", SPECC_FLOAT16, 2},
    {"float32", "F32", SPECC_FLOAT32, 4},     {"float64", "F64", SPECC_FLOAT64, 8},
    {"complex64", "C64", SPECC_COMPLEX64, 8}, {"bool", "BOOL", SPECC_BOOL, 1},
    {"bfloat16", "BF16", SPECC_BFLOAT16, 2},  {"float8_e4m3fn", "F8_E4M3", SPECC_FLOAT8_E4M3FN, 1},
    {"float8_e8m0fnu", "F8_E8M0", SPECC_FLOAT8_E8M0FNU, 1}};

inline const Dtype& dtype_named(std::string_view name) {
  for (const Dtype& dtype : kDtypes)
    if (dtype.name == name) return dtype;
  refuse("a tensor of dtype " + std::string(name), "one that the library knows");
}

// A tensor in one piece.
inline SpeccTensor describe(const void* data, const Dtype& dtype,
                            const std::vector<int64_t>& sizes) {
  if (sizes.size() > SPECC_MOST_DIMS) refuse("a tensor of 9 dimensions or more", "8 or fewer");
  SpeccTensor made{const_cast<void*>(data), dtype.code, static_cast<int32_t>(sizes.size()),
                   {}, {}, dtype.bytes};
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    made.sizes[d] = sizes[d], made.strides[d] = step;
    const bool fits = sizes[d] >= 0 && !__builtin_mul_overflow(made.bytes, sizes[d], &made.bytes) &&
                      !__builtin_mul_overflow(step, std::max<int64_t>(sizes[d], 1), &step);
    if (!fits) refuse("a tensor whose sizes overflow", "sizes of 0 or more");
  }
  return made;
}

template <class T>
SpeccTensor describe(const std::vector<T>& values, std::vector<int64_t> sizes = {}) {
  if (sizes.empty()) sizes = {static_cast<int64_t>(values.size())};
  return describe(values.data(), dtype_named(sizeof(T) == 4 ? "int32" : "int64"), sizes);
}

// Tensors of a safetensors file: the length of a JSON header, the header, the data.
class Weights {
 public:
  explicit Weights(const std::filesystem::path& path) : file_(path) {
    uint64_t length = 0;
    if (file_.size >= 8) std::memcpy(&length, file_.data, 8);
    if (file_.size < 8 || length > static_cast<uint64_t>(file_.size) - 8)
      refuse(path.string() + ", which is cut", "a safetensors file");
    header_ = Json::parse({file_.data + 8, static_cast<size_t>(length)});
    first_ = 8 + static_cast<int64_t>(length);
  }
  SpeccTensor operator[](const Json& input) const {
    const std::string& key = input.text_of("key");
    const std::vector<int64_t> shape = input.integers_of("shape");
    const Dtype& dtype = dtype_named(input.text_of("dtype"));
    const Json* entry = header_.find(key);
    if (entry == nullptr) refuse("no weight " + key, "all weights of the program");
    const std::vector<int64_t> range = entry->integers_of("data_offsets");
    SpeccTensor made = describe(nullptr, dtype, shape);
    if (entry->text_of("dtype") != dtype.stored || entry->integers_of("shape") != shape ||
        range.size() != 2 || range[0] < 0 || range[1] > file_.size - first_ ||
        range[1] < range[0] || range[1] - range[0] != made.bytes)
      refuse("another weight " + key + " than the program reads", "one of its dtype and shape");
    made.data = file_.data + first_ + range[0];
    return made;
  }
  const MappedFile& file() const { return file_; }

 private:
  MappedFile file_;
  Json header_;
  int64_t first_;
};
