"""A compiled program that tells what a pass runs with.

`specc_probe::look` is an operator in Python: the program calls it in the thread and under the
settings of the pass, as it calls everything else. For 13 tokens it fails.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.artifact.weight_layout import blocks_shape
from specc.kernels import native, ops
from specc.runtime.backends.cpu.program import unpacked_package
from specc.system.cxx_compiler import compiler_version, find_compiler
from specc.system.file_cache import FileCache
from specc.system.machine import isa_flags

NUM_OUTPUTS, NUM_INPUTS = 256, 16
WEIGHT_SHAPE = blocks_shape((NUM_OUTPUTS, NUM_INPUTS), torch.float32)
UNLUCKY = 13
# (threads of the loops between kernels, threads of kernels) of each pass
SEEN: list[tuple[int, int]] = []

_LIBRARY = torch.library.Library("specc_probe", "DEF")


def _look(x: Tensor) -> Tensor:
    SEEN.append((torch.get_num_threads(), native.kernel_threads()))
    if x.numel() == UNLUCKY:
        raise ValueError(f"{UNLUCKY} tokens")
    return x.clone()


_LIBRARY.define("look(Tensor x) -> Tensor")
_LIBRARY.impl("look", _look, "CompositeExplicitAutograd")
torch.library.register_fake("specc_probe::look", torch.empty_like, lib=_LIBRARY)


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w0", torch.empty(WEIGHT_SHAPE))

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        projected = torch.ops.specc.linear(x, self.w0, None, NUM_OUTPUTS)
        return torch.ops.specc_probe.look(tokens)[:, None] + projected


def probe_content() -> bytes:
    """The compiled program: made once, and kept where specc keeps what it compiles."""
    compiler = find_compiler()
    parts = [torch.__version__, str(compiler_version(compiler)), *isa_flags()]
    parts += [str(native.C_SHIMS["linear"])]
    parts += [Path(path).read_text(encoding="utf-8") for path in (__file__, ops.__file__)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def make(scratch: Path) -> Path:
        _compile(scratch / "probe.pt2", scratch / "inductor")
        return scratch / "probe.pt2"

    return FileCache().obtain(f"probe/{key}.pt2", make)


def _compile(package: Path, directory: Path) -> None:
    """Compile as passes/lower/inductor/package.py compiles models."""
    import torch._inductor
    from torch.fx.experimental import _config as symbolic_shapes

    rows = {0: torch.export.Dim.DYNAMIC}
    inputs = torch.zeros(24, dtype=torch.int64), torch.zeros(24, NUM_INPUTS)
    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": {ops.linear: [native.C_SHIMS["linear"]]},
        "always_keep_tensor_constants": True,
        "aot_inductor.precompile_headers": False,
        "aot_inductor.check_lowerbound": False,
        "compile_threads": 1,
        "cpp.dynamic_threads": True,
        "cpp.vec_isa_ok": True,
    }
    with pytest.MonkeyPatch.context() as patch, symbolic_shapes.patch(backed_size_oblivious=True):
        # Inductor's usual directory is one for all processes
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
        exported = torch.export.export(_Probe(), inputs, dynamic_shapes=(rows, rows), strict=False)
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package), inductor_configs=options
        )


def load_probe(package: Path, weight: Tensor | None = None) -> Any:
    """The package with its weight bound; needs the native library loaded."""
    with unpacked_package(package) as path:
        program = torch.classes.specc.CpuProgram(path)
    program.bind_weights(["w0"], [torch.zeros(WEIGHT_SHAPE) if weight is None else weight])
    program.bind_caches([])
    return program


def probe_inputs(num_tokens: int) -> list[Tensor]:
    return [torch.arange(num_tokens), torch.zeros(num_tokens, NUM_INPUTS)]
