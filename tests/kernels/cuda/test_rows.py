"""`tree_rows`, `commit_rows`, `next_tokens` and `leave_step` in Triton against their oracles."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import rows
from specc.kernels.cuda.leave_step import leave_step
from tests.kernels.cuda import cases_rows as cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("batch", "num_nodes"), [(1, 1), (3, 2), (5, 17), (3, 700), (0, 3), (3, 0)], ids=str
)
def test_tree_rows(batch, num_nodes, device):
    cases.check_tree_rows(batch, num_nodes, device)


@pytest.mark.parametrize(
    ("batch", "width", "num_nodes"),
    [(1, 1, 1), (3, 5, 9), (600, 3, 40), (2, 200, 300), (0, 2, 3)],
    ids=str,
)
@pytest.mark.parametrize("shared", [True, False], ids=["one-tree", "trees"])
def test_commit_rows(batch, width, num_nodes, shared, device):
    cases.check_commit_rows(batch, width, num_nodes, device, shared)


def test_nodes_beyond_the_tree_have_no_row(device):
    cases.check_nodes_beyond_the_tree(device)


@pytest.mark.parametrize(
    ("batch", "num_last", "width"),
    [(1, 1, 1), (1, 2, 1), (7, 2, 4), (600, 2, 9), (40, 1, 5), (30, 5, 3), (9, 40, 20), (0, 2, 2)],
    ids=str,
)
def test_next_tokens(batch, num_last, width, device):
    cases.check_next_tokens(batch, num_last, width, device)


def test_counts_beyond_the_row_read_nothing(device):
    cases.check_counts_beyond_the_row(device)


@pytest.mark.parametrize(
    ("batch", "columns", "width", "num_drafts"),
    [(1, 1, 1, 0), (3, 2, 5, 1), (5, 70, 130, 3), (2, 1, 64, 65), (0, 2, 2, 1)],
    ids=str,
)
def test_leave_step(batch, columns, width, num_drafts, device):
    cases.check_leave_step(batch, columns, width, num_drafts, device)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({0: torch.zeros(2, 5, dtype=torch.int64)}, "found results"),
        ({1: torch.zeros(3, 2, dtype=torch.int64)}, "found last_tokens"),
        ({2: torch.zeros(2, dtype=torch.int64)}, "found cache_len"),
        ({4: torch.zeros(3, 2, dtype=torch.int64).T}, "found output_tokens"),
        ({6: torch.zeros(2, 1, dtype=torch.int64)}, "next_last_tokens"),
        ({7: torch.zeros(1, 3, dtype=torch.int32)}, "found draft_lens"),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) else "",
)
def test_a_step_that_leaves_other_shapes_is_refused(change, found):
    length, last = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)
    operands = [last.new_zeros(2, 6), last, length, length, last.new_zeros(2, 3), length, last]
    operands.append(length.new_zeros(1, 2))
    given = [change.get(i, operand) for i, operand in enumerate(operands)]
    with pytest.raises(ValueError, match=found):
        leave_step(*given)


def test_bad_inputs_are_refused_with_their_values():
    one, two = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    pair = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"nodes .* of torch.int64"):
        rows.tree_rows(one, one.long(), one)
    with pytest.raises(ValueError, match="2 nodes and 3 depths"):
        rows.tree_rows(one, one, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"path \[2\]"):
        rows.commit_rows(one, one, one)
    with pytest.raises(ValueError, match="3 lengths"):
        rows.commit_rows(two, torch.zeros(3, dtype=torch.int32), one)
    with pytest.raises(ValueError, match="strides"):
        rows.commit_rows(torch.zeros(3, 2, dtype=torch.int32).T, one, one)
    with pytest.raises(ValueError, match=r"output_tokens .* of torch.int32"):
        rows.next_tokens(pair, two, one)
    with pytest.raises(ValueError, match="without a column"):
        rows.next_tokens(pair[:, :0], pair, one)
    with pytest.raises(ValueError, match=r"slot_of \[3, 3\]; needed \[N\] or \[2, N\]"):
        rows.commit_rows(two, one, torch.zeros(3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"slot_of .* of torch.int64"):
        rows.commit_rows(two, one, one.long())
    with pytest.raises(ValueError, match=r"num_accepted .* of torch.int64"):
        rows.next_tokens(pair, pair, one.long())
