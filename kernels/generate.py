"""What C++ is told of the operators' table: `python -m specc.kernels.generate` writes it.

`kernels/cpu/declared.h` holds the type that each schema asks of a function, with which
`SPECC_OPERATOR` (kernels/cpu/operator.h) compares the function when it is compiled. A test says
when it is out of date.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specc.kernels import ops

PATH = Path(__file__).parent / "cpu" / "declared.h"
# type of a schema → its name in the header
_TYPES = {
    "Tensor": "T",
    "Optional[Tensor]": "O",
    "List[Tensor]": "Ts",
    "int": "int64_t",
    "List[int]": "Ints",
    "float": "double",
    "bool": "bool",
    "str": "Text",
}
_RESULTS = ("void", "One", "Two", "Three", "Four")
_WIDTH = 100
_BEGIN = """\
// What the functions of operators look like: made of kernels/operators by `python -m
// specc.kernels.generate`, compared by `SPECC_OPERATOR`.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "tensor.h"

namespace specc {

// Whether a function has the type that the schema of the operator with this name asks for. Names of
// other namespaces than specc have no schema here.
template <class Function>
consteval bool fits_schema(std::string_view name) {
  using T = const Tensor&;
  using O = const Tensor*;  // may be absent
  using Ts = std::span<const Tensor>;
  using Ints = std::span<const int64_t>;
  using Text = std::string_view;
  using One = Tensor;
  using Two = std::tuple<Tensor, Tensor>;
  using Three = std::tuple<Tensor, Tensor, Tensor>;
  using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
"""
_END = """\
  return !name.starts_with("specc::");
}

}  // namespace specc
"""


def declarations() -> str:
    """Content of the header: an entry for each operator, by name."""
    schemas = [getattr(ops, name)._schema for name in sorted(ops.OPERATORS)]
    return _BEGIN + "".join(map(_entry, schemas)) + _END


def _entry(schema: torch.FunctionSchema) -> str:
    first = f'  if (name == "{schema.name}")\n'
    arguments = ", ".join(_TYPES[str(argument.real_type)] for argument in schema.arguments)
    wanted = f"{_RESULTS[len(schema.returns)]}({arguments})"
    line, lines = "    return std::is_same_v<Function,", []
    for word in f"{wanted}>;".split(" "):
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "       "
        line += f" {word}"
    return first + "\n".join([*lines, line]) + "\n"


if __name__ == "__main__":
    PATH.write_text(declarations(), encoding="utf-8")
