// aten's operators, which round as they are written, as one translation unit (docs/design/cpu.md).
#include "aten_binary.cpp"
#include "aten_copies.cpp"
#include "aten_loops.cpp"
#include "aten_products.cpp"
#include "aten_reductions.cpp"
#include "aten_rows.cpp"
#include "aten_unary.cpp"
#include "aten_views.cpp"
