"""`tree_rows`, `commit_rows`, `next_tokens` and `leave_step` in Triton against their oracles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import rows
from specc.kernels.cuda.leave_step import leave_step
from specc.kernels.reference import commit as reference
from tests.kernels.tree_cases import PADDING

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def integers(low: int, high: int, *shape: int, seed: int, dtype=torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def strided(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values, every second of what lies in memory; rows stay in one piece."""
    if tensor.dim() == 1:
        wide = torch.full((2 * len(tensor),), 999, dtype=tensor.dtype, device=device)
        wide[::2] = tensor
        return wide[::2]
    wide = torch.full((len(tensor), tensor.shape[1] + 3), 999, dtype=tensor.dtype, device=device)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def same(outputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for got, want in zip(outputs, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("batch", "num_nodes"), [(1, 1), (3, 2), (5, 17), (3, 700), (0, 3), (3, 0)], ids=str
)
def test_tree_rows(batch, num_nodes, device):
    inputs = (
        integers(0, 5000, batch, seed=1),
        integers(-1, 200, num_nodes, seed=2),
        integers(-1, 9, num_nodes, seed=3),
    )
    # an empty cache: the token before the root is nowhere, at position 0
    inputs[0][:1] = 0
    wanted = reference.tree_rows_reference(*inputs)
    same(rows.tree_rows(*(strided(tensor, device) for tensor in inputs)), wanted)


@pytest.mark.parametrize(
    ("batch", "width", "num_nodes"),
    [(1, 1, 1), (3, 5, 9), (600, 3, 40), (2, 200, 300), (0, 2, 3)],
    ids=str,
)
@pytest.mark.parametrize("shared", [True, False], ids=["one-tree", "trees"])
def test_commit_rows(batch, width, num_nodes, shared, device):
    path = integers(-1, 6 * num_nodes, batch, width, seed=width) % (num_nodes + 1) - 1
    slots = integers(-1, 900, *(() if shared else (batch,)), num_nodes, seed=5)
    slots = torch.where(integers(0, 9, *slots.shape, seed=6) == 0, -1, slots)
    lengths = integers(0, 5000, batch, seed=4)
    lengths[1::5] = PADDING
    inputs = (path, lengths, slots)
    wanted = reference.commit_rows_reference(*inputs)
    same(rows.commit_rows(*(strided(tensor, device) for tensor in inputs)), wanted)


def test_nodes_beyond_the_tree_have_no_row(device):
    path = torch.tensor([[0, 1, 3, 0], [1, 10**9, 0, 0], [2, -5, 0, 0]], dtype=torch.int32)
    length = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
    slot_of = torch.tensor([1, 0, 5, 6], dtype=torch.int32, device=device)[:3]
    source, after = rows.commit_rows(path.to(device), length, slot_of)
    assert source.tolist() == [[8, 7, -1, -1], [8, -1, -1, -1], [14, -1, -1, -1]]
    assert after.tolist() == [9, 9, 10]


@pytest.mark.parametrize(
    ("batch", "num_last", "width"),
    [(1, 1, 1), (1, 2, 1), (7, 2, 4), (600, 2, 9), (40, 1, 5), (30, 5, 3), (9, 40, 20), (0, 2, 2)],
    ids=str,
)
def test_next_tokens(batch, num_last, width, device):
    inputs = (
        integers(0, 300_000, batch, num_last, seed=6, dtype=torch.int64),
        integers(0, 300_000, batch, width, seed=7, dtype=torch.int64),
        integers(0, width, batch, seed=8),
    )
    inputs[2][:1] = 0
    inputs[2][-1:] = width - 1
    wanted = reference.next_tokens_reference(*inputs)
    same((rows.next_tokens(*(strided(tensor, device) for tensor in inputs)),), (wanted,))


def test_counts_beyond_the_row_read_nothing(device):
    last = torch.tensor([[1, 2]] * 3, device=device)
    output = torch.tensor([[3, 4, 99]] * 3, device=device)[:, :2]
    accepted = [2, 2**31 - 1, -(2**31)]
    counts = torch.tensor(accepted, dtype=torch.int32, device=device)
    assert rows.next_tokens(last, output, counts).tolist() == [[4, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("batch", "columns", "width", "num_drafts"),
    [(1, 1, 1, 0), (3, 2, 5, 1), (5, 70, 130, 3), (2, 1, 64, 65), (0, 2, 2, 1)],
    ids=str,
)
def test_leave_step(batch, columns, width, num_drafts, device):
    """All that is written, and what lies after it in a row."""
    wide, narrow = torch.int64, torch.int32
    given = (
        integers(0, width, batch, seed=1),
        integers(-1, 300_000, batch, width, seed=2, dtype=wide),
        integers(0, 5000, batch, seed=3),
        integers(0, 300_000, batch, columns, seed=4, dtype=wide),
        integers(0, 5000, num_drafts, batch, seed=5) if num_drafts else None,
    )
    outputs = [
        [
            torch.full((batch, 5 + width + num_drafts), -7, dtype=wide, device=place),
            torch.full((batch, columns + 2), -7, dtype=wide, device=place),
            torch.full((batch,), -7, dtype=narrow, device=place),
        ]
        for place in (device, torch.device("cpu"))
    ]
    for made, run in zip(outputs, (leave_step, reference.leave_step_reference), strict=True):
        place = made[0].device
        is_kernel = run is leave_step
        accepted, tokens, length, last, lens = (x if x is None else x.to(place) for x in given)
        if is_kernel and batch:
            tokens, last = strided(tokens, place), strided(last, place)
        run(made[0], made[1][:, :columns], made[2], accepted, tokens, length, last, lens)
    same(tuple(outputs[0]), tuple(outputs[1]))
    if batch:
        assert outputs[0][0][0, -3:].tolist() == [-7] * 3


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
    with pytest.raises(ValueError, match=r"depths \[3\]"):
        rows.tree_rows(one, one, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"path \[2\]"):
        rows.commit_rows(one, one, one)
    with pytest.raises(ValueError, match=r"cache_len \[3\]"):
        rows.commit_rows(two, torch.zeros(3, dtype=torch.int32), one)
    with pytest.raises(ValueError, match="strides"):
        rows.commit_rows(torch.zeros(3, 2, dtype=torch.int32).T, one, one)
    with pytest.raises(ValueError, match=r"output_tokens .* of torch.int32"):
        rows.next_tokens(pair, two, one)
    with pytest.raises(ValueError, match="without a column"):
        rows.next_tokens(pair[:, :0], pair, one)
    with pytest.raises(ValueError, match=r"slot_of \[3, 3\] .*needed \[N\] or \[2, N\]"):
        rows.commit_rows(two, one, torch.zeros(3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"slot_of .* of torch.int64"):
        rows.commit_rows(two, one, one.long())
    with pytest.raises(ValueError, match=r"num_accepted .* of torch.int64"):
        rows.next_tokens(pair, pair, one.long())
