"""The module of the process that compiles: it imports Inductor, and compiles in forks.

    python -m specc.passes.lower.inductor.worker program.json program.pt2

does so once.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specc.passes.lower.inductor.package import inductor_directory, lower
from specc.system.garbage import rare_collections

# what compiling a program imports, most of it at its first use
_MODULES = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp_wrapper_cpu_array_ref",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.cpu_vec_isa",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.package.package",
    "torch.export._trace",
)

with inductor_directory():
    for _name in _MODULES:
        importlib.import_module(_name)


def main(arguments: Sequence[str]) -> None:
    """Compile the program of the first file into the second one, in this process."""
    source, package = map(Path, arguments)
    _trust_instruction_sets()
    with rare_collections():
        lower(json.loads(source.read_text(encoding="utf-8")), package)


def _trust_instruction_sets() -> None:
    """Spare Inductor the trials that TORCHINDUCTOR_VEC_ISA_OK leaves: three files for g++.

    The processor has been asked before. That for AMX in half precision takes a newer compiler than
    the oldest that `find_compiler` accepts, and is made.
    """
    isas: Any = importlib.import_module("torch._inductor.cpu_vec_isa")
    build, unsure = isas.VecISA.check_build, getattr(isas.VecAMX, "_amx_fp16_code", None)

    def check_build(self: Any, code: str) -> bool:
        return code != unsure or build(self, code)

    isas.VecISA.check_build = check_build


if __name__ == "__main__":
    main(sys.argv[1:])
