"""What ranks compute together: the little that leader and followers ask of their group."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specc.errors import FaultError


class RankGroup(Protocol):
    """The group of the ranks of one engine, in one of their processes.

    The collectives inside of programs find it by themselves; here is what stands around a program.
    """

    rank: int
    size: int

    @property
    def ticket(self) -> str:
        """With this, `open_group` finds the same group in another process; of rank 0."""
        ...

    @property
    def position(self) -> int:
        """Collectives that this rank has been through; tells who keeps the others waiting."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Put the logits of a pass together, on all ranks after the same pass.

        Args:
            logits: [R, C] of this rank.
        Returns:
            [R, V] on rank 0; what the others get is for nobody.
        """
        ...

    def abort(self, reason: str) -> None:
        """Wake all ranks that wait in a collective, now and later: those calls fail."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Copies:
    """Ranks of which each computes all of every pass: they have nothing to say to each other.

    Args:
        rank: of this process.
        size: ranks.
    """

    ticket = "copies"
    position = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def gather(self, logits: Tensor) -> Tensor:
        """See `RankGroup.gather`: the logits are whole already."""
        return logits if self.rank == 0 else logits.new_empty(len(logits), 0)

    def abort(self, reason: str) -> None:
        """Nobody waits in it."""

    def close(self) -> None:
        """It holds nothing."""


def open_group(ticket: str, rank: int, size: int) -> RankGroup:
    """The group that rank 0 has made.

    Raises:
        FaultError: a group of a kind that is not known here.
    """
    if ticket == Copies.ticket:
        return Copies(rank, size)
    raise FaultError(
        f"a group {ticket!r}", "a group of this specc", "start all ranks with one installation"
    )
