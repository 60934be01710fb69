"""Random instructions: refused or run, never a fault."""

import ctypes
import os
import random

import pytest
import torch

from specc.errors import EngineError
from specc.kernels import native
from specc.runtime.backends.cpu.native_calls import Pool, functions, made
from specc.runtime.backends.cpu.program import run_program
from tests.runtime.backends.cpu.instruction_code import Code, begun, poisoned


@pytest.fixture(autouse=True)
def library():
    with poisoned() as library:
        yield library


_NUMBERS = (0, 1, 2, 3, 5, 8, -1, -2, 64, 1 << 31, -(1 << 63), (1 << 63) - 1)
_TEXTS = (b"silu", b"gelu_tanh", b"floor", b"", b"x" * 300)


class _Wild:
    """Instructions that somebody wrote who wishes no good; some of them are instructions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._code = Code(40)
        self._next = 0
        for _ in range(4):
            self._code.input(self._next)
            self._next += 1
        self._code.stage()

    def write(self, names: list[str], count: int) -> int:
        """Returns the code, finished, and with a value that is kept."""
        for _ in range(count):
            self._instruction(self._random.choice(names))
        self._code.keep(self._next - 1)
        self._code.finish()
        return self._code.pointer

    def _instruction(self, name: str) -> None:
        kind = self._random.random()
        if kind < 0.15:
            self._code.size(self._slot(), self._random.choice((0, 1, 2, -1, 9)), self._next)
            self._next += 1
        elif kind < 0.3:
            self._code.arithmetic(self._random.choice((b"add", b"mul", b"floordiv")), self._next)
            self._next += 1
            self._argument()
            self._argument()
        else:
            num_results = self._random.choice((1, 1, 1, 2, 3))
            self._code.operator(name.encode(), self._next, num_results, 0)
            # as many as it takes: the library says how many that is
            for _ in range(_NUM_ARGUMENTS[name]):
                self._argument()
            self._next += num_results

    def _slot(self) -> int:
        return self._random.randrange(self._next)

    def _argument(self) -> None:
        kind = self._random.random()
        if kind < 0.6:
            self._code.slot(self._slot())
        elif kind < 0.7:
            self._code.none()
        elif kind < 0.85:
            self._code.int(self._random.choice(_NUMBERS))
        elif kind < 0.88:
            self._code.real(self._random.choice((0.5, -1.0, float("inf"), float("nan"))))
        elif kind < 0.9:
            self._code.text(self._random.choice(_TEXTS))
        elif kind < 0.93:
            self._code.bool(self._random.randrange(2))
        else:
            count = self._random.randrange(4)
            self._code.list(count)
            for _ in range(count):
                if self._random.random() < 0.5:
                    self._code.slot(self._slot())
                else:
                    self._code.int(self._random.choice(_NUMBERS))


_NUM_ARGUMENTS: dict[str, int] = {}


def _count_arguments(name: str) -> int:
    """How many an operator takes, as the library says when it is given none."""
    code = begun()
    code.operator(name.encode(), 1, 0, 0)
    try:
        code.finish()
    except EngineError as error:
        return int(error.found.split(" takes ")[1].split()[0])
    return 0


def test_wild_instructions_are_refused_or_run() -> None:
    """Never a fault: under `make sanitize`, too, with more of them."""
    names = [name for name in native.operator_names() if "rank" not in name]
    _NUM_ARGUMENTS.update({name: _count_arguments(name) for name in names})
    library, pool = functions(), Pool()
    results = {"refused": 0, "failed": 0, "ran": 0}
    for seed in range(int(os.environ.get("SPECC_WILD_PROGRAMS", "300"))):
        torch.manual_seed(seed)
        inputs = [
            torch.randn(3, 8), torch.randint(0, 8, (3,)), torch.randint(-2, 9, (4,)).int(),
            torch.randn(2, 4, 8).bfloat16(),
        ]  # fmt: skip
        wild = _Wild(seed)
        try:
            code = wild.write(names, 1 + seed % 4)
        except EngineError:
            results["refused"] += 1
            continue
        slots = (ctypes.c_int64 * 4)(*range(4))
        pointer = made(library.specc_program_new(code, slots, 4, wild._next - 1))
        try:
            run_program(pointer, pool, inputs)
            results["ran"] += 1
        except RuntimeError:
            results["failed"] += 1
        finally:
            library.specc_program_free(pointer)
    assert results["failed"] > 20
    assert results["ran"] > 2
