"""A model that all ranks run."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specc.runtime.backends.step import Model
from specc.runtime.execution.draws import Draws
from specc.runtime.ranks.leader import Leader


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
        if self.num_stages > 1:
            return self.begin(*inputs)()
        return self.leader.run_pass(self.number, inputs, self.program)

    def draw(self, draws: Draws, *inputs: Tensor | None) -> Tensor:
        """See `DrawingModel.draw`.

        Raises:
            RankError: a rank is lost.
        """
        if self.num_stages > 1:
            return self.begin_draw(draws, *inputs)()
        return self.leader.run_draw(self.number, draws, inputs, self.program)

    def begin(self, *inputs: Tensor | None) -> Callable[[], Tensor]:
        """See `StagedModel.begin`."""
        return self.leader.begin_staged(inputs, self.program)

    def begin_draw(self, draws: Draws, *inputs: Tensor | None) -> Callable[[], Tensor]:
        """See `StagedModel.begin_draw`."""
        return self.leader.begin_staged(inputs, self.program, draws)
