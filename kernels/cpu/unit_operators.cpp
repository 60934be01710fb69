// All operators of tensors whose kernels have files of their own, as one translation unit.
#include "attend_expanded.cpp"
#include "attention_operators.cpp"
#include "linear_operators.cpp"
#include "quantized_operators.cpp"
#include "ranks_operators.cpp"
#include "sampling_operators.cpp"
#include "step_operators.cpp"
#include "tree_operators.cpp"
