// All that binds kernels to operators, as one translation unit: torch's stable interface takes
// longer to read than each of these sources to compile (docs/cpu.md).
#include "attend_expanded.cpp"
#include "quantized_operators.cpp"
#include "ranks_operators.cpp"
#include "register.cpp"
#include "sampling_operators.cpp"
#include "slab_row_operators.cpp"
#include "step_operators.cpp"
#include "tree_operators.cpp"
