"""States that steps leave for later requests, see `StepGroup.kept`.

A step may come past the rows whose states are kept. So the states before it are copied, none of its
nodes is certain, and after it the first nodes of the accepted path are folded into the copy.
"""

from __future__ import annotations

from typing import Any

import torch

from specc.runtime.backends.step_io import (
    DRAFT_STATES,
    STATES,
    StepInputs,
    StepResult,
    slots_of,
)
from specc.runtime.execution.link import Link
from specc.runtime.scheduling.batch import StepGroup
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.state_slabs import StateSlabs
from specc.speculation.plans import SpecPlan

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
        self._states, self._drafts = cache.states, cache.draft_states
        self._operators = operators
        self._link = link

    def wanted(self, group: StepGroup) -> tuple[str, ...]:
        """Values of the step that `end` reads."""
        if not group.kept or not group.plan.speculates:
            return ()
        # where the tree is known, a draft has a node in the row of the same number
        own = () if group.plan.is_static else self._drafts_of(group.plan).values()
        return (PATH, *(slots_of(name) for name, _ in own))

    def begin(self, group: StepGroup, inputs: StepInputs) -> StepInputs:
        """Before a step: copy what it begins with; returns what it is to be given."""
        if not group.kept or not group.plan.speculates or self._states is None:
            return inputs
        extra = dict(inputs.extra)
        drafts = self._drafts_of(group.plan)
        slabs = [self._states, *(states for _, states in drafts.values())]
        for name in (STATES, DRAFT_STATES) if drafts else (STATES,):
            extra[name] = extra[name].clone()
            for row, kept in zip(extra[name], group.kept, strict=True):
                row[1] *= kept is None
        with self._link.active():
            for request, kept in zip(group.requests, group.kept, strict=True):
                if kept is None:
                    continue
                for states in slabs:
                    states.keep(request.state_place, kept.checkpoint)
        return inputs._replace(extra=extra)

    def _drafts_of(self, plan: SpecPlan) -> dict[int, tuple[str, StateSlabs]]:
        """Drafts of a plan whose layers keep states: name, and these."""
        numbered = ((x.number, x.name) for x in plan.models)
        own = ((i, name) for i, name in numbered if i is not None and i in self._drafts)
        return {i: (name, self._drafts[i]) for i, name in own}

    @torch.inference_mode()
    def end(self, group: StepGroup, result: StepResult) -> None:
        """After a step: bring the copies to where they are kept, if the step has come so far."""
        if not group.kept or self._states is None:
            return
        drafts = self._drafts_of(group.plan)
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
                for number, (name, states) in drafts.items():
                    if result.draft_lens[number][i] < kept.length:
                        states.filled.discard(kept.checkpoint)
                        continue
                    if not group.plan.is_static:
                        rows = result.values[slots_of(name)][i, nodes].tolist()
                        source = [request.cache_len + row for row in rows]
                    states.fold(*where, source, request.cache_len, self._operators)
