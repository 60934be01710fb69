"""A step whose passes of the models that are cut all ranks run, and whose commits they repeat."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from specc.runtime.backends.step import StagedStep
from specc.runtime.backends.step_io import (
    BeforeAccept,
    Drafted,
    StepInputs,
    StepResult,
    slots_of,
)
from specc.runtime.execution.shared_pass import (
    FlatTokens,
    accepted_values,
    run_together,
    tree_tokens,
)
from specc.runtime.ranks.led_model import LedModel
from specc.runtime.ranks.orders import Commit

_PATH = "path"
# in the environment of a step, see `KVCache.environment`
BLOCK_MASS = "block_mass"


class LedStep:
    """A `StagedStep`: acceptance is rank 0's, the target's pass is everybody's.

    Args:
        step: of rank 0; its own verification is never run. Where it drafts with what all ranks
            run, it calls that: see `led_drafts`.
        target: that all ranks run.
        operators: namespace of the `specc::` operators.
        history: [blocks, block_size] int32 tokens.
        drafts: name → draft of the plan that all ranks run, whose rows they keep, too.
    """

    def __init__(
        self,
        step: StagedStep,
        target: LedModel,
        operators: Any,
        history: Tensor,
        drafts: Mapping[str, LedModel] = MappingProxyType({}),
    ) -> None:
        self.plan = step.plan
        self._drafts = drafts
        self._step = step
        self.target = target
        self._operators = operators
        self._history = history
        self._is_in_place = self.plan.is_in_place
        self._slots = torch.arange(self.plan.num_nodes, dtype=torch.int32)

    @property
    def before_accept(self) -> BeforeAccept | None:
        """Called between verification and acceptance; see `Step`."""
        return self._step.before_accept

    @before_accept.setter
    def before_accept(self, hook: BeforeAccept | None) -> None:
        self._step.before_accept = hook

    @property
    def staged(self) -> StagedStep | None:
        """Itself: see `StagedStep`."""
        return self

    @property
    def queued(self) -> None:
        """The host runs it."""
        return None

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """See `Step.advance`."""
        begin_s = time.perf_counter()
        drafted = self.draft(inputs, slabs)
        drafted_s = time.perf_counter()
        values = self.verify(inputs, drafted, self._mass_of(slabs, len(inputs.rows)))
        verified_s = time.perf_counter()
        found = drafted.accept(values, reads)
        stage_s = {"draft": drafted_s - begin_s} if self.plan.speculates else {}
        stage_s["verify"] = verified_s - drafted_s
        stage_s["accept_commit"] = time.perf_counter() - verified_s
        return found._replace(stage_s=stage_s)

    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """See `StagedStep.draft`; what it returns commits on all ranks."""
        self.target.leader.check()
        drafted = self._step.draft(inputs, slabs)

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            found = drafted.accept(values, (*reads, *({_PATH} - {*reads})))
            self._commit(inputs, drafted, found)
            # the caller takes values for something that it has asked for
            return found._replace(values={name: found.values[name] for name in reads})

        return Drafted(drafted.values, accept)

    def verify(
        self, inputs: StepInputs, drafted: Drafted, mass: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """The target's pass over the trees; returns what acceptance reads of it, by name.

        Args:
            inputs: of the step.
            drafted: of its drafts.
            mass: of blocks, changed, see `ModelProgram.forward`; None: nobody votes.
        """
        nodes = tree_tokens(self.plan, inputs, drafted)
        if self.plan.tile is None:
            (logits,) = run_together(self.target, [nodes], mass=mass)
            return accepted_values(self.plan, logits, inputs)
        return {"winners": self._winners(inputs, drafted, nodes, mass)}

    def _mass_of(self, slabs: Mapping[str, Tensor], batch: int) -> Tensor | None:
        """What a step's own pass adds votes to; None where none of its sequences votes."""
        mass = slabs.get(BLOCK_MASS) if self.plan.chooses_blocks else None
        return mass if mass is not None and bool((mass[:batch, 0] >= 0).any()) else None

    @torch.inference_mode()
    def _winners(
        self, inputs: StepInputs, drafted: Drafted, nodes: FlatTokens, mass: Tensor | None
    ) -> Tensor:
        """[B, N] tokens that the target wants after each node, tile by tile."""
        batch, count = len(inputs.rows), self.plan.num_nodes
        tokens = nodes.tokens.view(batch, count)
        if self.plan.is_static:
            parents = torch.tensor(self.plan.shape.parents, dtype=torch.int32).expand(batch, count)
        else:
            parents = drafted.values["parents"]
        winners = []
        for first, last in self.plan.tiles(count):
            part = part_of(nodes, batch, first, last)
            (logits,) = run_together(self.target, [part], mass=mass)
            found = self._operators.node_winners(
                logits,
                tokens,
                parents,
                first,
                inputs.sampling_values,
                inputs.sampling_words,
                nodes.cache_len,
                self._history,
                inputs.block_table,
            )
            winners.append(found.view(batch, last - first))
        return torch.cat(winners, dim=1)

    def _commit(self, inputs: StepInputs, drafted: Drafted, found: StepResult) -> None:
        """Rows of the target, and of each draft, whose slots are its own."""
        if self._is_in_place:
            return
        commit = Commit(
            found.values[_PATH],
            torch.tensor(found.num_accepted, dtype=torch.int32),
            torch.tensor([row[-1] for row in inputs.rows], dtype=torch.int32),
            inputs.block_table,
            self._slots,
        )
        self.target.leader.commit(self.target.number, commit)
        for name, draft in self._drafts.items():
            slots = drafted.values[slots_of(name)]
            self.target.leader.commit(draft.number, commit._replace(slots=slots))


def part_of(nodes: FlatTokens, batch: int, first: int, last: int) -> FlatTokens:
    """Nodes first … last - 1 of each tree."""
    if last - first == nodes.counts[0]:
        return nodes

    def of(values: Tensor) -> Tensor:
        rows = values.view(batch, -1, *values.shape[1:])
        return rows[:, first:last].reshape(-1, *values.shape[1:])

    return FlatTokens(
        of(nodes.tokens),
        of(nodes.positions),
        of(nodes.slots),
        of(nodes.ancestors),
        [last - first] * batch,
        nodes.cache_len,
        nodes.block_table,
        torch.arange(batch * (last - first)),
    )
