"""States that steps leave for later requests, see `StepGroup.kept`.

A step may come past the rows whose states are kept. So the states before it are copied, none of its
nodes is certain, and after it the first nodes of the accepted path are folded into the copy.
"""

from __future__ import annotations

from typing import Any

import torch

from specc.runtime.backends.step_io import STATES, StepInputs, StepResult
from specc.runtime.execution.link import Link
from specc.runtime.scheduling.batch import StepGroup
from specc.runtime.scheduling.kv_cache import KVCache

# of a step's values, what says which nodes were accepted
PATH = "path"


class KeptStates:
    """Keeps states of steps.

    Args:
        cache: of the engine.
        operators: namespace of the `specc::` operators that run here.
        link: to the device of the programs.
    """

    def __init__(self, cache: KVCache, operators: Any, link: Link) -> None:
        self._states = cache.states
        self._operators = operators
        self._link = link

    def wanted(self, group: StepGroup) -> tuple[str, ...]:
        """Values of the step that `end` reads."""
        return (PATH,) if group.kept and group.plan.speculates else ()

    def begin(self, group: StepGroup, inputs: StepInputs) -> StepInputs:
        """Before a step: copy what it begins with; returns what it is to be given."""
        if not group.kept or not group.plan.speculates or self._states is None:
            return inputs
        states = inputs.extra[STATES].clone()
        with self._link.active():
            for row, request, kept in zip(states, group.requests, group.kept, strict=True):
                if kept is not None:
                    self._states.keep(request.state_place, kept.checkpoint)
                    row[1] = 0
        return inputs._replace(extra={**inputs.extra, STATES: states})

    @torch.inference_mode()
    def end(self, group: StepGroup, result: StepResult) -> None:
        """After a step: bring the copies to where they are kept, if the step has come so far."""
        if not group.kept or self._states is None:
            return
        with self._link.active():
            for i, (request, kept) in enumerate(zip(group.requests, group.kept, strict=True)):
                if kept is None or result.next_cache_len[i] < kept.length:
                    continue
                if not group.plan.speculates:
                    self._states.keep(request.state_place, kept.checkpoint)
                    continue
                count = kept.length - request.cache_len
                nodes = result.values[PATH][i, :count].tolist()
                source = [request.cache_len + node for node in nodes]
                where = kept.checkpoint, request.state_place
                self._states.fold(*where, source, request.cache_len, self._operators)
