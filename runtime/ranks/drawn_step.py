"""A step whose tokens all ranks draw together: no logits leave their rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from specc.runtime.backends.step_io import Drafted, StepInputs
from specc.runtime.execution.draws import tree_draws
from specc.runtime.execution.shared_pass import accepted_values, run_together, tree_tokens
from specc.runtime.ranks.led_step import LedStep, part_of


class DrawnStep(LedStep):
    """A `LedStep` for batches of which `can_draw` holds; its program's acceptance reads `winners`.

    Arguments are those of `LedStep`.
    """

    @torch.inference_mode()
    def verify(
        self, inputs: StepInputs, drafted: Drafted, mass: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """The target's pass over the trees, tile by tile, and the tokens that it wants."""
        nodes = tree_tokens(self.plan, inputs, drafted)
        batch, count = len(inputs.rows), self.plan.num_nodes
        sampling = inputs.sampling_values, inputs.sampling_words
        tiles = self.plan.tiles(count) if self.plan.tile else [(0, count)]
        winners = []
        for first, last in tiles:
            part = part_of(nodes, batch, first, last)
            draw = functools.partial(self.target.draw, tree_draws(part, *sampling))
            (found,) = run_together(draw, [part], mass=mass)
            winners.append(found.view(batch, last - first))
        return accepted_values(self.plan, torch.cat(winners, dim=1).flatten(), inputs)
