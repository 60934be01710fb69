"""The group of ranks that a process belongs to: what collectives of its programs meet in.

Rank 0 makes it and gives the others its `ticket`; they open it:

    group = SharedGroup.create(num_ranks=2)        # rank 0, which then starts the others
    group = SharedGroup.open(ticket, rank=1, num_ranks=2)
    group.wait_for_all(60)

Ranks of one host share memory: a file without a name, which a ticket names by process and
descriptor, so that nothing of it is left whoever is killed. For several hosts there is
`specc.runtime.ranks.sockets`. The library of the C++ operators has to be loaded.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from specc.errors import RankError
from specc.kernels import ranks
from specc.kernels.ranks import RankState, as_rank_error
from specc.kernels.reference.ranks import use_group

# a prompt's part of a pass goes in pieces of this size, which stay in the caches of a core
SLOT_BYTES = 512 << 10
TIME_LIMIT_S = 30.0


class SharedGroup:
    """This process's rank in the one group that it has; `create` or `open` make it.

    `specc::all_reduce` and its like, in eager graphs and in compiled programs, belong to it until
    it is closed. They fail with `RankError`, or with a RuntimeError of which
    `specc.kernels.ranks.rank_error` makes one.

    Args:
        descriptor: what keeps the memory there for them; None where there is none.
    """

    def __init__(self, rank: int, num_ranks: int, ticket: str, descriptor: int | None) -> None:
        self.rank = rank
        self.size = num_ranks
        self.ticket = ticket
        self._descriptor = descriptor
        self._pid = os.getpid()
        use_group(_NativeRanks())
        atexit.register(self.close)

    @classmethod
    def create(
        cls, num_ranks: int, time_limit: float = TIME_LIMIT_S, slot_bytes: int = SLOT_BYTES
    ) -> SharedGroup:
        """Make a group on this host, as its rank 0.

        Args:
            num_ranks: 1 … 64.
            time_limit: seconds that a rank waits for the others in a collective.
            slot_bytes: room of a rank for a piece of a tensor, twice; a multiple of 64.
        Raises:
            RankError: no memory, a value outside its range, or this process has a group.
        """
        descriptor = ranks.create(num_ranks, slot_bytes, time_limit)
        ticket = f"/proc/{os.getpid()}/fd/{descriptor}"
        return cls(0, num_ranks, ticket, descriptor)

    @classmethod
    def open(cls, ticket: str, rank: int, num_ranks: int) -> SharedGroup:
        """Open the group that rank 0 has made, as another of its ranks.

        Args:
            ticket: rank 0's; for a child that inherited the descriptor, `/proc/self/fd/<it>` too.
            rank: 1 … num_ranks - 1, of no other process.
        Raises:
            RankError: rank 0 is gone, the group has another size, or somebody has this rank.
        """
        ranks.open_shared(ticket, rank, num_ranks)
        return cls(rank, num_ranks, ticket, None)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks have opened the group; afterwards nobody can.

        Raises:
            RankError: some did not within this time; it names them.
        """
        ranks.wait_for_all(seconds)
        self._close_descriptor()

    @property
    def position(self) -> int:
        """Collectives that this rank has begun."""
        return self.states()[self.rank].num_collectives

    def states(self) -> list[RankState]:
        """What each rank last told the others, without waiting for any of them."""
        return ranks.states(self.size)

    def gather(self, logits: Tensor) -> Tensor:
        """[R, C] of each rank → [R, size * C] on rank 0; [R, 0] on the others.

        Raises:
            RankError: another rank is gone, late, or does not agree.
        """
        return as_rank_error(torch.ops.specc_cpu.gather_rows, logits)

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """[R] float32 and [R] int64 of each rank → [R] int64 on all: the best of each row.

        Raises:
            RankError: another rank is gone, late, or does not agree.
        """
        return as_rank_error(torch.ops.specc_cpu.best_of_ranks, scores, tokens)

    def add(self, values: Tensor) -> Tensor:
        """Sum over ranks, on all of them.

        Raises:
            RankError: another rank is gone, late, or does not agree.
        """
        return as_rank_error(torch.ops.specc_cpu.all_reduce, values)

    def abort(self, reason: str) -> None:
        """End all collectives that any rank waits in, and all later ones; the first reason stays.

        Args:
            reason: what was found.
        """
        ranks.abort(RankError(reason, "all ranks at work", "start the ranks again"))

    def close(self) -> None:
        """Leave the group: others that wait for this rank fail. More than once is once."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return  # of a process that was forked off: the group is its parent's
        self._pid = 0
        use_group(None)
        self._close_descriptor()
        ranks.close()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _NativeRanks:
    """The C++ transport for eager graphs; of all ranks this process has one."""

    def all_reduce(self, xs: Sequence[Tensor]) -> list[Tensor]:
        (x,) = xs
        return [as_rank_error(torch.ops.specc_cpu.all_reduce, x)]

    def gather_rows(self, xs: Sequence[Tensor]) -> list[Tensor]:
        (x,) = xs
        return [as_rank_error(torch.ops.specc_cpu.gather_rows, x)]

    def from_first(self, xs: Sequence[Tensor]) -> list[Tensor]:
        (x,) = xs
        return [as_rank_error(torch.ops.specc_cpu.from_first, x)]

    def best_of_ranks(self, scores: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]:
        (score,), (token,) = scores, tokens
        return [as_rank_error(torch.ops.specc_cpu.best_of_ranks, score, token)]
