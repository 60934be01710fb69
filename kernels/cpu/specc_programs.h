/* Programs and steps of an engine, in plain C: what specc.h has for operators. Instructions are given
 * one by one, checked by `specc_code_finish`, and run in memory that an arena keeps. */
#ifndef SPECC_PROGRAMS_H
#define SPECC_PROGRAMS_H

#include "specc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Instructions ------------------------------------------------------------------------- */

typedef struct SpeccCode SpeccCode;
typedef struct SpeccPool SpeccPool;
typedef struct SpeccProgram SpeccProgram;
typedef struct SpeccResult SpeccResult;
typedef struct SpeccStep SpeccStep;

/* Values 0 … num_slots - 1; null where that fails. */
SPECC_EXPORT SpeccCode* specc_code_new(int64_t num_slots);
SPECC_EXPORT void specc_code_free(SpeccCode* code);
/* A value that is set from outside. */
SPECC_EXPORT int specc_code_input(SpeccCode* code, int64_t slot);
/* A value that is needed until the end. */
SPECC_EXPORT int specc_code_keep(SpeccCode* code, int64_t slot);
SPECC_EXPORT int specc_code_stage(SpeccCode* code);
/* An operator, "specc::linear" or "aten::add.Tensor"; arguments follow, all of its schema, in that
 * order. is_static: it depends on the batch size alone, and keeps its results while that stays. */
SPECC_EXPORT int specc_code_operator(SpeccCode* code, const char* name, int64_t first_result,
                                     int64_t num_results, int is_static);
/* What `specc_set_python_call` set; its arguments are the values that it reads. */
SPECC_EXPORT int specc_code_python(SpeccCode* code, int64_t id, const char* name,
                                   int64_t first_result, int64_t num_results, int is_view,
                                   int is_static);
SPECC_EXPORT int specc_code_size(SpeccCode* code, int64_t slot, int64_t dim, int64_t result);
/* sign: add, sub, mul, floordiv, mod, neg, le, lt, ge, gt, eq, max, min. */
SPECC_EXPORT int specc_code_arithmetic(SpeccCode* code, const char* sign, int64_t result);
SPECC_EXPORT int specc_code_call(SpeccCode* code, SpeccProgram* program, int64_t result);
/* Arguments of the last instruction. After `specc_code_list` the next `count` are its items. */
SPECC_EXPORT int specc_code_slot(SpeccCode* code, int64_t slot);
SPECC_EXPORT int specc_code_none(SpeccCode* code);
SPECC_EXPORT int specc_code_int(SpeccCode* code, int64_t value);
SPECC_EXPORT int specc_code_bool(SpeccCode* code, int value);
SPECC_EXPORT int specc_code_real(SpeccCode* code, double value);
SPECC_EXPORT int specc_code_text(SpeccCode* code, const char* value);
/* A tensor of no dimensions, which is copied. */
SPECC_EXPORT int specc_code_scalar(SpeccCode* code, const SpeccTensor* value);
SPECC_EXPORT int specc_code_list(SpeccCode* code, int64_t count);
/* Checks everything, once: what fails here never runs. */
SPECC_EXPORT int specc_code_finish(SpeccCode* code);
/* The last instruction that reads a value or a view of it; -1 where nobody does. For tests. */
SPECC_EXPORT int64_t specc_code_last_use(SpeccCode* code, int64_t slot);

/* What runs calls of Python: see frame.h. */
SPECC_EXPORT void specc_set_python_call(int32_t (*call)(int64_t id, int64_t count,
                                                        int64_t num_results, int64_t* message));

/* ---- Memory ------------------------------------------------------------------------------- */

/* Memory of the programs of an engine; each that is in progress has `reserved` bytes to begin with,
 * of which pages that nobody touches cost nothing. */
SPECC_EXPORT SpeccPool* specc_pool_new(int64_t reserved);
SPECC_EXPORT void specc_pool_free(SpeccPool* pool);
/* Of what nobody uses now: arenas, their bytes, the most bytes one of them held at a time, and how
 * often memory was taken from the system. */
SPECC_EXPORT int specc_pool_counts(SpeccPool* pool, int64_t counts[4]);
/* Whether memory that is free is filled with what no value is. */
SPECC_EXPORT void specc_set_poison(int poisons);

/* ---- Models ------------------------------------------------------------------------------- */

/* A model, or a segment of one. inputs: values that a call gives, in that order. */
SPECC_EXPORT SpeccProgram* specc_program_new(SpeccCode* code, const int64_t* inputs,
                                             int64_t num_inputs, int64_t result);
/* Segments, each on what the one before it returns. stream: of specc_stream_open, or null; piece of each: of the stream
 * that its weights lie in, or -1. */
SPECC_EXPORT SpeccProgram* specc_segments_new(SpeccProgram* const* segments, const int64_t* pieces,
                                              int64_t count, const void* stream, int takes_mass,
                                              int takes_states);
SPECC_EXPORT void specc_program_free(SpeccProgram* program);
/* Weights, caches: the memory has to outlive the program. */
SPECC_EXPORT int specc_program_bind(SpeccProgram* program, int64_t slot, const SpeccTensor* value);
SPECC_EXPORT int specc_program_watch(SpeccProgram* program, const void* data, size_t bytes);
SPECC_EXPORT int specc_program_flat(SpeccProgram* program, int takes_mass);
/* It takes one more input after the first eight: int32 [B, 2], the place of each sequence in the
 * states that it keeps, and how many of its nodes are committed in any case. */
SPECC_EXPORT int specc_program_states(SpeccProgram* program);
/* It takes one more input after those: int32 [Nt, 1], the adapter of each token, -1 for none; where it
 * is left out, no token has one. */
SPECC_EXPORT int specc_program_adapters(SpeccProgram* program);
SPECC_EXPORT int specc_program_hidden(SpeccProgram* program, const int64_t* sizes, int64_t dim,
                                      int32_t dtype);
/* Threads of a pass; rows up to which it is narrow (program.h); bytes that its values may take. */
SPECC_EXPORT int specc_program_limits(SpeccProgram* program, int64_t threads, int64_t narrow_rows,
                                      int64_t reserve);
SPECC_EXPORT int64_t specc_program_threads(SpeccProgram* program);
/* Runs it; *made describes the result, which stays until `specc_result_free`. */
SPECC_EXPORT SpeccResult* specc_program_run(SpeccProgram* program, SpeccPool* pool,
                                            const SpeccTensor* inputs, int64_t num_inputs,
                                            SpeccTensor* made);
SPECC_EXPORT void specc_result_free(SpeccResult* result);

/* ---- Steps -------------------------------------------------------------------------------- */

SPECC_EXPORT SpeccStep* specc_step_new(SpeccCode* code, SpeccPool* pool);
SPECC_EXPORT void specc_step_free(SpeccStep* step);
/* A value from outside; its memory has to outlive the step. */
SPECC_EXPORT int specc_step_set(SpeccStep* step, int64_t slot, const SpeccTensor* value);
SPECC_EXPORT int specc_step_get(SpeccStep* step, int64_t slot, SpeccTensor* value);
SPECC_EXPORT int specc_step_run(SpeccStep* step, const SpeccTensor* inputs, int64_t num_inputs,
                                int64_t first, int64_t last);
/* Stages first … last - 1; see step_runner.h. */
SPECC_EXPORT int specc_step_step(SpeccStep* step, const int64_t* rows, int64_t num_rows,
                                 const SpeccTensor* block_table, const int64_t* results,
                                 int64_t num_results, int64_t first, int64_t last, int stays);
SPECC_EXPORT int specc_step_steps(SpeccStep* step, const int64_t* rows, int64_t num_rows,
                                  const SpeccTensor* block_table, const int64_t* results,
                                  int64_t num_results, int64_t count, const int64_t* ends,
                                  int64_t num_ends);
/* Values of a step that stayed are gone. */
SPECC_EXPORT int specc_step_end(SpeccStep* step);
/* What the last steps found: integers, seconds of each stage of each step, and seconds in programs
 * of each stage of the last one. Until the next call. */
SPECC_EXPORT const int64_t* specc_step_found(SpeccStep* step, int64_t* count);
SPECC_EXPORT const double* specc_step_seconds(SpeccStep* step, int64_t* count);
SPECC_EXPORT const double* specc_step_program_seconds(SpeccStep* step, int64_t* count);

#ifdef __cplusplus
}
#endif

#endif
