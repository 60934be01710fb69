// All that includes torch's own C++ headers, as one translation unit: each of these sources would
// read them for longer than it takes to compile what it says itself (docs/cpu.md).
#include "programs.cpp"
#include "ranks_gloo.cpp"
#include "segments.cpp"
#include "weight_stream.cpp"
