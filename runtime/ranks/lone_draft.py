"""A draft model that another rank than rank 0 has, as rank 0 calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.runtime.ranks.draft_values import values_of
from specc.runtime.ranks.leader import Leader
from specc.runtime.ranks.orders import Kind


class LoneDraft:
    """A `Model` whose passes one other rank runs.

    A pass without logits is not waited for: that rank does what it is told in order.

    Args:
        leader: gives the orders.
        number: of the model, see `Manifest.ordered_programs`.
        rank: that has it.
        vocab_size: columns of its logits.
    """

    def __init__(self, leader: Leader, number: int, rank: int, vocab_size: int) -> None:
        self.leader = leader
        self.number = number
        self._rank = rank
        self._vocab_size = vocab_size

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Inputs and result as of `ModelProgram.forward`.

        Raises:
            RankError: a rank is lost.
        """
        order = self.leader.ask(Kind.PASS, inputs, self.number)
        rows = inputs[-1]
        if rows is None or len(rows) == 0:
            return torch.empty(0, self._vocab_size)
        (logits,) = values_of(self.leader.answer(self._rank, order))
        return logits
