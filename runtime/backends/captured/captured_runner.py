"""Batches whose steps a device replays: queued, and read when the device is done with them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.mask_rules import MaskRules
from specc.runtime.backends.captured.pending_replay import PendingStep
from specc.runtime.backends.captured.step_scores import StepExtras
from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.constraints.grammar_masks import has_masks
from specc.runtime.execution.block_votes import PendingVotes, read_votes
from specc.runtime.outputs.step_logprobs import logprobs_after, wants_logprobs
from specc.runtime.runner import Runner
from specc.runtime.scheduling.batch import Batch, PendingBatch, RunResult, StepGroup
from specc.speculation.live_nodes import says_confidence


class _QueuedGroup(NamedTuple):
    """How a group's step is queued.

    Args:
        step: of its plan.
        group: that runs it.
        extras: what it does besides; None is nothing.
    """

    step: CapturedStep
    group: StepGroup
    extras: StepExtras | None

    @property
    def is_half(self) -> bool:
        """What the host adds follows from a step in flight: see `HalfReplay`."""
        return self.extras is not None and self.extras.kind.is_parted and any(self.group.ahead)


class _LastQueued(NamedTuple):
    """The step that was queued last, and the block table that it had."""

    own: _QueuedGroup
    table: Tensor
    pending: PendingStep

    def leads_to(self, own: _QueuedGroup, table: Tensor) -> bool:
        """The same step for the same requests, all of which go on from its state."""
        before, group = self.own.group, own.group
        return (
            all(group.ahead or [0])
            and (before.plan, before.requests) == (group.plan, group.requests)
            and before.live == group.live
            and self.table is table
            and self.pending.can_go_on
        )


class CapturedRunner(Runner):
    """Queues batches of `CapturedStep`s; the host runs those with a hook between their stages."""

    _last_queued: _LastQueued | None = None

    @property
    def graph_sizes(self) -> Sequence[int]:  # type: ignore[override]
        """Batch sizes that are captured, ascending."""
        return self._any_step.buckets

    def begin(self, batch: Batch, count: int = 1) -> PendingBatch | None:
        """See `Runner.begin`.

        Where results of its requests are on their way, it is None for steps that are not replayed,
        too: they could wait while the results are ready to be read. Of steps whose masks or live
        nodes follow from these results, one is queued, and the last of all: up to its verification,
        or to the first pass of a draft that obeys a grammar; `PendingBatch.complete` makes the
        masks and queues the rest. Where a batch has several of these, the results come first. A
        step that may leave states for later requests runs stage by stage, with nothing in flight.
        """
        self._verify_whole_trees(batch)
        owns = [own for group in batch.groups if (own := self._queueable(group)) is not None]
        if len(owns) < len(batch.groups) or sum(own.is_half for own in owns) > 1:
            is_ahead = any(group.ahead for group in batch.groups)
            return None if is_ahead else super().begin(batch)
        prompts: Callable[[], RunResult] = RunResult
        if batch.prefill:
            prompts = self._queue_prompts(batch)
        queued: dict[int, PendingStep] = {}
        votes = list[PendingVotes]()
        complete: Callable[[], object] = _no_more
        for place in sorted(range(len(owns)), key=lambda i: owns[i].is_half):
            own = owns[place]
            voters = self._votes.of_step(own.group)
            self._votes.begin(voters)
            inputs = self.inputs(own.group)
            queued[place] = self._queue_step(own, inputs)
            if own.is_half:
                complete = functools.partial(self._complete, queued, place, own, inputs)
            votes += self._votes.end(voters)

        def results() -> list[RunResult]:
            found = prompts()
            done = {place: step.result() for place, step in queued.items()}
            steps = [done[place] for place in range(len(done))]
            batch.note_verified(steps)
            scores = [
                logprobs_after(group.requests, step)
                for group, step in zip(batch.groups, steps, strict=True)
            ]
            read = [*found.votes, *read_votes(votes)]
            return [replace(found, steps=steps, votes=read, logprobs=scores)]

        return PendingBatch(results, complete)

    def run(self, batch: Batch) -> RunResult:
        """See `Runner.run`."""
        self._verify_whole_trees(batch)
        return super().run(batch)

    def wait(self) -> None:
        """See `Runner.wait`."""
        self._any_step.mark().synchronize()

    def inputs(self, group: StepGroup) -> StepInputs:
        """See `Runner.inputs`."""
        live = group.live
        if self._asks_confidence(group):
            live = live or (group.plan.num_nodes,) * len(group.requests)
        inputs = super().inputs(group)
        if not live:
            return inputs
        return inputs._replace(
            extra={**inputs.extra, "live": torch.tensor(live, dtype=torch.int32)}
        )

    @property
    def _any_step(self) -> CapturedStep:
        """A step, which knows what is queued on the device."""
        return cast("CapturedStep", next(iter(self._steps.values())))

    def _step_of(self, group: StepGroup) -> CapturedStep:
        return cast("CapturedStep", self._steps[group.plan.name])

    def _queue_prompts(self, batch: Batch) -> Callable[[], RunResult]:
        """Queue the passes of prompts; the seconds are those since the work before them ended."""
        step, begin_s = self._any_step, time.perf_counter()
        ends = self._prompts.begin(batch.prefill)()
        end = step.mark()

        def read() -> RunResult:
            end.synchronize()
            found = RunResult(**ends.result()._asdict())
            return replace(found, prefill_s=step.seconds_since(begin_s))

        return read

    def _advance(self, group: StepGroup) -> StepResult:
        step = self._step_of(group)
        if step.is_split or group.kept or (has_masks(group.requests) and not step.takes_masks):
            return super()._advance(group)
        return step.submit(self.inputs(group), extras=self._extras(step, group)).result()

    def _queueable(self, group: StepGroup) -> _QueuedGroup | None:
        """The step of a group, where it can be queued now."""
        step = self._step_of(group)
        if step.is_split or group.kept:
            return None
        if has_masks(group.requests) and not step.takes_masks:
            return None
        extras = self._extras(step, group)
        if any(group.ahead):
            carried = [s for s, more in zip(group.requests, group.ahead, strict=True) if more]
            blocks = [s.blocks[0] for s in group.requests]
            if not step.can_follow(blocks, carried, extras):
                return None
        return _QueuedGroup(step, group, extras)

    def _queue_step(self, own: _QueuedGroup, inputs: StepInputs) -> PendingStep:
        begin_s = time.perf_counter()
        step, group, extras = own
        self._prompts.catch_up(group)
        last, requests = self._last_queued, group.requests
        pending: PendingStep
        if last is not None and last.leads_to(own, inputs.block_table):
            pending = step.submit_next(len(requests), last.pending.places, extras)
        else:
            is_carried = [more > 0 for more in group.ahead] or [False] * len(requests)
            pending = step.submit(inputs, requests, is_carried, extras)
        pending = pending.since(begin_s)
        self._last_queued = _LastQueued(own, inputs.block_table, pending)
        return pending

    def _complete(
        self, queued: dict[int, PendingStep], place: int, own: _QueuedGroup, inputs: StepInputs
    ) -> None:
        """Queue what is left of a step, now that the one before it is committed.

        Args:
            queued: steps of its batch, in which the whole step takes its place.
            place: of its group.
            own: of its group.
            inputs: that it was queued with.
        """
        pending: PendingStep | None = queued[place].complete()
        if pending is None:
            # of another `LLM` on the same engine: it starts from what is committed
            requests = own.group.requests
            rows = self._rows.committed(requests)
            extras = self._extras(own.step, own.group)
            pending = own.step.submit(
                inputs._replace(rows=rows), requests, [False] * len(requests), extras
            )
            own = own._replace(extras=extras)
        self._last_queued = _LastQueued(own, inputs.block_table, pending)
        queued[place] = pending

    def _extras(self, step: CapturedStep, group: StepGroup) -> StepExtras | None:
        """What a step does besides; None is nothing."""
        is_scored, rules = wants_logprobs(group.requests), None
        threshold = self._threshold if self._asks_confidence(group) else 0.0
        num_rows = 0
        if group.live and not threshold:
            num_rows = step.pass_rows(len(group.requests), sum(group.live))
        if has_masks(group.requests) and step.takes_masks:
            proposals = group.extra.get("proposals")
            rules = MaskRules(group.requests, group.plan, proposals, self._link)
        extras = StepExtras(is_scored, rules, num_rows, threshold)
        return extras if any(extras) else None

    def _verify_whole_trees(self, batch: Batch) -> None:
        """Verify whole trees where a step takes no parts: with a hook, or stage by stage.

        What commits the batch, and who learns of it, counts what was verified.
        """
        for place, group in enumerate(batch.groups):
            if group.live and (group.kept or not self._step_of(group).takes_live):
                batch.groups[place] = replace(group, live=())

    def _asks_confidence(self, group: StepGroup) -> bool:
        """Whether a step asks its drafter how much to verify."""
        return (
            self._threshold > 0 and says_confidence(group.plan) and self._step_of(group).takes_live
        )


def _no_more() -> None:
    """All of a batch is queued."""
