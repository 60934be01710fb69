"""`specc::tree_rows`, `commit_rows` and `next_tokens` against loops over Python integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
PADDING = -(1 << 30)


def int32(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@EXAMPLES
@given(data=st.data())
def test_tree_rows(implementation, data) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=5))
    nodes = data.draw(st.lists(st.integers(-1, 200), min_size=1, max_size=9))
    depths = data.draw(st.lists(st.integers(-1, 9), min_size=len(nodes), max_size=len(nodes)))
    slot, position = implementation.tree_rows(int32(lengths), int32(nodes), int32(depths))
    assert slot.tolist() == [length + node for length in lengths for node in nodes]
    assert position.tolist() == [max(0, length + d) for length in lengths for d in depths]
    assert (slot.dtype, position.dtype) == (torch.int32, torch.int64)


@EXAMPLES
@given(data=st.data())
def test_commit_rows(implementation, data) -> None:
    num_nodes = data.draw(st.integers(1, 9))
    width = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.just(PADDING) | st.integers(0, 5000), min_size=1, max_size=4))
    is_shared = data.draw(st.booleans())
    slots = data.draw(
        st.lists(
            st.lists(st.integers(-2, 300), min_size=num_nodes, max_size=num_nodes),
            min_size=1 if is_shared else len(lengths),
            max_size=1 if is_shared else len(lengths),
        )
    )
    paths, sources, totals = [], [], []
    for b, length in enumerate(lengths):
        path = data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=width))
        kept = []
        for node in path:
            slot = slots[0 if is_shared else b][node]
            if slot < 0 or length < 0:
                break
            kept.append(length + slot)
        paths.append(path + [-1] * (width - len(path)))
        sources.append(kept + [-1] * (width - len(kept)))
        totals.append(length + len(kept))
    slot_of = int32(slots[0] if is_shared else slots)
    made = implementation.commit_rows(int32(paths), int32(lengths), slot_of)
    assert [made[0].tolist(), made[1].tolist()] == [sources, totals]
    assert {x.dtype for x in made} == {torch.int32}


def test_commit_rows_stops_at_the_first_node_without_a_row(implementation) -> None:
    """Node 2 was never fed, so that the rows of those after it are not the next ones."""
    path, slot_of = int32([[0, 2, 3], [0, 1, 3]]), int32([4, 5, -1, 6])
    source, length = implementation.commit_rows(path, int32([10, 20]), slot_of)
    assert source.tolist() == [[14, -1, -1], [24, 25, 26]]
    assert length.tolist() == [11, 23]


@EXAMPLES
@given(data=st.data())
def test_next_tokens(implementation, data) -> None:
    width = data.draw(st.integers(1, 6))
    batch = data.draw(st.integers(1, 4))
    num_last = data.draw(st.integers(1, 9))
    last, output, accepted, wanted = [], [], [], []
    for b in range(batch):
        count = data.draw(st.integers(0, width - 1))
        tokens = [100 * b + i for i in range(count + 1)]
        last.append([1000 * b + 900 + i for i in range(num_last)])
        output.append(tokens + [-1] * (width - len(tokens)))
        accepted.append(count)
        wanted.append([*last[-1], *tokens][-num_last:])
    made = implementation.next_tokens(torch.tensor(last), torch.tensor(output), int32(accepted))
    assert made.tolist() == wanted


def test_native_refuses_what_would_be_read_outside(native_operators) -> None:
    path, length = int32([[0, 4]]), int32([3])
    with pytest.raises(RuntimeError, match="slot_of has an entry for each node"):
        native_operators.commit_rows(path, length, int32([1, 1]))
    with pytest.raises(RuntimeError, match=r"slot_of is \[N\] or \[B, N\] int32"):
        native_operators.commit_rows(path, length, int32([[1] * 5] * 2))
    with pytest.raises(RuntimeError, match=r"slot_of is \[N\] or \[B, N\] int32"):
        native_operators.commit_rows(path, length, torch.ones(5).long())
    with pytest.raises(RuntimeError, match="num_accepted is less than P"):
        native_operators.next_tokens(torch.tensor([[1, 2]]), torch.tensor([[3]]), int32([1]))
    with pytest.raises(RuntimeError, match="last_tokens has 1 column or more"):
        native_operators.next_tokens(torch.zeros(1, 0).long(), torch.tensor([[3]]), int32([0]))
    with pytest.raises(RuntimeError, match="nodes and depths agree"):
        native_operators.tree_rows(int32([1]), int32([1, 2]), int32([1]))
    with pytest.raises(RuntimeError, match="cache_len is"):
        native_operators.tree_rows(torch.tensor([1]), int32([1]), int32([1]))


def test_native_reads_nothing_for_padding(native_operators) -> None:
    """Nor after a path's end, where anything may stand."""
    path, lengths = int32([[10**9, 4, 5], [0, -1, 10**9]]), int32([PADDING, 7])
    source, length = native_operators.commit_rows(path, lengths, int32([2]))
    assert source.tolist() == [[-1, -1, -1], [9, -1, -1]]
    assert length.tolist() == [PADDING, 8]
