"""As test_hostile.py, for aten's operators in C++: graphs name them with whatever arguments.

Good calls are those that test_aten.py makes; here they are spoiled.
"""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels import native, native_calls
from tests.kernels.cpu import test_aten
from tests.kernels.cpu.hostile_calls import spoil
from tests.kernels.cpu.test_hostile import NUM_CALLS, expect_clean

CHECKS = ("unary", "binary", "choices", "copies", "views", "rows", "reductions", "products")
MOST_BYTES = 16 << 20
# a program may ask for as much as it likes: what it gets is the runner's business
NO_MEMORY = "specc: no memory for a result"
Call = tuple[str, tuple[Any, ...]]


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results above 16 MiB get none: sizes are hostile, and this machine is to live."""

    def empty(size: Any, **options: Any) -> Tensor:
        if isinstance(size, int) and size > MOST_BYTES:
            raise MemoryError
        return torch.empty(size, **options)

    patched = types.ModuleType("torch")
    patched.__dict__.update(torch.__dict__)
    patched.__dict__["empty"] = empty
    monkeypatch.setattr(native_calls, "torch", patched)


def recorded(check: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that a test of values makes."""
    found: list[Call] = []

    def call(name: str, *arguments: Any) -> Any:
        found.append((name, arguments))
        return native.call(name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(test_aten, "call", call)
        getattr(test_aten, check)(test_aten.Draw(seed))
    return found


@pytest.mark.usefixtures("native_operators", "little_memory")
@pytest.mark.parametrize("check", CHECKS)
def test_an_operator_survives(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = accepted = 0
    rng = random.Random(check)
    for seed in range(max(4, NUM_CALLS // 20)):
        for name, arguments in recorded(check, seed, monkeypatch):
            for _ in range(4):
                given = list(arguments)
                for _ in range(rng.choice((1, 1, 1, 2))):
                    place = rng.randrange(len(given))
                    given[place] = spoil(rng, given[place])
                try:
                    native.call(name, *given)
                    accepted += 1
                except RuntimeError as error:
                    text = str(error)
                    if not text.startswith(NO_MEMORY):
                        expect_clean(text, f"{name} {given}")
                    refused += 1
    assert refused
    assert accepted
