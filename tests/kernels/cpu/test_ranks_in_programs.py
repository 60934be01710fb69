"""A program with a collective in it: `linear`, then the sum over ranks, then `add`."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import Tensor, fx

from specc.artifact.weight_layout import to_blocks
from specc.kernels import native, ops
from specc.kernels.ranks import rank_error
from specc.runtime.ranks.group import SharedGroup
from tests.native_library import load_native
from tests.rank_processes import rank_processes, run_ranks
from tests.runtime.backends.cpu.plain_program import PlainProgram

NUM_OUTPUTS, NUM_INPUTS = 96, 40


@pytest.fixture(autouse=True)
def library() -> None:
    """Processes are forked with it."""
    load_native()


def layer(weight: Tensor) -> PlainProgram:
    """What a cut feed-forward layer ends with."""
    graph = fx.Graph()
    x, residual, w0 = (graph.placeholder(name) for name in ("x", "residual", "w0"))
    partial = graph.call_function(ops.linear, (x, w0, None, NUM_OUTPUTS))
    whole = graph.call_function(ops.all_reduce, (partial,))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (residual, whole)))
    return PlainProgram(graph, bound={"w0": weight})


def weight_of(rank: int) -> Tensor:
    return torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(rank))


def load(rank: int) -> PlainProgram:
    native.load()
    return layer(to_blocks(weight_of(rank)))


def run_layer(group: SharedGroup) -> tuple[float, list[bytes]]:
    """Largest error beside the whole sum, and the bits of each result."""
    program = load(group.rank)
    error, results = 0.0, []
    for tokens in (1, 2, 7, 300):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, NUM_INPUTS, generator=generator)
        residual = torch.randn(tokens, NUM_OUTPUTS, generator=generator)
        got = program(x, residual)
        whole = sum(x @ weight_of(rank).T for rank in range(group.size))
        error = max(error, float((got - residual - whole).abs().max()))
        results.append(got.numpy().tobytes())
    assert group.position == 4
    return error, results


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_program_adds_up_over_ranks(num_ranks):
    answers = run_ranks(num_ranks, run_layer)
    for error, results in answers:
        assert error < 1e-4
        assert results == answers[0][1]


def lose_a_rank(group: SharedGroup) -> str:
    program = load(group.rank)
    inputs = [torch.ones(1, NUM_INPUTS), torch.ones(1, NUM_OUTPUTS)]
    program(*inputs)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        program(*inputs)
    assert time.monotonic() - begin < 20
    return str(caught.value)


def test_what_a_program_says_when_a_rank_is_lost():
    with rank_processes(2, lose_a_rank, time_limit=2.0) as ranks:
        error = rank_error(RuntimeError(ranks.result(0)))
    assert error is not None
    assert "rank 1 (pid" in error.found
    assert "not at all_reduce of float32 [1, 96] (collective 2)" in error.found
    assert error.do == "see what became of it; give ranks more time if it is only slow"


def test_a_program_without_a_group():
    program = load(0)
    with pytest.raises(RuntimeError, match="found:  a collective in a process that is no rank"):
        program(torch.ones(1, NUM_INPUTS), torch.ones(1, NUM_OUTPUTS))
