/* The interface of specc's CPU library, in plain C: for C and C++ programs (examples/decode.cpp) and
 * for Python's ctypes (kernels/native.py). No torch is needed, and none is loaded.
 *
 * Functions may be called by any thread. One that returns `int` returns 0, or -1 where it failed;
 * the sentence that says why is `specc_error()`, of the calling thread.
 *
 * Structures grow only with SPECC_INTERFACE_VERSION.
 */
#ifndef SPECC_H
#define SPECC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPECC_EXPORT __attribute__((visibility("default")))

/* Compare with `specc_interface_version()`: a program and a library of different versions do not
 * fit. It changes whenever a structure, a function or an operator's arguments do. */
#define SPECC_INTERFACE_VERSION 1
SPECC_EXPORT int specc_interface_version(void);
/* The same as text, for whoever compares messages: "specc-interface:1". */
SPECC_EXPORT extern const char specc_interface[];

/* Why the last function of this thread that failed did; valid until the next one fails. */
SPECC_EXPORT const char* specc_error(void);

/* ---- Tensors and values ------------------------------------------------------------------- */

#define SPECC_MOST_DIMS 8
#define SPECC_MOST_RESULTS 4

/* Types of elements: the numbers of torch's ScalarType. */
enum {
  SPECC_UINT8 = 0,
  SPECC_INT8 = 1,
  SPECC_INT16 = 2,
  SPECC_INT32 = 3,
  SPECC_INT64 = 4,
  SPECC_FLOAT16 = 5,
  SPECC_FLOAT32 = 6,
  SPECC_FLOAT64 = 7,
  SPECC_COMPLEX64 = 9,
  SPECC_BOOL = 11,
  SPECC_BFLOAT16 = 15,
  SPECC_FLOAT8_E4M3FN = 24,
  SPECC_FLOAT8_E8M0FNU = 44
};

/* Memory of the caller, and how elements lie in it. */
typedef struct SpeccTensor {
  void* data;
  int32_t dtype;
  int32_t dim;                      /* 0 … SPECC_MOST_DIMS; what is beyond is not read */
  int64_t sizes[SPECC_MOST_DIMS];   /* 0 or more */
  int64_t strides[SPECC_MOST_DIMS]; /* in elements, 0 or more */
  int64_t bytes;                    /* that may be read and written from `data` on */
} SpeccTensor;

enum {
  SPECC_VALUE_NONE = 0,    /* a tensor or a number that is absent */
  SPECC_VALUE_TENSOR = 1,  /* `items` points to a SpeccTensor */
  SPECC_VALUE_INT = 2,     /* `integer` */
  SPECC_VALUE_REAL = 3,    /* `real` */
  SPECC_VALUE_BOOL = 4,    /* `integer`: 0 or 1 */
  SPECC_VALUE_TEXT = 5,    /* `items` points to `integer` bytes of UTF-8 */
  SPECC_VALUE_INTS = 6,    /* `items` points to `integer` of int64_t */
  SPECC_VALUE_REALS = 7,   /* … of double */
  SPECC_VALUE_TENSORS = 8  /* … of SpeccTensor */
};

/* An argument. The library reads what `items` points to during the call only. */
typedef struct SpeccValue {
  int64_t kind;
  int64_t integer;
  double real;
  const void* items;
} SpeccValue;

/* ---- Operators ---------------------------------------------------------------------------- */

/* Gives a result its memory: so many bytes (1 or more), aligned to 64; null where there is none. */
typedef void* (*SpeccAllocate)(void* context, int64_t bytes);

/* Call one operator, such as "specc::linear".
 *
 * arguments: all of its schema (below), in that order, defaults filled in.
 * results: room for SPECC_MOST_RESULTS; *num_results says how many the operator has. A result lies in
 *   memory of `allocate`, or, of a view, in that of an argument.
 * allocate: null takes memory that the caller gives back by `specc_free`.
 */
SPECC_EXPORT int specc_call(const char* name, const SpeccValue* arguments, int64_t num_arguments,
                            SpeccTensor* results, int64_t* num_results, SpeccAllocate allocate,
                            void* context);
SPECC_EXPORT void specc_free(void* data);

/* Names of all operators, sorted; they stay valid. */
SPECC_EXPORT const char* const* specc_operator_names(int64_t* count);

/* What an operator takes and returns, as torch writes it: "aten::amax(Tensor self, int[1] dim=[],
 * bool keepdim=False) -> Tensor". Null where there is no such operator. It stays valid. */
SPECC_EXPORT const char* specc_operator_schema(const char* name);

/* ---- Threads ------------------------------------------------------------------------------ */

/* How many a kernel uses that the calling thread calls: what was set, or else what OpenMP says. */
SPECC_EXPORT int specc_kernel_threads(void);
/* Set it for kernels that the calling thread calls; 0 is what OpenMP says. */
SPECC_EXPORT int specc_set_kernel_threads(int count);

/* ---- Memory ------------------------------------------------------------------------------- */

/* Sum of `count` numbers with so many threads: the yardstick of what is bound by reading memory. */
SPECC_EXPORT float specc_sum_floats(const float* data, int64_t count, int threads);

/* ---- Rounding ----------------------------------------------------------------------------- */

/* Scales and zero points [groups] of 4-bit levels that leave the least squared error of values
   [groups, width], width up to 128; zero points are 8 where has_zeros is 0. */
SPECC_EXPORT int specc_int4_scales(
    const float* values, int64_t groups, int64_t width, int has_zeros, int threads, float* scales,
    float* zeros);

/* Until it is forgotten, a fault in this memory says that the file it maps was cut. */
SPECC_EXPORT void specc_watch_memory(const void* data, size_t bytes);
SPECC_EXPORT void specc_forget_memory(const void* data);

#ifdef __cplusplus
}
#endif

#endif
