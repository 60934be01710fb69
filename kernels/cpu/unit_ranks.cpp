// Groups and links of ranks, as one translation unit (docs/design/cpu.md).
#include "ranks_functions.cpp"
#include "ranks_links.cpp"
#include "ranks_segment.cpp"
#include "ranks_shared.cpp"
#include "ranks_sockets.cpp"
