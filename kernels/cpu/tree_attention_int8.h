// specc::tree_attention over caches of int8, which is compiled by itself.
#pragma once

#include "kernels.h"

namespace specc::attention {

void tree_attention_int8(const TreeAttention& a, int num_threads);

}  // namespace specc::attention
