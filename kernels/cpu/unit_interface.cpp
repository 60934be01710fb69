// The library's interface and its registry of operators, as one translation unit
// (docs/design/cpu.md).
#include "calls.cpp"
#include "operator.cpp"
