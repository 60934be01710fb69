// The part of specc.h that is about programs and steps: specc_programs.h.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "call_guard.h"
#include "program.h"
#include "segments.h"
#include "specc_programs.h"
#include "step_runner.h"
#include "weight_stream.h"

using specc::call_guarded;

struct SpeccCode {
  std::shared_ptr<specc::Code> code;
};
struct SpeccPool {
  std::shared_ptr<specc::ArenaPool> pool;
};
struct SpeccProgram {
  std::shared_ptr<specc::Callee> callee;
  std::shared_ptr<specc::Program> program;  // null: of segments
};
struct SpeccResult {
  std::shared_ptr<specc::ArenaPool> pool;
  specc::HeldArena arena;
};
struct SpeccStep {
  specc::StepRunner runner;
};

namespace {

specc::Tensor tensor_of(const SpeccTensor* given) {
  specc::check(given != nullptr, "a tensor");
  specc::Tensor made;
  std::memcpy(static_cast<void*>(&made), given, sizeof made);
  return made;
}

void put(const specc::Tensor& tensor, SpeccTensor* out) {
  specc::check(out != nullptr, "room for a tensor");
  std::memcpy(out, static_cast<const void*>(&tensor), sizeof tensor);
}

// Memory of somebody else; null where it has no items.
std::span<const int64_t> items(const int64_t* given, int64_t count) {
  specc::check(count >= 0 && (count == 0 || given != nullptr), "a list of 0 items or more");
  return {given, static_cast<size_t>(count)};
}

std::vector<specc::Tensor> tensors(const SpeccTensor* given, int64_t count) {
  specc::check(count >= 0 && count <= 4096 && (count == 0 || given != nullptr), "0 tensors or more");
  std::vector<specc::Tensor> made;
  for (int64_t i = 0; i < count; ++i) made.push_back(tensor_of(given + i));
  return made;
}

const char* text(const char* given) {
  specc::check(given != nullptr, "a text");
  return given;
}

template <class Make>
auto made_by(const Make& make) -> decltype(make()) {
  decltype(make()) made = nullptr;
  call_guarded([&] { made = make(); });
  return made;
}

specc::Program& own_program(SpeccProgram* program) {
  specc::check(program->program != nullptr, "a program, no segments");
  return *program->program;
}

}  // namespace

extern "C" {

SpeccCode* specc_code_new(int64_t num_slots) {
  return made_by([&] { return new SpeccCode{std::make_shared<specc::Code>(num_slots)}; });
}
void specc_code_free(SpeccCode* code) { delete code; }
int specc_code_input(SpeccCode* code, int64_t slot) {
  return call_guarded([&] { code->code->input(slot); });
}
int specc_code_keep(SpeccCode* code, int64_t slot) {
  return call_guarded([&] { code->code->keep(slot); });
}
int specc_code_stage(SpeccCode* code) {
  return call_guarded([&] { code->code->begin_stage(); });
}
int specc_code_operator(SpeccCode* code, const char* name, int64_t first_result,
                        int64_t num_results, int is_static) {
  return call_guarded([&] {
    code->code->operator_call(text(name), first_result, num_results, is_static != 0);
  });
}
int specc_code_python(SpeccCode* code, int64_t id, const char* name, int64_t first_result,
                      int64_t num_results, int is_view, int is_static) {
  return call_guarded([&] {
    code->code->python_call(id, text(name), first_result, num_results, is_view != 0,
                            is_static != 0);
  });
}
int specc_code_size(SpeccCode* code, int64_t slot, int64_t dim, int64_t result) {
  return call_guarded([&] { code->code->size_of(slot, dim, result); });
}
int specc_code_arithmetic(SpeccCode* code, const char* sign, int64_t result) {
  return call_guarded([&] { code->code->arithmetic(text(sign), result); });
}
int specc_code_call(SpeccCode* code, SpeccProgram* program, int64_t result) {
  return call_guarded([&] { code->code->call(program->callee, result); });
}
int specc_code_slot(SpeccCode* code, int64_t slot) {
  return call_guarded([&] { code->code->slot(slot); });
}
int specc_code_none(SpeccCode* code) {
  return call_guarded([&] { code->code->literal({}); });
}
int specc_code_int(SpeccCode* code, int64_t value) {
  return call_guarded([&] {
    specc::Value made;
    made.kind = specc::Value::Kind::kInt;
    made.integer = value;
    code->code->literal(std::move(made));
  });
}
int specc_code_bool(SpeccCode* code, int value) {
  return call_guarded([&] {
    specc::Value made;
    made.kind = specc::Value::Kind::kBool;
    made.integer = value != 0;
    code->code->literal(std::move(made));
  });
}
int specc_code_real(SpeccCode* code, double value) {
  return call_guarded([&] {
    specc::Value made;
    made.kind = specc::Value::Kind::kReal;
    made.real = value;
    code->code->literal(std::move(made));
  });
}
int specc_code_text(SpeccCode* code, const char* value) {
  return call_guarded([&] {
    specc::Value made;
    made.kind = specc::Value::Kind::kText;
    made.text = text(value);
    code->code->literal(std::move(made));
  });
}
int specc_code_scalar(SpeccCode* code, const SpeccTensor* value) {
  return call_guarded([&] { code->code->scalar(tensor_of(value)); });
}
int specc_code_list(SpeccCode* code, int64_t count) {
  return call_guarded([&] { code->code->list(count); });
}
int specc_code_finish(SpeccCode* code) {
  return call_guarded([&] { code->code->finish(); });
}
int64_t specc_code_last_use(SpeccCode* code, int64_t slot) {
  int64_t last = -1;
  call_guarded([&] { last = code->code->last_use(slot); });
  return last;
}

void specc_set_python_call(int32_t (*call)(int64_t, int64_t, int64_t, int64_t*)) {
  specc::set_python_call(call);
}

SpeccPool* specc_pool_new(int64_t reserved) {
  return made_by([&] {
    specc::check(reserved >= 0, "0 bytes or more");
    return new SpeccPool{std::make_shared<specc::ArenaPool>(reserved)};
  });
}
void specc_pool_free(SpeccPool* pool) { delete pool; }
int specc_pool_counts(SpeccPool* pool, int64_t counts[4]) {
  return call_guarded([&] {
    const std::vector<int64_t> found = pool->pool->counts();
    std::copy(found.begin(), found.end(), counts);
  });
}
void specc_set_poison(int poisons) { specc::set_poison(poisons != 0); }

SpeccProgram* specc_program_new(SpeccCode* code, const int64_t* inputs, int64_t num_inputs,
                                int64_t result) {
  return made_by([&] {
    const auto given = items(inputs, num_inputs);
    auto made = std::make_shared<specc::Program>(
        code->code, std::vector<int64_t>(given.begin(), given.end()), result);
    return new SpeccProgram{made, made};
  });
}
SpeccProgram* specc_segments_new(SpeccProgram* const* segments, const int64_t* pieces,
                                 int64_t count, const void* stream, int takes_mass,
                                 int takes_states) {
  return made_by([&] {
    auto made = std::make_shared<specc::SegmentedProgram>(takes_mass != 0, takes_states != 0);
    if (stream != nullptr) made->set_stream(specc::stream_of(stream));
    const auto given = items(pieces, count);
    for (int64_t i = 0; i < count; ++i) made->add(segments[i]->callee, given[i]);
    return new SpeccProgram{made, nullptr};
  });
}
void specc_program_free(SpeccProgram* program) { delete program; }
int specc_program_bind(SpeccProgram* program, int64_t slot, const SpeccTensor* value) {
  return call_guarded([&] { own_program(program).bind(slot, tensor_of(value)); });
}
int specc_program_watch(SpeccProgram* program, const void* data, size_t bytes) {
  return call_guarded([&] { own_program(program).watch(data, bytes); });
}
int specc_program_flat(SpeccProgram* program, int takes_mass) {
  return call_guarded([&] { own_program(program).expect_flat_inputs(takes_mass != 0); });
}
int specc_program_states(SpeccProgram* program) {
  return call_guarded([&] { own_program(program).expect_states(); });
}
int specc_program_adapters(SpeccProgram* program) {
  return call_guarded([&] { own_program(program).expect_adapters(); });
}
int specc_program_hidden(SpeccProgram* program, const int64_t* sizes, int64_t dim, int32_t dtype) {
  return call_guarded([&] {
    const auto given = items(sizes, dim);
    own_program(program).expect_hidden({given.begin(), given.end()},
                                       static_cast<specc::Element>(dtype));
  });
}
int specc_program_limits(SpeccProgram* program, int64_t threads, int64_t narrow_rows,
                         int64_t reserve) {
  return call_guarded([&] {
    program->callee->set_num_threads(threads);
    if (program->program == nullptr) return;
    program->program->set_narrow_rows(narrow_rows);
    program->program->set_reserve(reserve);
  });
}
int64_t specc_program_threads(SpeccProgram* program) { return program->callee->num_threads(); }
SpeccResult* specc_program_run(SpeccProgram* program, SpeccPool* pool, const SpeccTensor* inputs,
                               int64_t num_inputs, SpeccTensor* made) {
  return made_by([&] {
    auto result = std::unique_ptr<SpeccResult>(
        new SpeccResult{pool->pool, specc::HeldArena(*pool->pool)});
    void* block = nullptr;
    put(program->callee->call(tensors(inputs, num_inputs), *result->arena, block), made);
    return result.release();
  });
}
void specc_result_free(SpeccResult* result) { delete result; }

SpeccStep* specc_step_new(SpeccCode* code, SpeccPool* pool) {
  return made_by([&] { return new SpeccStep{specc::StepRunner(code->code, pool->pool)}; });
}
void specc_step_free(SpeccStep* step) { delete step; }
int specc_step_set(SpeccStep* step, int64_t slot, const SpeccTensor* value) {
  return call_guarded([&] { step->runner.set(slot, tensor_of(value)); });
}
int specc_step_get(SpeccStep* step, int64_t slot, SpeccTensor* value) {
  return call_guarded([&] { put(step->runner.get(slot), value); });
}
int specc_step_run(SpeccStep* step, const SpeccTensor* inputs, int64_t num_inputs, int64_t first,
                   int64_t last) {
  return call_guarded([&] { step->runner.run(tensors(inputs, num_inputs), first, last); });
}
int specc_step_step(SpeccStep* step, const int64_t* rows, int64_t num_rows,
                    const SpeccTensor* block_table, const int64_t* results, int64_t num_results,
                    int64_t first, int64_t last, int stays) {
  return call_guarded([&] {
    step->runner.step(items(rows, num_rows), tensor_of(block_table), items(results, num_results),
                      first, last, stays != 0);
  });
}
int specc_step_steps(SpeccStep* step, const int64_t* rows, int64_t num_rows,
                     const SpeccTensor* block_table, const int64_t* results, int64_t num_results,
                     int64_t count, const int64_t* ends, int64_t num_ends) {
  return call_guarded([&] {
    const auto given = items(rows, num_rows);
    step->runner.steps({given.begin(), given.end()}, tensor_of(block_table),
                       items(results, num_results), count, items(ends, num_ends));
  });
}
int specc_step_end(SpeccStep* step) {
  return call_guarded([&] { step->runner.end(); });
}
const int64_t* specc_step_found(SpeccStep* step, int64_t* count) {
  *count = static_cast<int64_t>(step->runner.found().size());
  return step->runner.found().data();
}
const double* specc_step_seconds(SpeccStep* step, int64_t* count) {
  *count = static_cast<int64_t>(step->runner.seconds().size());
  return step->runner.seconds().data();
}
const double* specc_step_program_seconds(SpeccStep* step, int64_t* count) {
  *count = static_cast<int64_t>(step->runner.program_seconds().size());
  return step->runner.program_seconds().data();
}

}  // extern "C"
