"""Oracles of the operators in which the ranks of a tensor-parallel group meet.

Here ranks are threads of one process, for tests: each says with `Rank` which one it is. Without
that, a process is a group of one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_here = threading.local()


class LockstepGroup:
    """Ranks that are threads of one process; each call waits for all of them.

    Args:
        num_ranks: threads that call every operator, in the same order.
        timeout_s: after which a rank that waits for the others fails.
    """

    def __init__(self, num_ranks: int, timeout_s: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self._given: list[Tensor | None] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=timeout_s)

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """The values of all ranks, in their order."""
        self._given[rank] = value
        self._barrier.wait()
        found = [item for item in self._given if item is not None]
        # nobody gives the next value before all have these
        self._barrier.wait()
        return found

    def abort(self) -> None:
        """Let every rank that waits fail."""
        self._barrier.abort()


class Rank:
    """`with Rank(group, 1): …`: what this thread calls is what rank 1 calls."""

    def __init__(self, group: LockstepGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def __enter__(self) -> None:
        _here.group, _here.rank = self._group, self._rank

    def __exit__(self, *_: object) -> None:
        del _here.group, _here.rank


def sum_of_ranks(values: Sequence[Tensor]) -> Tensor:
    """Summed in the order of ranks, halves in float32: equal bits wherever it is computed."""
    total = values[0].float() if values[0].dtype.itemsize < 4 else values[0].clone()
    for value in values[1:]:
        total += value
    return total.to(values[0].dtype).contiguous()


def all_reduce(x: Tensor) -> Tensor:
    """The sum over ranks of x, of any shape, on every rank."""
    group = getattr(_here, "group", None)
    values = [x] if group is None else group.exchange(_here.rank, x)
    return sum_of_ranks(values)


def gather(values: Sequence[Tensor]) -> Tensor:
    """Columns of all ranks [R, C] side by side, [R, N * C]."""
    return torch.cat(list(values), -1)
