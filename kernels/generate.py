"""What C++ is told of the operators' table: `python -m specc.kernels.generate` writes it.

`kernels/cpu/declared.h` holds the type that each schema asks of a function, with which
`SPECC_OPERATOR` (kernels/cpu/operator.h) compares the function when it is compiled, and the schemas
themselves, also of those of torch's operators that have a kernel: programs without torch ask for
them, to fill in defaults. A test says when it is out of date.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch

from specc.kernels import ops

SOURCES = Path(__file__).parent / "cpu"
PATH = SOURCES / "declared.h"
_OF_TORCH = re.compile(r'"(aten::[\w.]+)"')
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
// What operators and their functions look like: made of kernels/operators, and of torch's registry,
// by `python -m specc.kernels.generate`.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "tensor.h"

namespace specc {

// Whether a function has the type that the schema of the operator with this name asks for, which
// `SPECC_OPERATOR` asks. Names of other namespaces than specc are not compared.
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
_MIDDLE = """\
  return !name.starts_with("specc::");
}

// All schemas, also of torch's operators that have a kernel, sorted by what stands before (.
constexpr const char* kSchemas[] = {
"""
_END = """\
};

}  // namespace specc
"""


def declarations() -> str:
    """Content of the header: an entry for each operator, by name; then the schemas."""
    own = [getattr(ops, name)._schema for name in sorted(ops.OPERATORS)]
    texts = sorted([*map(str, own), *_of_torch()], key=lambda text: text.partition("(")[0])
    return _BEGIN + "".join(map(_entry, own)) + _MIDDLE + "".join(map(_text, texts)) + _END


def _of_torch() -> list[str]:
    """Schemas of torch's operators that the sources of the library name."""
    sources = [path.read_text(encoding="utf-8") for path in SOURCES.glob("*.cpp")]
    names = {name for source in sources for name in _OF_TORCH.findall(source)}
    split = (name.partition(".") for name in names)
    return [str(torch._C._get_schema(packet, overload)) for packet, _, overload in split]


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


def _text(schema: str) -> str:
    """A literal, in as many lines as it takes."""
    escaped = schema.replace("\\", "\\\\").replace('"', '\\"')
    # quotes, a comma and the indentation
    lines = textwrap.wrap(escaped, _WIDTH - 12, break_on_hyphens=False, break_long_words=False)
    return "    " + "\n        ".join(f'"{line} "' for line in lines)[:-2] + '",\n'


if __name__ == "__main__":
    PATH.write_text(declarations(), encoding="utf-8")
