// Calls operators of a library on behalf of another process: of another processor's library, run by
// an emulator (remote_calls.py). What is said is in the byte order and with the sizes of both.
//
//   call_server LIBRARY
//
// A call: size of the name, name, number of arguments, arguments. An argument: kind, integer, real,
// number of bytes, bytes; of a tensor, or of each of several: dtype, dim, sizes, strides, number of
// bytes, bytes. An answer: 0, number of results, the results as tensors, then the bytes of each
// tensor that was given, as they are now; or 1, and a text.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <string>
#include <vector>

#include "specc.h"

namespace {

void read_all(void* to, size_t bytes) {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t came = read(0, at, bytes);
    if (came <= 0) std::exit(0);
    at += came;
    bytes -= came;
  }
}

void write_all(const void* from, size_t bytes) {
  const char* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t gone = write(1, at, bytes);
    if (gone <= 0) std::exit(1);
    at += gone;
    bytes -= gone;
  }
}

int64_t number() {
  int64_t value = 0;
  read_all(&value, sizeof value);
  return value;
}

void say(int64_t value) { write_all(&value, sizeof value); }

// Memory of 64 bytes' alignment, which ends where it ends: what is behind it is nobody's.
struct Memory {
  explicit Memory(int64_t size) : bytes(size) {
    if (posix_memalign(&data, 64, size > 0 ? size : 1) != 0) std::exit(2);
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data = nullptr;
  int64_t bytes;
};

SpeccTensor tensor(std::list<Memory>& memory) {
  SpeccTensor made{};
  made.dtype = static_cast<int32_t>(number());
  made.dim = static_cast<int32_t>(number());
  for (int64_t i = 0; i < made.dim; ++i) made.sizes[i] = number();
  for (int64_t i = 0; i < made.dim; ++i) made.strides[i] = number();
  made.bytes = number();
  Memory& own = memory.emplace_back(made.bytes);
  read_all(own.data, made.bytes);
  made.data = own.data;
  return made;
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const auto call = reinterpret_cast<decltype(&specc_call)>(dlsym(library, "specc_call"));
  const auto error = reinterpret_cast<decltype(&specc_error)>(dlsym(library, "specc_error"));
  const auto give_back = reinterpret_cast<decltype(&specc_free)>(dlsym(library, "specc_free"));
  for (;;) {
    std::string name(number(), '\0');
    read_all(name.data(), name.size());
    std::vector<SpeccValue> values(number());
    std::list<Memory> memory;
    std::list<std::vector<SpeccTensor>> tensors;
    for (SpeccValue& value : values) {
      value.kind = number();
      value.integer = number();
      read_all(&value.real, sizeof value.real);
      if (value.kind == SPECC_VALUE_TENSOR || value.kind == SPECC_VALUE_TENSORS) {
        std::vector<SpeccTensor>& all = tensors.emplace_back();
        const int64_t count = value.kind == SPECC_VALUE_TENSOR ? 1 : value.integer;
        for (int64_t i = 0; i < count; ++i) all.push_back(tensor(memory));
        value.items = all.data();
      } else {
        Memory items(number());
        read_all(items.data, items.bytes);
        Memory& kept = memory.emplace_back(items.bytes);
        std::memcpy(kept.data, items.data, items.bytes);
        value.items = kept.data;
        kept.bytes = -1;  // not given back
      }
    }
    SpeccTensor results[SPECC_MOST_RESULTS];
    int64_t count = 0;
    const int code = call(name.c_str(), values.data(), static_cast<int64_t>(values.size()), results,
                          &count, nullptr, nullptr);
    say(code == 0 ? 0 : 1);
    if (code != 0) {
      const std::string text = error();
      say(static_cast<int64_t>(text.size()));
      write_all(text.data(), text.size());
      continue;
    }
    say(count);
    for (int64_t i = 0; i < count; ++i) {
      const SpeccTensor& result = results[i];
      say(result.dtype);
      say(result.dim);
      for (int64_t d = 0; d < result.dim; ++d) say(result.sizes[d]);
      for (int64_t d = 0; d < result.dim; ++d) say(result.strides[d]);
      say(result.bytes);
      write_all(result.data, result.bytes);
      bool is_own = true;
      for (const Memory& each : memory) {
        const char* begin = static_cast<char*>(each.data);
        const char* at = static_cast<const char*>(result.data);
        is_own &= each.bytes <= 0 || at < begin || at >= begin + each.bytes;
      }
      if (is_own) give_back(result.data);
    }
    for (const Memory& each : memory)
      if (each.bytes >= 0) write_all(each.data, each.bytes);
  }
}
