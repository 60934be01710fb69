"""Which blocks of a request its self-drafts see: what the target attended to, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specc.drafters.views import View, rows_between_votes

# what is left of earlier votes when there are new ones
_DECAY = 0.5
# queries that are few
_FEW_VOTERS = 32


class BlockChoice:
    """Votes on the blocks of one request, and the choices that follow from them.

    A vote is a share of attention, see `block_mass_reference`. Each time that there are votes, they
    count as much as any others would, however many queries they are of, and what was there before
    counts half as much as it did. It all ends with the rows: a request that is preempted begins
    anew.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all votes: the rows are gone."""
        self.mass: Tensor | None = None
        self.num_voters = 0
        self._length = 0
        self._chosen: dict[View, tuple[int, list[int]]] = {}

    def add(self, votes: Tensor, num_voters: int, length: int) -> None:
        """Take votes.

        Args:
            votes: [n] float32 on the host, by column of the block table.
            num_voters: queries that have voted.
            length: committed rows at that time.
        """
        share = votes / votes.sum()
        # no query was live, or what it saw was no number
        if not bool(share.isfinite().all()):
            return
        self.mass = share if self.mass is None else _DECAY * self.mass + share
        self.num_voters += num_voters
        self._length = length
        self._chosen.clear()

    def is_due(self, length: int, views: Sequence[View]) -> bool:
        """Whether nodes of the next step should vote.

        Args:
            length: committed rows.
        """
        if self.mass is None:
            return True
        every = rows_between_votes(views, self.num_voters >= _FEW_VOTERS)
        return length - self._length >= every

    def columns(self, view: View, length: int, block_size: int) -> list[int]:
        """What a view sees between its sink and its window; see `View.choose`."""
        own = length // block_size
        known = self._chosen.get(view)
        if known is None or known[0] != own:
            known = self._chosen[view] = own, view.choose(self.mass, length, block_size)
        return known[1]
