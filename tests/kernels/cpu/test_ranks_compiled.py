"""A compiled program with a collective in it: `linear`, then the sum over ranks, then `add`."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.artifact.weight_layout import blocks_shape, to_blocks
from specc.kernels import native, ops
from specc.kernels.ranks import rank_error
from specc.passes.lower.inductor import package
from specc.runtime.backends.cpu.program import unpacked_package
from specc.runtime.ranks.group import SharedGroup
from specc.system.cxx_compiler import compiler_version, find_compiler
from specc.system.file_cache import FileCache
from specc.system.machine import isa_flags
from tests.rank_processes import rank_processes, run_ranks

NUM_OUTPUTS, NUM_INPUTS = 96, 40
SHAPE = blocks_shape((NUM_OUTPUTS, NUM_INPUTS), torch.float32)


class Layer(nn.Module):
    """What a cut feed-forward layer ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.w0 = nn.Parameter(torch.empty(SHAPE), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        partial = torch.ops.specc.linear(x, self.w0, None, NUM_OUTPUTS)
        return residual + torch.ops.specc.all_reduce(partial)


def compile_layer(path: Path, directory: Path) -> None:
    import torch._inductor
    from torch.fx.experimental import _config as symbolic_shapes

    rows = {0: torch.export.Dim.DYNAMIC}
    inputs = torch.zeros(24, NUM_INPUTS), torch.zeros(24, NUM_OUTPUTS)
    with pytest.MonkeyPatch.context() as patch, symbolic_shapes.patch(backed_size_oblivious=True):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
        exported = torch.export.export(Layer(), inputs, dynamic_shapes=(rows, rows), strict=False)
        options = package.inductor_options(exported.graph)
        # no pool of processes for one program, and no trial of each instruction set
        options |= {"compile_threads": 1, "cpp.vec_isa_ok": True}
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs=options
        )


@pytest.fixture(scope="module")
def compiled(native_operators, tmp_path_factory) -> Path:
    """The package: made in a process without a group, and kept where specc keeps such things."""
    parts = [torch.__version__, str(compiler_version(find_compiler())), *isa_flags()]
    parts += [Path(path).read_text(encoding="utf-8") for path in (__file__, ops.__file__)]
    parts += [str(sorted(native.C_SHIMS.items())), Path(package.__file__).read_text("utf-8")]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def make(scratch: Path) -> Path:
        compile_layer(scratch / "layer.pt2", scratch / "inductor")
        return scratch / "layer.pt2"

    path = tmp_path_factory.mktemp("layer") / "layer.pt2"
    path.write_bytes(FileCache().obtain(f"probe/ranks-{key}.pt2", make))
    return path


def weight_of(rank: int) -> Tensor:
    return torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(rank))


def load(path: Path, rank: int) -> Any:
    with unpacked_package(path) as unpacked:
        program = torch.classes.specc.CpuProgram(unpacked)
    program.bind_weights(["w0"], [to_blocks(weight_of(rank))])
    program.bind_caches([])
    return program


def run_layer(group: SharedGroup, path: Path) -> tuple[float, list[bytes]]:
    """Largest error beside the whole sum, and the bits of each result."""
    program = load(path, group.rank)
    error, results = 0.0, []
    for tokens in (1, 2, 7, 300):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, NUM_INPUTS, generator=generator)
        residual = torch.randn(tokens, NUM_OUTPUTS, generator=generator)
        got = program.run([x, residual])
        whole = sum(x @ weight_of(rank).T for rank in range(group.size))
        error = max(error, float((got - residual - whole).abs().max()))
        results.append(got.numpy().tobytes())
    assert group.position == 4
    return error, results


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_program_adds_up_over_ranks(compiled, num_ranks):
    answers = run_ranks(num_ranks, run_layer, compiled)
    for error, results in answers:
        assert error < 1e-4
        assert results == answers[0][1]


def lose_a_rank(group: SharedGroup, path: Path) -> str:
    program = load(path, group.rank)
    inputs = [torch.ones(1, NUM_INPUTS), torch.ones(1, NUM_OUTPUTS)]
    program.run(inputs)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        program.run(inputs)
    assert time.monotonic() - begin < 20
    return str(caught.value)


def test_what_a_program_says_when_a_rank_is_lost(compiled):
    """The text comes through code that passes on a number."""
    with rank_processes(2, lose_a_rank, compiled, time_limit=4.0) as ranks:
        error = rank_error(RuntimeError(ranks.result(0)))
    assert error is not None
    assert "rank 1 (pid" in error.found
    assert "not at all_reduce of float32 [1, 96] (collective 2)" in error.found
    assert error.do == "see what became of it; give ranks more time if it is only slow"


def test_a_program_without_a_group(compiled):
    program = load(compiled, 0)
    with pytest.raises(RuntimeError, match="found:  a collective in a process that is no rank"):
        program.run([torch.ones(1, NUM_INPUTS), torch.ones(1, NUM_OUTPUTS)])
