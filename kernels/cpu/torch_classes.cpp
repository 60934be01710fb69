// All that includes torch's own C++ headers, as one translation unit: each of these sources would
// read them for longer than it takes to compile what it says itself (docs/cpu.md).
#include "compiled_program.cpp"
#include "register_classes.cpp"
#include "segments.cpp"
#include "step_runner.cpp"
