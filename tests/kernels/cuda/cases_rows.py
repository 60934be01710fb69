"""Checks of `tree_rows`, `commit_rows` and `next_tokens` on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels import reference
from specc.kernels.cuda import rows


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
    # an empty cache: the token in front of the root is nowhere, at position 0
    inputs[0][:1] = 0
    wanted = reference.tree_rows_reference(*inputs)
    same(rows.tree_rows(*(strided(tensor, device) for tensor in inputs)), wanted)


def check_commit_rows(batch: int, width: int, num_nodes: int, device: torch.device) -> None:
    path = integers(-1, num_nodes, batch, width, seed=width)
    inputs = (path, integers(0, 5000, batch, seed=4), integers(0, 2, num_nodes, seed=5))
    wanted = reference.commit_rows_reference(*inputs)
    same(rows.commit_rows(*(strided(tensor, device) for tensor in inputs)), wanted)


def check_nodes_beyond_the_tree(device: torch.device) -> None:
    path = torch.tensor([[0, 1, 3, 10**9, -5]], dtype=torch.int32, device=device)
    length = torch.tensor([7], dtype=torch.int32, device=device)
    has_row = torch.ones(4, dtype=torch.int32, device=device)[:3]
    source, after = rows.commit_rows(path, length, has_row)
    assert source.tolist() == [[7, 8, -1, -1, -1]]
    assert after.tolist() == [9]


def check_next_tokens(batch: int, width: int, device: torch.device) -> None:
    inputs = (
        integers(0, 300_000, batch, 2, seed=6, dtype=torch.int64),
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
    accepted = torch.tensor([2, 10**9, -(10**9)], dtype=torch.int32, device=device)
    assert rows.next_tokens(last, output, accepted).tolist() == [[4, -1], [-1, -1], [-1, -1]]
