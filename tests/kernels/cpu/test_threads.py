"""Threads that passes see: alone, inside a step, in other threads, and after an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from specc.errors import EngineError
from specc.kernels import native
from specc.runtime.backends.cpu.encoder import Encoder
from specc.runtime.backends.cpu.step import NativeStep
from tests.kernels.probe import SEEN, UNLUCKY, load_probe, probe_inputs

LOADED = 3  # threads when the program is loaded; each test runs with one
NARROW = 64


def expected(num_tokens: int) -> tuple[int, int]:
    """Threads of the loops and of the kernels."""
    return (1 if num_tokens <= NARROW else LOADED), LOADED


@pytest.fixture
def program(native_operators) -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(LOADED)
    program = load_probe()
    torch.set_num_threads(1)
    yield program
    torch.set_num_threads(before)


class Step:
    """A pass, an operator after it, and a second stage with another pass."""

    def __init__(self, program: Any) -> None:
        self._program = program
        graph = fx.Graph()
        self._encoder = encoder = Encoder(8)
        inputs = [graph.placeholder(f"x{i}") for i in range(4)]
        for node in inputs:
            encoder.slots[node] = encoder.input()
        for first in (0, 2):
            encoder.stage()
            both = inputs[first : first + 2]
            encoder.call(graph.call_module("program", tuple(both)), program.pointer)
            encoder.function(graph.call_function(torch.ops.specc_probe.look.default, (both[0],)))
        encoder.finish()
        made = SimpleNamespace(code=encoder.code, host_slots=[])
        self.native = NativeStep(made, program.pool)  # type: ignore[arg-type]

    def run(self, first: int, second: int) -> list[tuple[int, int]]:
        """What the two passes saw."""
        SEEN.clear()
        inputs: list[Tensor] = [*probe_inputs(first), *probe_inputs(second)]
        self.native.run(inputs, 0, 2)
        return [SEEN[0], SEEN[2]]


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("where", [lambda f: f(), in_thread], ids=["here", "thread"])
@pytest.mark.parametrize("num_tokens", [1, NARROW, NARROW + 1, 200])
def test_a_pass(program, num_tokens, where):
    def run() -> tuple[Any, ...]:
        before = native.kernel_threads()
        SEEN.clear()
        program(*probe_inputs(num_tokens))
        return SEEN[0], before == native.kernel_threads()

    assert where(run) == (expected(num_tokens), True)


@pytest.mark.parametrize("where", [lambda f: f(), in_thread], ids=["here", "thread"])
@pytest.mark.parametrize(("first", "second"), [(2, 200), (200, 2), (64, 65), (65, 64), (200, 200)])
def test_passes_inside_a_step(program, first, second, where):
    """A wide pass uses all threads for its loops, whatever the passes around it are."""
    step = Step(program)

    def run() -> tuple[Any, ...]:
        before = native.kernel_threads()
        return step.run(first, second), before == native.kernel_threads()

    assert where(run) == ([expected(first), expected(second)], True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [(UNLUCKY, 200), (200, UNLUCKY)], ids=["first", "second"])
def test_threads_after_a_stage_that_failed(program, tokens, threads):
    torch.set_num_threads(threads)
    step = Step(program)
    with pytest.raises((RuntimeError, ValueError), match=f"{UNLUCKY} tokens"):
        step.run(*tokens)
    assert (torch.get_num_threads(), native.kernel_threads()) == (threads, threads)
    assert step.run(2, 200) == [expected(2), expected(200)]
    assert (torch.get_num_threads(), native.kernel_threads()) == (threads, threads)


def test_the_number_can_be_set(program):
    assert program.num_threads == LOADED
    program.set_num_threads(2)
    assert program.num_threads == 2
    assert Step(program).run(2, 200) == [(1, 2), (2, 2)]
    for wrong in (0, -1, 2**40):
        with pytest.raises(EngineError, match=f"1 thread or more, not {wrong}"):
            program.set_num_threads(wrong)


def test_how_many_rows_are_narrow_can_be_set(program):
    program.set_narrow_rows(4)
    assert Step(program).run(4, 5) == [(1, LOADED), (LOADED, LOADED)]
    for wrong in (0, -1):
        with pytest.raises(EngineError, match=f"1 row or more, not {wrong}"):
            program.set_narrow_rows(wrong)


def test_a_kernel_that_refuses_says_why(program, capfd):
    tokens, x = probe_inputs(4)
    with pytest.raises(
        RuntimeError, match="specc: the blocks are those of all outputs and columns"
    ):
        program(tokens, x[:, :-1])
    assert "specc:" not in capfd.readouterr().err
    with pytest.raises((RuntimeError, ValueError), match=f"{UNLUCKY} tokens"):
        program(*probe_inputs(UNLUCKY))
    assert program(*probe_inputs(4)).shape == (4, 256)
