// Kernels that stand for several operators, which round as they are written, as one translation unit
// (docs/design/cpu.md).
#include "block_conv.cpp"
#include "gates.cpp"
#include "hadamard.cpp"
#include "lora.cpp"
#include "norms.cpp"
#include "rotary.cpp"
#include "tree_conv.cpp"
#include "tree_recurrence.cpp"
