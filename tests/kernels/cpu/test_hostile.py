"""No arguments make the C++ operators read or write elsewhere, take all memory, or end the process.

What is tested is that a call comes back: with a result, or with an error that says what is wrong.
`make sanitize` makes more calls, of a library that watches every access and every sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels import native
from specc.kernels.ops import of_cpu
from specc.runtime.ranks.group import SharedGroup
from tests.kernels.cpu.hostile_calls import Arguments, calls
from tests.tiers import every

NUM_CALLS = int(os.environ.get("SPECC_HOSTILE_CALLS", "100"))
# what a call may raise: specc's own refusals, and those of torch's dispatcher
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
# of a call that was let through, and went wrong
_UNCLEAN = ("bad_alloc", "no memory", "vector", "stoi", "INTERNAL ASSERT")


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


@pytest.mark.parametrize("name", every(2, sorted(item.name for item in of_cpu())))
def test_an_operator_survives(operators, name):
    function, refused = getattr(operators, name), 0
    for seed in range(NUM_CALLS):
        _, error = answer(function, calls(name, seed))
        expect_clean(error, f"{name} {seed}")
        refused += error is not None
    # both kinds of calls have been made, where there is a tensor that is refused
    assert (refused > 0) == (name != "from_first")
    assert refused < NUM_CALLS


def test_numbers_for_the_sum_of_a_buffer(operators):
    for count in (0, 1, 15, 16, 63, 64, 65, 1000):
        assert native.sum_floats(torch.ones(count)) == count


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
