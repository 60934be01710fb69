"""A step whose tokens all ranks draw together: no logits leave their rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specc.runtime.backends.step_io import Drafted, StepInputs
from specc.runtime.execution.draws import Draws, tree_draws
from specc.runtime.execution.shared_pass import (
    Begin,
    accepted_values,
    at_once,
    begin_together,
    tree_tokens,
)
from specc.runtime.ranks.led_step import LedStep, part_of


class DrawnStep(LedStep):
    """A `LedStep` for batches of which `can_draw` holds; its program's acceptance reads `winners`.

    Arguments are those of `LedStep`.
    """

    @torch.inference_mode()
    def begin_verify(
        self, inputs: StepInputs, drafted: Drafted, mass: Tensor | None = None
    ) -> Callable[[], Mapping[str, Tensor]]:
        """The target's passes over the trees, tile by tile, and the tokens that it wants."""
        nodes = tree_tokens(self.plan, inputs, drafted)
        batch, count = len(inputs.rows), self.plan.num_nodes
        sampling = inputs.sampling_values, inputs.sampling_words
        tiles = self.plan.tiles(count) if self.plan.tile else [(0, count)]
        passes = []
        for first, last in tiles:
            part = part_of(nodes, batch, first, last)
            draws = tree_draws(part, *sampling)
            passes.append(begin_together(self._begin_draws(draws), [part], mass=mass))

        def finish() -> Mapping[str, Tensor]:
            winners = [found.view(batch, -1) for taken in passes for found in taken()]
            return accepted_values(self.plan, torch.cat(winners, dim=1).flatten(), inputs)

        return finish

    def _begin_draws(self, draws: Draws) -> Begin:
        """Passes of the target that yield tokens."""
        if self.target.num_stages > 1:
            return functools.partial(self.target.begin_draw, draws)
        return at_once(functools.partial(self.target.draw, draws))
