"""A step whose passes of the models that are cut all ranks run, and whose commits they repeat."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from specc.runtime.backends.step import FinishStep, StagedStep
from specc.runtime.backends.step_io import (
    STATES,
    BeforeAccept,
    Drafted,
    StepInputs,
    StepResult,
    slots_of,
)
from specc.runtime.execution.draws import tree_draws
from specc.runtime.execution.shared_pass import (
    FlatTokens,
    accepted_values,
    begin_together,
    tree_tokens,
)
from specc.runtime.ranks.led_model import LedModel, LoneDraft
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
        drafts: name → draft of the plan whose rows other ranks keep, too.
    """

    def __init__(
        self,
        step: StagedStep,
        target: LedModel,
        operators: Any,
        history: Tensor,
        drafts: Mapping[str, LedModel | LoneDraft] = MappingProxyType({}),
    ) -> None:
        self.plan = step.plan
        self._drafts = drafts
        self._step = step
        # those that nothing was drafted with, and the target's pass is yet to be done
        self._free = [step]
        self.before_accept: BeforeAccept | None = None
        self.target = target
        self._operators = operators
        self._history = history
        self._is_in_place = self.plan.is_in_place
        self._slots = torch.arange(self.plan.num_nodes, dtype=torch.int32)

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """See `Step.advance`."""
        return self.begin(inputs, slabs)(reads)

    def begin(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> FinishStep:
        """See `BegunStep.begin`; where the target has no stages, its pass is done then."""
        begin_s = time.perf_counter()
        drafted = self.draft(inputs, slabs)
        drafted_s = time.perf_counter()
        taken = self.begin_verify(inputs, drafted, self._mass_of(slabs, len(inputs.rows)))
        stage_s = {"draft": drafted_s - begin_s} if self.plan.speculates else {}
        begun_s = time.perf_counter() - drafted_s

        def finish(reads: Sequence[str]) -> StepResult:
            wait_s = time.perf_counter()
            values = taken()
            verified_s = time.perf_counter()
            found = drafted.accept(values, reads)
            # what other steps did meanwhile is theirs
            stage_s["verify"] = begun_s + verified_s - wait_s
            stage_s["accept_commit"] = time.perf_counter() - verified_s
            return found._replace(stage_s=stage_s)

        return finish

    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """See `StagedStep.draft`; what it returns commits on all ranks.

        Others may be drafted before that is called.
        """
        self.target.leader.check()
        step = self._free.pop() if self._free else self._step.another()
        lease = _Lease(step, self._free)
        drafted = step.draft(inputs, slabs)

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            lease.step.before_accept = self.before_accept
            found = drafted.accept(values, (*reads, *({_PATH} - {*reads})))
            self._commit(inputs, drafted, found)
            # the caller takes values for something that it has asked for
            return found._replace(values={name: found.values[name] for name in reads})

        return Drafted(drafted.values, accept)

    def another(self) -> StagedStep:
        """Itself: it has as many steps as are drafted at once."""
        return self

    def begin_verify(
        self, inputs: StepInputs, drafted: Drafted, mass: Tensor | None = None
    ) -> Callable[[], Mapping[str, Tensor]]:
        """Begin the target's passes over the trees.

        Args:
            inputs: of the step.
            drafted: of its drafts.
            mass: of blocks, changed, see `ModelProgram.forward`; None: nobody votes.
        Returns:
            waits for what acceptance reads of them, by name.
        """
        nodes = tree_tokens(self.plan, inputs, drafted)
        if self.plan.tile is None:
            taken = begin_together(self.target.begin, [nodes], mass=mass)
            return lambda: accepted_values(self.plan, taken()[0], inputs)
        batch = len(inputs.rows)

        def begin(tile: tuple[int, int]) -> Callable[[], list[Tensor]]:
            return begin_together(self.target.begin, [part_of(nodes, batch, *tile)], mass=mass)

        first, *others = self.plan.tiles(self.plan.num_nodes)
        taken = begin(first)

        def passes() -> Iterator[Tensor]:
            yield from taken()
            for tile in others:
                # not before: there is memory for the logits of one tile
                yield from begin(tile)()

        return lambda: {"winners": self._winners(inputs, drafted, nodes, passes())}

    def _mass_of(self, slabs: Mapping[str, Tensor], batch: int) -> Tensor | None:
        """What a step's own pass adds votes to; None where none of its sequences votes."""
        mass = slabs.get(BLOCK_MASS) if self.plan.chooses_blocks else None
        return mass if mass is not None and bool((mass[:batch, 0] >= 0).any()) else None

    @torch.inference_mode()
    def _winners(
        self,
        inputs: StepInputs,
        drafted: Drafted,
        nodes: FlatTokens,
        logits_of_tiles: Iterator[Tensor],
    ) -> Tensor:
        """[B, N] tokens that the target wants after each node, tile by tile."""
        batch, count = len(inputs.rows), self.plan.num_nodes
        tokens = nodes.tokens.view(batch, count)
        if self.plan.is_static:
            parents = torch.tensor(self.plan.shape.parents, dtype=torch.int32).expand(batch, count)
        else:
            parents = drafted.values["parents"]
        winners = []
        for (first, last), logits in zip(self.plan.tiles(count), logits_of_tiles, strict=True):
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
        """Rows and states of the target, and rows of each draft, whose slots are its own."""
        # without a tree, the only node is in the states
        states = inputs.extra.get(STATES) if self.plan.speculates else None
        if self._is_in_place and states is None:
            return
        commit = Commit(
            found.values[_PATH],
            torch.tensor(found.num_accepted, dtype=torch.int32),
            torch.tensor([row[-1] for row in inputs.rows], dtype=torch.int32),
            inputs.block_table,
            self._slots,
        )
        self.target.leader.commit(self.target.number, commit._replace(states=states))
        for name, draft in self._drafts.items() if not self._is_in_place else ():
            slots = drafted.values[slots_of(name)]
            self.target.leader.commit(draft.number, commit._replace(slots=slots))


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
            begin = functools.partial(self.target.begin_draw, tree_draws(part, *sampling))
            passes.append(begin_together(begin, [part], mass=mass))

        def finish() -> Mapping[str, Tensor]:
            winners = [found.view(batch, -1) for taken in passes for found in taken()]
            return accepted_values(self.plan, torch.cat(winners, dim=1).flatten(), inputs)

        return finish


class _Lease:
    """Keeps a step from being drafted with again, as long as somebody may call its `accept`.

    Args:
        step: that was drafted with.
        free: where it goes then; also where nobody accepts what it drafted, after a failure.
    """

    def __init__(self, step: StagedStep, free: list[StagedStep]) -> None:
        self.step = step
        weakref.finalize(self, free.append, step).atexit = False


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
        nodes.states,
    )
