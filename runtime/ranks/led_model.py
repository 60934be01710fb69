"""A model that all ranks run."""

from __future__ import annotations

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

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Inputs and result as of `ModelProgram.forward`.

        Raises:
            RankError: a rank is lost.
        """
        return self.leader.run_pass(self.number, inputs, self.program)

    def draw(self, draws: Draws, *inputs: Tensor | None) -> Tensor:
        """See `DrawingModel.draw`.

        Raises:
            RankError: a rank is lost.
        """
        return self.leader.run_draw(self.number, draws, inputs, self.program)
