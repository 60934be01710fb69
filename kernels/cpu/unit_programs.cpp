// Programs and steps, and the interface to them, as one translation unit (docs/design/cpu.md).
#include "arena.cpp"
#include "frame.cpp"
#include "instructions.cpp"
#include "program.cpp"
#include "program_calls.cpp"
#include "segments.cpp"
#include "step_runner.cpp"
