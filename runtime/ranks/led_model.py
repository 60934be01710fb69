"""Models as rank 0 calls them: what all ranks run, and drafts that one other rank has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specc.runtime.backends.step import Model
from specc.runtime.execution.draws import Draws
from specc.runtime.ranks.answers import values_of
from specc.runtime.ranks.leader import Leader
from specc.runtime.ranks.orders import Kind


class LedModel:
    """A `Model` of rank 0 whose passes the others run, too.

    Args:
        leader: gives the orders.
        number: of the model: 0 is the target.
        program: of rank 0.
    """

    def __init__(self, leader: Leader, number: int, program: Model) -> None:
        self.leader = leader
        self.number = number
        self.program = program

    @property
    def num_stages(self) -> int:
        """Stages that it runs in, which may work on as many passes at once."""
        return 1 if self.number else self.leader.num_stages

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Inputs and result as of `ModelProgram.forward`.

        Raises:
            RankError: a rank is lost.
        """
        return self.begin(*inputs)()

    def begin(self, *inputs: Tensor | None) -> Callable[[], Tensor]:
        """See `BegunModel.begin`."""
        if self.num_stages > 1:
            return self.leader.begin_staged(inputs, self.program)
        logits = self.leader.run_pass(self.number, inputs, self.program)
        return lambda: logits

    def begin_draw(self, draws: Draws, *inputs: Tensor | None) -> Callable[[], Tensor]:
        """See `BegunModel.begin_draw`."""
        if self.num_stages > 1:
            return self.leader.begin_staged(inputs, self.program, draws)
        tokens = self.leader.run_draw(self.number, draws, inputs, self.program)
        return lambda: tokens


class LoneDraft:
    """A `Model` whose passes one other rank runs.

    A pass without logits is not waited for: that rank does what it is told in order.

    Args:
        leader: gives the orders.
        number: of the model, see `Manifest.ordered_programs`.
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
