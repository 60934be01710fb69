"""Runs a batch: builds the inputs of each pass, calls the programs, reads the results."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from specc.runtime.backends.captured.step_scores import StepExtras
from specc.runtime.backends.step import Model, PendingStep, QueuedStep, RepeatedStep, Step
from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.constraints.grammar_masks import has_masks
from specc.runtime.constraints.mask_rules import MaskRules
from specc.runtime.execution.batch_rows import BatchRows, last_tokens_of
from specc.runtime.execution.begun_batch import BegunBatches
from specc.runtime.execution.block_votes import BlockVotes, PendingVotes, read_votes
from specc.runtime.execution.can_draw import drawn_step
from specc.runtime.execution.device_link import DeviceLink, HostLink
from specc.runtime.execution.draws import DrawnPrograms, StagedModel
from specc.runtime.execution.hooked_step import hooked, logprobs_after
from specc.runtime.execution.prompt_ends import PendingEnds
from specc.runtime.execution.prompts import Prompts
from specc.runtime.execution.queued_group import LastQueued, QueuedGroup
from specc.runtime.outputs.step_logprobs import wants_logprobs
from specc.runtime.scheduling.batch import (
    Batch,
    DeviceBatch,
    PendingBatch,
    PendingPrefill,
    RunResult,
    Span,
    StepGroup,
)
from specc.runtime.scheduling.kv_cache import KVCache
from specc.speculation.live_nodes import says_confidence
from specc.speculation.plans import SpecPlan, blocks_of, heads_of


class Runner:
    """Runs the programs of an engine over its caches.

    Args:
        target: the target's program.
        drafts: programs of the drafts, draft_0 first.
        steps: plan name → step program.
        cache: that all programs are bound to.
        prefill_chunk: tokens of a causal pass at most.
        operators: namespace of the `specc::` operators that run here.
        shares_pass: prompts and all groups go through the target together; for programs of flat
            tokens and steps that run stage by stage.
        link: to the device of the programs; None is the host.
        drawn: for batches whose tokens the target draws; None where it cannot.
        staged: the target, where it has stages: batches are begun before others are done.
        threshold: see `BegunBatches`; of steps that share a pass, or that a device replays.
    """

    def __init__(
        self,
        target: Model,
        drafts: list[Model],
        steps: Mapping[str, Step],
        cache: KVCache,
        prefill_chunk: int,
        operators: Any = torch.ops.specc,
        shares_pass: bool = False,
        link: HostLink | DeviceLink | None = None,
        drawn: DrawnPrograms | None = None,
        staged: StagedModel | None = None,
        threshold: float = 0.0,
    ) -> None:
        self.shares_pass = shares_pass
        # passes of the target that prompts or several plans had together, or without dead nodes
        self.num_shared_passes = 0
        self._steps = steps
        self._cache = cache
        self._staged = staged
        self._link = link or HostLink()
        self._drawn = drawn
        self._rows = BatchRows(cache, last_tokens_of(step.plan for step in steps.values()))
        self._votes = BlockVotes(cache, self._link)
        self._prompts = Prompts(
            target, drafts, cache, prefill_chunk, operators, self._link, self._votes, drawn, staged,
            heads_of(step.plan for step in steps.values()),
            blocks_of(step.plan for step in steps.values()),
        )  # fmt: skip
        self._begun = BegunBatches(
            steps, cache, self._prompts, self._rows, self._votes, self._link, drawn, threshold
        )
        self._threshold = threshold
        self._last_queued: LastQueued | None = None

    def run(self, batch: Batch) -> RunResult:
        """Prefill, then one step for each group; requests are read, never changed."""
        self._leave_whole(batch)
        if (begun := self._begin(batch)) is not None:
            return begun.result()
        result = RunResult()
        if batch.prefill:
            begin = time.perf_counter()
            found = self.queue_prefill(batch.prefill).result()
            result = RunResult(**found._asdict(), prefill_s=time.perf_counter() - begin)
        for group in batch.groups:
            if group.plan.chooses_blocks:
                voters = self._votes.of_step(group)
                self._votes.begin(voters)
                step = self._step(group)
                result.votes.extend(read_votes(self._votes.end(voters)))
            else:
                step = self._step(group)
            result.steps.append(step)
            result.logprobs.append(logprobs_after(group, step))
        batch.note_verified(result.steps)
        return result

    def run_in_a_row(self, batch: Batch, count: int) -> list[RunResult]:
        """`run`, and the batch's only step again, each time from where the last one has ended.

        It ends early where a token ends the output of a request, and after the first step where
        somebody has a part in each (grammars, controls, log probabilities, votes of self-drafts,
        other ranks), or the step cannot be repeated.

        Args:
            batch: without prompts, of one plan, for which the host brings nothing.
            count: steps, 1 or more.
        Returns:
            of each step that ran.
        """
        group = batch.groups[0]
        if count == 1 or (repeated := self._repeated(batch)) is None:
            return [self.run(batch)]
        begin_s = time.perf_counter()
        if group.plan.models:
            self._prompts.catch_up(group)
        catch_up_s = time.perf_counter() - begin_s
        ends = sorted({token for request in group.requests for token in request.end_token_ids})
        inputs = self._inputs(group)
        steps = repeated.advance_often(inputs, self._cache.environment, count, ends)
        if "draft" in (stage_s := steps[0].stage_s):
            stage_s["draft"] += catch_up_s
        return [RunResult(steps=[step], logprobs=[None]) for step in steps]

    def can_repeat(self, batch: Batch) -> bool:
        """Whether steps of a batch can follow each other, as far as those are concerned."""
        return len(batch.groups) == 1 and self._repeated(batch) is not None

    def _repeated(self, batch: Batch) -> RepeatedStep | None:
        """The step of a batch's only group, where nobody has a part in what comes between two."""
        group = batch.groups[0]
        if (
            self._drawn is not None
            or self._staged is not None
            or group.plan.chooses_blocks
            or has_masks(group.requests)
            or wants_logprobs(group.requests)
            or self._is_shared(batch)
        ):
            return None
        return self._steps[group.plan.name].repeated

    def queue(self, batch: Batch) -> PendingBatch | None:
        """Queue a batch and return before it is done; None where only `run` can run it.

        That is one with a step that has a hook, and every program that the host itself runs, but
        for a target in stages. Where results of its requests are on their way, it is None for steps
        that are not replayed, too: they could wait while the results are ready to be read. Of steps
        whose masks or live nodes follow from these results, one is queued, and the last of all: up
        to its verification, or to the first pass of a draft that obeys a grammar;
        `PendingBatch.complete` makes the masks and queues the rest. Where a batch has several of
        these, the results come first.
        """
        if self._staged is not None:
            return self._begin(batch)
        if (any_step := self._any_queued) is None:
            return None
        self._leave_whole(batch)
        owns = [own for group in batch.groups if (own := self._queueable(group)) is not None]
        if len(owns) < len(batch.groups) or sum(own.is_half for own in owns) > 1:
            return None
        read: Callable[[], RunResult] = RunResult
        if batch.prefill:
            begin_s = time.perf_counter()
            ends = self.queue_prefill(batch.prefill)
            prompts = PendingPrefill(
                any_step, any_step.mark(), begin_s, lambda: RunResult(**ends.result()._asdict())
            )
            read = prompts.result
        queued: dict[int, PendingStep] = {}
        votes = list[PendingVotes]()
        complete: Callable[[], object] = _no_more
        for place in sorted(range(len(owns)), key=lambda i: owns[i].is_half):
            own = owns[place]
            voters = self._votes.of_step(own.group)
            self._votes.begin(voters)
            inputs = self._inputs(own.group)
            queued[place] = self._queue_step(own, inputs)
            if own.is_half:
                complete = functools.partial(self._complete, queued, place, own, inputs)
            votes += self._votes.end(voters)
        pending = DeviceBatch(read, queued, functools.partial(read_votes, votes))
        return PendingBatch(functools.partial(_finish, batch, pending), complete)

    def wait(self) -> None:
        """Wait until the device is done with all that was queued."""
        if (step := self._any_queued) is not None:
            step.mark().synchronize()

    @property
    def _any_queued(self) -> QueuedStep | None:
        """A step of the device, which knows what is queued there; None where all runs here."""
        return next((step.queued for step in self._steps.values()), None)

    def _queueable(self, group: StepGroup) -> QueuedGroup | None:
        """The step of a group, where it can be queued now."""
        step = self._steps[group.plan.name].queued
        if step is None or step.is_split:
            return None
        if has_masks(group.requests) and not step.takes_masks:
            return None
        extras = self._extras(step, group)
        if any(group.ahead):
            carried = [s for s, more in zip(group.requests, group.ahead, strict=True) if more]
            blocks = [s.blocks[0] for s in group.requests]
            if not step.can_follow(blocks, carried, extras):
                return None
        return QueuedGroup(step, group, extras)

    def _queue_step(self, own: QueuedGroup, inputs: StepInputs) -> PendingStep:
        begin_s = time.perf_counter()
        step, group, extras = own
        self._prompts.catch_up(group)
        last, requests = self._last_queued, group.requests
        if last is not None and last.leads_to(own, inputs.block_table):
            pending = step.submit_next(len(requests), last.pending.places, extras)
        else:
            is_carried = [more > 0 for more in group.ahead] or [False] * len(requests)
            pending = step.submit(inputs, requests, is_carried, extras)
        pending = pending.since(begin_s)
        self._last_queued = LastQueued(own, inputs.block_table, pending)
        return pending

    def _complete(
        self, queued: dict[int, PendingStep], place: int, own: QueuedGroup, inputs: StepInputs
    ) -> None:
        """Queue what is left of a step, now that the one before it is committed.

        Args:
            queued: steps of its batch, in which the whole step takes its place.
            place: of its group.
            own: of its group.
            inputs: that it was queued with.
        """
        pending = queued[place].complete()
        if pending is None:
            # of another `LLM` on the same engine: it starts from what is committed
            requests = own.group.requests
            rows = self._rows.committed(requests)
            extras = self._extras(own.step, own.group)
            pending = own.step.submit(
                inputs._replace(rows=rows), requests, [False] * len(requests), extras
            )
            own = own._replace(extras=extras)
        self._last_queued = LastQueued(own, inputs.block_table, pending)
        queued[place] = pending

    def _extras(self, step: QueuedStep, group: StepGroup) -> StepExtras | None:
        """What a step of the device does besides; None is nothing."""
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

    def _leave_whole(self, batch: Batch) -> None:
        """Verify whole trees where a device runs steps that take no parts: those with a hook.

        What commits the batch, and who learns of it, counts what was verified.
        """
        for place, group in enumerate(batch.groups):
            step = self._steps[group.plan.name].queued
            if group.live and step is not None and not step.takes_live:
                batch.groups[place] = replace(group, live=())

    def _begin(self, batch: Batch) -> PendingBatch | None:
        """Begin a batch whose steps run stage by stage here; None where they run as wholes."""
        if self._is_shared(batch):
            self.num_shared_passes += 1
            return self._begun.begin_shared(batch)
        return None if self._staged is None else self._begun.begin_apart(batch)

    def _is_shared(self, batch: Batch) -> bool:
        """More than one pass would be needed, and one can do; or not all nodes take part in it.

        Plans in tiles have passes of their own, and so have all others beside them: of whole trees.
        """
        return (
            self.shares_pass
            and bool(batch.groups)
            and (
                len(batch.groups) + bool(batch.prefill) > 1
                or any(group.live for group in batch.groups)
                or any(self._may_cut(group.plan) for group in batch.groups)
            )
            and all(self._steps[group.plan.name].plan.tile is None for group in batch.groups)
        )

    def _may_cut(self, plan: SpecPlan) -> bool:
        """Whether what is drafted may say that not all nodes take part."""
        return self._threshold > 0 and says_confidence(plan)

    def _asks_confidence(self, group: StepGroup) -> bool:
        """Whether a step that a device replays asks its drafter how much to verify."""
        step = self._steps[group.plan.name].queued
        return step is not None and step.takes_live and self._may_cut(group.plan)

    def queue_prefill(self, spans: list[Span]) -> PendingEnds:
        """Queue the passes of some prompts; on a device nothing waits for it until the result."""
        return self._prompts.begin(spans)()

    def _step(self, group: StepGroup) -> StepResult:
        step = self._steps[group.plan.name]
        if not group.plan.models:
            return self._advance(step, group)
        begin = time.perf_counter()
        self._prompts.catch_up(group)
        catch_up_s = time.perf_counter() - begin
        result = self._advance(step, group)
        stage = "step" if "step" in result.stage_s else "draft"
        if stage in result.stage_s:
            result.stage_s[stage] += catch_up_s
        return result

    def _advance(self, step: Step, group: StepGroup) -> StepResult:
        inputs, slabs = self._inputs(group), self._cache.environment
        if (drawn := drawn_step(self._drawn, group, self._steps)) is not None:
            return drawn.advance(inputs, slabs)
        queued = step.queued
        if (
            queued is not None
            and not queued.is_split
            and (queued.takes_masks or not has_masks(group.requests))
        ):
            return queued.submit(inputs, extras=self._extras(queued, group)).result()
        return hooked(step, group, lambda reads: step.advance(inputs, slabs, reads))

    def _inputs(self, group: StepGroup) -> StepInputs:
        extra, live = group.extra, group.live
        if self._asks_confidence(group):
            live = live or (group.plan.num_nodes,) * len(group.requests)
        if live and self._steps[group.plan.name].queued is not None:
            extra = {**extra, "live": torch.tensor(live, dtype=torch.int32)}
        inputs = self._rows.inputs(group.requests, extra, group.ahead)
        masks = DraftMasks.of(group.requests, group.plan)
        return inputs if masks is None else inputs._replace(mask_drafts=masks)


def _no_more() -> None:
    """All of a batch is queued."""


def _finish(batch: Batch, pending: DeviceBatch) -> RunResult:
    """The result of a batch that was queued; waits for it."""
    found = pending.result()
    batch.note_verified(found.steps)
    scores = [logprobs_after(*item) for item in zip(batch.groups, found.steps, strict=True)]
    return replace(found, logprobs=scores)
