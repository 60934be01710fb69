"""Checks of `tree_rows`, `commit_rows`, `next_tokens` and `leave_step` on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.cuda import rows
from specc.kernels.cuda.leave_step import leave_step
from specc.kernels.reference import commit as reference
from tests.kernels.tree_cases import PADDING


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


def check_tree_rows(batch: int, num_nodes: int, device: torch.device) -> None:
    inputs = (
        integers(0, 5000, batch, seed=1),
        integers(-1, 200, num_nodes, seed=2),
        integers(-1, 9, num_nodes, seed=3),
    )
    # an empty cache: the token before the root is nowhere, at position 0
    inputs[0][:1] = 0
    wanted = reference.tree_rows_reference(*inputs)
    same(rows.tree_rows(*(strided(tensor, device) for tensor in inputs)), wanted)


def check_commit_rows(
    batch: int, width: int, num_nodes: int, device: torch.device, shared: bool = True
) -> None:
    # few ends and few nodes without a row, so that paths of all lengths are kept
    path = integers(-1, 6 * num_nodes, batch, width, seed=width) % (num_nodes + 1) - 1
    slots = integers(-1, 900, *(() if shared else (batch,)), num_nodes, seed=5)
    slots = torch.where(integers(0, 9, *slots.shape, seed=6) == 0, -1, slots)
    lengths = integers(0, 5000, batch, seed=4)
    lengths[1::5] = PADDING
    inputs = (path, lengths, slots)
    wanted = reference.commit_rows_reference(*inputs)
    same(rows.commit_rows(*(strided(tensor, device) for tensor in inputs)), wanted)


def check_nodes_beyond_the_tree(device: torch.device) -> None:
    path = torch.tensor([[0, 1, 3, 0], [1, 10**9, 0, 0], [2, -5, 0, 0]], dtype=torch.int32)
    length = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
    slot_of = torch.tensor([1, 0, 5, 6], dtype=torch.int32, device=device)[:3]
    source, after = rows.commit_rows(path.to(device), length, slot_of)
    assert source.tolist() == [[8, 7, -1, -1], [8, -1, -1, -1], [14, -1, -1, -1]]
    assert after.tolist() == [9, 9, 10]


def check_next_tokens(batch: int, num_last: int, width: int, device: torch.device) -> None:
    inputs = (
        integers(0, 300_000, batch, num_last, seed=6, dtype=torch.int64),
        integers(0, 300_000, batch, width, seed=7, dtype=torch.int64),
        integers(0, width, batch, seed=8),
    )
    inputs[2][:1] = 0
    inputs[2][-1:] = width - 1
    wanted = reference.next_tokens_reference(*inputs)
    same((rows.next_tokens(*(strided(tensor, device) for tensor in inputs)),), (wanted,))


def check_counts_beyond_the_row(device: torch.device) -> None:
    last = torch.tensor([[1, 2]] * 3, device=device)
    output = torch.tensor([[3, 4, 99]] * 3, device=device)[:, :2]
    accepted = [2, 2**31 - 1, -(2**31)]
    counts = torch.tensor(accepted, dtype=torch.int32, device=device)
    assert rows.next_tokens(last, output, counts).tolist() == [[4, -1], [-1, -1], [-1, -1]]


def check_leave_step(
    batch: int, columns: int, width: int, num_drafts: int, device: torch.device
) -> None:
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
