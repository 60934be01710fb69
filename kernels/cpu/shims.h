// What every C function that AOTInductor's code calls does with an exception.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdio>
#include <exception>

#include "failure.h"

namespace specc {

// AOTInductor's code reads a code, not an exception.
template <typename F>
AOTITorchError guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    if (failure_text != nullptr)
      *failure_text = error.what();
    else
      std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace specc
