"""No arguments make the C++ operators read or write elsewhere, take all memory, or end the process.

What is tested is that a call comes back: with a result, or with an error that says what is wrong.
`make sanitize` makes more calls, of a library that watches every access and every sum.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels import native
from specc.kernels.ops import of_cpu
from specc.runtime.ranks.group import SharedGroup
from tests.kernels.cpu.hostile_calls import Arguments, calls, hostile_int
from tests.tiers import every

CPU_OPERATORS = [operator.name for operator in of_cpu()]
NUM_CALLS = int(os.environ.get("SPECC_HOSTILE_CALLS", "100"))
# what a call may raise: specc's own refusals, and those of torch's dispatcher
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
# of a call that was let through, and went wrong
_UNCLEAN = ("bad_alloc", "call into torch", "no memory", "vector", "stoi", "INTERNAL ASSERT")


@pytest.fixture(scope="module")
def operators(native_operators: Any) -> Iterator[Any]:
    # collectives are called, too; small slots, so that tensors take several
    group = SharedGroup.create(1, slot_bytes=64)
    yield native_operators
    group.close()


def answer(function: Any, arguments: Arguments) -> tuple[Any, str | None]:
    """The result of a call, or the text of its error."""
    try:
        return function(**arguments), None
    except _ERRORS as error:
        return None, str(error)


def expect_clean(error: str | None, what: str) -> None:
    assert error is None or not any(word in error for word in _UNCLEAN), f"{what}: {error}"


@pytest.mark.parametrize("name", every(2, CPU_OPERATORS))
def test_an_operator_survives(operators, name):
    function, refused = getattr(operators, name), 0
    for seed in range(NUM_CALLS):
        _, error = answer(function, calls(name, seed))
        expect_clean(error, f"{name} {seed}")
        refused += error is not None
    # both kinds of calls have been made, where there is a tensor that is refused
    assert (refused > 0) == (name != "from_first")
    assert refused < NUM_CALLS


def test_every_operator_is_called(operators):
    assert set(CPU_OPERATORS) == {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        if name.startswith("specc_cpu::")
    }


@pytest.mark.parametrize("name", every(3, native.C_SHIMS))
def test_a_c_function_answers_as_its_operator(operators, name, capfd):
    """What compiled programs call; the arguments that it cannot express are left out."""
    function, shim = getattr(operators, name), _Shim(name)
    refused = 0
    for seed in range(NUM_CALLS):
        arguments, copies = calls(name, seed), calls(name, seed)
        expected, error = answer(function, arguments)
        if error is not None and not error.startswith("specc: "):
            continue  # of the dispatcher
        got = shim(copies)
        assert (got is None) == (error is not None), f"{name} {seed}: {error}"
        if got is None:
            refused += 1
            assert capfd.readouterr().err.strip() == error.splitlines()[0]
        else:
            expected = shim.changed(arguments) if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert refused


_POINTER_OF = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_CAPSULE_OF = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class _Shim:
    """A C function of the library, called with torch's tensors."""

    def __init__(self, name: str) -> None:
        self.schema = getattr(torch.ops.specc_cpu, name).default._schema
        # of what this process has loaded: a second copy would register the operators again
        self.function = getattr(ctypes.CDLL(None), f"aoti_torch_cpu_{name}")
        self.function.restype = ctypes.c_int32

    def changed(self, arguments: Arguments) -> Tensor:
        """What an operator without a result has written to."""
        (name,) = [a.name for a in self.schema.arguments if a.alias_info and a.alias_info.is_write]
        return arguments[name]

    def __call__(self, arguments: Arguments) -> Tensor | None:
        owned: list[Any] = []

        def handle(tensor: Tensor) -> ctypes.c_void_p:
            owned.extend(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor]))
            return ctypes.c_void_p(_POINTER_OF(owned[-1], None))

        given: list[Any] = []
        for argument in self.schema.arguments:
            value = arguments.get(argument.name, argument.default_value)
            if isinstance(argument.type, torch.OptionalType):
                given.append(None if value is None else ctypes.pointer(handle(value)))
            elif isinstance(value, Tensor):
                given.append(handle(value))
            else:
                kind = ctypes.c_double if isinstance(value, float) else ctypes.c_int64
                given.append(kind(value))
        result = ctypes.c_void_p()
        code = self.function(*given, ctypes.byref(result) if self.schema.returns else None)
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(owned)  # and drop them
        if code:
            return None
        if not self.schema.returns:
            return self.changed(arguments)
        capsule = _CAPSULE_OF(result, None, None)
        return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)


def test_numbers_for_the_sum_of_a_buffer(operators):
    for count in (0, 1, 15, 16, 63, 64, 65, 1000):
        assert native.sum_floats(torch.ones(count)) == count


@pytest.mark.parametrize("seed", range(max(20, NUM_CALLS // 10)))
def test_a_runner_survives(operators, seed):
    """Instructions in any order, of values that there may not be."""
    rng = random.Random(seed)
    num_values = rng.choice((1, 2, 3, 9))
    runner = torch.classes.specc.StepRunner(num_values)

    def slot() -> int:
        return hostile_int(rng) if rng.random() < 0.1 else rng.randrange(num_values)

    def stage() -> int:
        return rng.choice((0, 0, 1, 2, hostile_int(rng)))

    operator = rng.choice((("aten::add", "Tensor"), ("specc_cpu::tree_expand", "")))
    steps = {
        "set_constant": lambda: (slot(), torch.arange(6.0).reshape(2, 3)),
        "begin_stage": lambda: (),
        "call": lambda: (*operator, slot(), rng.random() < 0.3),
        "getitem": lambda: (slot(), rng.choice((0, 1, hostile_int(rng))), slot()),
        "size": lambda: (slot(), rng.choice((0, 1, hostile_int(rng))), slot()),
        "arithmetic": lambda: (rng.choice(("add", "mul")), slot()),
        "value": lambda: (slot(),),
        "literal": lambda: (rng.choice((1, 2**62, 2.0, None, [1, 2])),),
        "list": lambda: (rng.choice((0, 1, hostile_int(rng))),),
        "release": lambda: (slot(),),
        "pass_on": lambda: ([slot()],),
        "run": lambda: ([torch.zeros(2, 3)] * rng.choice((0, 1, 12)), stage(), stage()),
        "step": lambda: (
            [*(rng.choice((1, hostile_int(rng))) for _ in range(rng.choice((0, 2, 4, 5))))],
            torch.zeros(rng.choice((0, 1, 2)), 1, dtype=torch.int32),
            [slot()], stage(), stage(), [slot()],
        ),
        "get": lambda: (slot(),),
        "outputs": lambda: ([slot(), slot()],),
    }  # fmt: skip
    names = list(steps)
    for _ in range(200):
        name = rng.choice(names)
        _, error = answer(lambda name=name: getattr(runner, name)(*steps[name]()), {})
        assert error is None or "bad_alloc" not in error


@pytest.mark.parametrize("count", [0, -1, -(2**63)])
def test_a_runner_has_values(operators, count):
    with pytest.raises(RuntimeError, match="1 value or more"):
        torch.classes.specc.StepRunner(count)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("tree_rows", (int32(5), int32(0, MOST), int32(0, 1)), "cache_len and nodes add to int32"),
        ("tree_rows", (int32(-(2**31)), int32(0, -1), int32(0, 1)), "cache_len and nodes"),
        ("commit_rows", (int32(0).view(1, 1), int32(MOST), int32(1)), "cache_len and slot_of"),
        ("commit_rows", (int32(0).view(1, 1), int32(MOST), int32(0)), "the length of a path"),
        ("image_slots", (int32(0).view(1, 1), int32(0), 2**31), "num_nodes is 1 … 65536"),
        ("ancestor_words", (int32(-1).view(1, 1).expand(1, 2**17),), "parents is|N is 1 … 65536"),
        ("accept_winners", (*[torch.zeros(1, 1).long()] * 2, int32(0).view(1, 1), MOST), "max_dep"),
    ],
)
def test_numbers_that_are_too_large(operators, name, arguments, message):
    with pytest.raises(RuntimeError, match=f"specc: .*({message})"):
        getattr(operators, name)(*arguments)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tree_attention", {"q": torch.zeros(0, 1, 4)}, "the number of KV heads divides"),
        ("tree_attention", {"window": -1}, "window and sink are 0 or more"),
        ("tree_attention", {"sink": -(2**63)}, "window and sink are 0 or more"),
        ("accept", {"max_depth": MOST}, "max_depth is 0 … 65536"),
        ("accept", {"max_depth": 2**63 - 1}, "max_depth is 0 … 65536"),
        ("draft_children", {"depth": 2**63 - 1}, "depth is 0 … 65536"),
        ("lookup", {"num_tokens": 2**63 - 1}, "num_tokens is 1 … 65536"),
        ("node_winners", {"first_node": 2**63 - 1}, "first_node is"),
        ("column_winners", {"first": 2**63 - 1}, "first is 0 or more"),
        ("column_winners", {"vocab_size": 0}, "vocab_size is 1 or more"),
        ("linear", {"input": torch.tensor(1.0)}, "x and weight"),
        ("linear", {"out_features": 2**63 - 1}, "the blocks are those"),
        ("embedding_of_blocks", {"width": -1}, "outputs and columns are 0 or more"),
    ],
)
def test_calls_that_are_refused(operators, name, changes, message):
    """Of good calls, that are accepted as they are."""
    arguments = next(
        given
        for seed in range(1000)
        if answer(getattr(operators, name), given := calls(name, seed, num_spoiled=0))[1] is None
        and (name != "linear" or given["input"].dtype == torch.float32)
    )
    if name == "tree_attention" and "q" in changes:
        changes = {"q": arguments["q"][:0]}
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        getattr(operators, name)(**arguments | changes)


def test_windows_beyond_every_position(operators):
    """As large as a number can be is as good as none, and the sink of all is all."""
    for seed in range(20):
        arguments = calls("tree_attention", seed, num_spoiled=0)
        none = calls("tree_attention", seed, num_spoiled=0) | {"window": 0, "sink": 0}
        expected = operators.tree_attention(**none)
        for changes in ({"window": 2**63 - 1, "sink": 0}, {"window": 1, "sink": 2**63 - 1}):
            got = operators.tree_attention(**arguments | changes)
            torch.testing.assert_close(got, expected, equal_nan=True)
