// The part of specc.h that is about operators, threads and memory.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "bus_errors.h"
#include "call_guard.h"
#include "kernels.h"
#include "operator.h"
#include "specc.h"
#include "threads.h"

namespace specc {
namespace {

// One is copied into the other as it is.
static_assert(std::is_trivially_copyable_v<Tensor> && sizeof(Tensor) == sizeof(SpeccTensor));
static_assert(offsetof(Tensor, dtype) == offsetof(SpeccTensor, dtype));
static_assert(offsetof(Tensor, dim) == offsetof(SpeccTensor, dim));
static_assert(offsetof(Tensor, sizes) == offsetof(SpeccTensor, sizes));
static_assert(offsetof(Tensor, strides) == offsetof(SpeccTensor, strides));
static_assert(offsetof(Tensor, bytes) == offsetof(SpeccTensor, bytes));
static_assert(kMostDims == SPECC_MOST_DIMS && kMostResults == SPECC_MOST_RESULTS);
static_assert(static_cast<int>(Value::Kind::kTensors) == SPECC_VALUE_TENSORS);

constexpr int64_t kMostArguments = 64;

// Memory of whoever calls an operator from outside.
class CallersMemory : public Allocator {
 public:
  CallersMemory(SpeccAllocate allocate, void* context) : allocate_(allocate), context_(context) {
    before_ = allocator_of_call;
    allocator_of_call = this;
  }
  ~CallersMemory() override {
    allocator_of_call = before_;
    for (void* data : owned_) std::free(data);
  }
  CallersMemory(const CallersMemory&) = delete;
  CallersMemory& operator=(const CallersMemory&) = delete;

  void* allocate(int64_t bytes) override {
    const int64_t wanted = std::max<int64_t>(bytes, 1);
    void* data = nullptr;
    if (allocate_ != nullptr) {
      data = allocate_(context_, wanted);
    } else {
      owned_.reserve(kMostResults);
      data = std::aligned_alloc(64, (static_cast<size_t>(wanted) + 63) / 64 * 64);
      if (data != nullptr) owned_.push_back(data);
    }
    if (data == nullptr) fail("no memory for a result of " + std::to_string(bytes) + " bytes");
    return data;
  }
  // What was allocated stays when the call ends.
  void keep() { owned_.clear(); }

 private:
  SpeccAllocate allocate_;
  void* context_;
  Allocator* before_ = nullptr;
  std::vector<void*> owned_;
};

template <typename T>
std::vector<T> items_of(const SpeccValue& given) {
  check(given.integer >= 0 && (given.integer == 0 || given.items != nullptr),
        "a list has 0 items or more");
  const T* items = static_cast<const T*>(given.items);
  return given.integer == 0 ? std::vector<T>() : std::vector<T>(items, items + given.integer);
}

void read(const SpeccValue& given, Value& value) {
  check(given.kind >= SPECC_VALUE_NONE && given.kind <= SPECC_VALUE_TENSORS,
        "an argument is of a kind that is known");
  value.kind = static_cast<Value::Kind>(given.kind);
  switch (value.kind) {
    case Value::Kind::kNone:
      break;
    case Value::Kind::kTensor:
      check(given.items != nullptr, "an argument is a tensor");
      value.tensor = *static_cast<const Tensor*>(given.items);
      break;
    case Value::Kind::kInt:
    case Value::Kind::kBool:
      value.integer = given.integer;
      break;
    case Value::Kind::kReal:
      value.real = given.real;
      break;
    case Value::Kind::kText: {
      const std::vector<char> text = items_of<char>(given);
      value.text.assign(text.begin(), text.end());
      break;
    }
    case Value::Kind::kInts:
      value.ints = items_of<int64_t>(given);
      break;
    case Value::Kind::kReals:
      value.reals = items_of<double>(given);
      break;
    case Value::Kind::kTensors:
      value.tensors = items_of<Tensor>(given);
      break;
  }
}

void call(const char* name, const SpeccValue* arguments, int64_t num_arguments,
          SpeccTensor* results, int64_t* num_results, SpeccAllocate allocate, void* context) {
  check(name != nullptr && results != nullptr && num_results != nullptr,
        "a call has a name, and room for results");
  const Operator* found = find_operator(name);
  if (found == nullptr) fail(std::string("there is no operator ") + name);
  check(num_arguments >= 0 && num_arguments <= kMostArguments &&
            (num_arguments == 0 || arguments != nullptr),
        "an operator has 0 … 64 arguments");
  std::vector<Value> values(num_arguments);
  std::vector<const Value*> given;
  for (int64_t i = 0; i < num_arguments; ++i) {
    read(arguments[i], values[i]);
    given.push_back(&values[i]);
  }
  Call made;
  made.arguments = given;
  CallersMemory memory(allocate, context);
  found->run(made);
  // what a view says of its memory is as good as the sizes that a program gave it
  for (size_t i = 0; i < made.num_results; ++i) check_tensor(made.results[i]);
  for (size_t i = 0; i < made.num_results; ++i)
    std::memcpy(&results[i], &made.results[i], sizeof(SpeccTensor));
  *num_results = static_cast<int64_t>(made.num_results);
  memory.keep();
}

// What stands before the parenthesis of a schema.
std::string_view name_of(const char* schema) {
  const std::string_view text = schema;
  return text.substr(0, text.find('('));
}

const char* schema_of(const char* name) {
  if (name == nullptr || find_operator(name) == nullptr) return nullptr;
  const char* const* const found = std::lower_bound(
      std::begin(kSchemas), std::end(kSchemas), std::string_view(name),
      [](const char* schema, std::string_view wanted) { return name_of(schema) < wanted; });
  return found != std::end(kSchemas) && name_of(*found) == name ? *found : nullptr;
}

}  // namespace
}  // namespace specc

#define SPECC_TEXT_OF(x) #x
#define SPECC_TEXT(x) SPECC_TEXT_OF(x)

extern "C" {

const char specc_interface[] = "specc-interface:" SPECC_TEXT(SPECC_INTERFACE_VERSION);

int specc_interface_version(void) { return SPECC_INTERFACE_VERSION; }

const char* specc_error(void) { return specc::call_error.c_str(); }

int specc_call(const char* name, const SpeccValue* arguments, int64_t num_arguments,
               SpeccTensor* results, int64_t* num_results, SpeccAllocate allocate, void* context) {
  return specc::call_guarded([&] {
    specc::call(name, arguments, num_arguments, results, num_results, allocate, context);
  });
}

void specc_free(void* data) { std::free(data); }

const char* const* specc_operator_names(int64_t* count) {
  // never destroyed: a program may ask while it ends
  static const auto* const texts = [] {
    auto* made = new std::vector<std::string>;
    for (const std::string_view name : specc::operator_names()) made->emplace_back(name);
    return made;
  }();
  static const auto* const names = [] {
    auto* made = new std::vector<const char*>;
    for (const std::string& text : *texts) made->push_back(text.c_str());
    return made;
  }();
  *count = static_cast<int64_t>(names->size());
  return names->data();
}

const char* specc_operator_schema(const char* name) { return specc::schema_of(name); }

int specc_kernel_threads(void) { return specc::kernel_threads(); }

int specc_set_kernel_threads(int count) {
  return specc::call_guarded([&] {
    if (count < 0) specc::fail("0 threads or more, not " + std::to_string(count));
    specc::kernel_threads_override = count;
  });
}

float specc_sum_floats(const float* data, int64_t count, int threads) {
  return specc::sum_floats(data, count, threads);
}

int specc_int4_scales(
    const float* values, int64_t groups, int64_t width, int has_zeros, int threads, float* scales,
    float* zeros) {
  return specc::call_guarded([&] {
    if (width < 1 || width > 128)
      specc::fail("groups of 1 to 128 values, not " + std::to_string(width));
    specc::int4_scales(values, groups, width, has_zeros != 0, threads, scales, zeros);
  });
}

void specc_watch_memory(const void* data, size_t bytes) { specc::watch_memory(data, bytes); }

void specc_forget_memory(const void* data) { specc::forget_memory(data); }
}
