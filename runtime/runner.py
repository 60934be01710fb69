"""Runs a batch: builds the inputs of each pass, calls the programs, reads the results.

One protocol for every engine: `begin(batch)` returns a `PendingBatch`, whose `results` waits for
it. `Runner` runs pass after pass; `SharedRunner`, `StagedRunner`, `RepeatedRunner` and
`CapturedRunner` are what else steps allow. `Engine.runner_type` is the one of an engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specc.runtime.backends.step import Model, Step
from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.constraints.grammar_masks import hooked
from specc.runtime.execution.batch_rows import BatchRows, last_tokens_of
from specc.runtime.execution.block_votes import BlockVotes, read_votes
from specc.runtime.execution.draws import BegunModel, DrawnPrograms, drawn_step
from specc.runtime.execution.kept_states import KeptStates
from specc.runtime.execution.link import HostLink, Link
from specc.runtime.execution.prompts import Prompts
from specc.runtime.execution.state_rows import states_of_drafts
from specc.runtime.outputs.step_logprobs import logprobs_after
from specc.runtime.scheduling.batch import Batch, PendingBatch, RunResult, StepGroup
from specc.runtime.scheduling.kv_cache import KVCache
from specc.speculation.plans import models_of


class Runner:
    """Runs the programs of an engine over its caches, one pass after the other.

    Args:
        target: the target's program.
        drafts: programs of the drafts, draft_0 first.
        steps: plan name → step program.
        cache: that all programs are bound to.
        prefill_chunk: tokens of a causal pass at most.
        operators: namespace of the `specc::` operators that run here.
        link: to the device of the programs; None is the host.
        drawn: for batches whose tokens the target draws; None where it cannot.
        staged: the target, where it has stages.
        threshold: least probability of a draft token that is verified, where drafts say it and the
            target can verify a part of a tree; 0 verifies all.
    """

    # prompts and the steps of all plans go through the target together
    shares_pass = False
    # passes that did
    num_shared_passes = 0
    # batch sizes that are captured, ascending
    graph_sizes: Sequence[int] = ()

    def __init__(
        self,
        target: Model,
        drafts: list[Model],
        steps: Mapping[str, Step],
        cache: KVCache,
        prefill_chunk: int,
        operators: Any = torch.ops.specc,
        link: Link | None = None,
        drawn: DrawnPrograms | None = None,
        staged: BegunModel | None = None,
        threshold: float = 0.0,
    ) -> None:
        self._steps = steps
        self._cache = cache
        self._link = link or HostLink()
        self._drawn = drawn
        self._threshold = threshold
        self._rows = BatchRows(cache, last_tokens_of(step.plan for step in steps.values()))
        self._votes = BlockVotes(cache, self._link)
        self._kept = KeptStates(cache, operators, self._link)
        drafters = models_of(step.plan for step in steps.values())
        self._prompts = Prompts(
            target, drafts, cache, prefill_chunk, operators, self._link, self._votes, drawn, staged,
            {i: x for i, x in drafters.items() if x.facts.reads_hidden},
        )  # fmt: skip

    def begin(self, batch: Batch, count: int = 1) -> PendingBatch | None:
        """Begin a batch; requests are read, never changed.

        Args:
            batch: of the scheduler.
            count: times that its steps run, at most; more than 1 where `can_repeat` says so.
        Returns:
            None where results of its requests are on their way, and have to be read first.
        """
        return PendingBatch(lambda: [self.run(batch)], is_queued=False)

    def can_repeat(self, batch: Batch) -> bool:
        """Whether nothing but tokens, positions and rows changes between two steps of a batch."""
        return False

    def wait(self) -> None:
        """Wait until the device is done with all that was queued."""

    def run(self, batch: Batch) -> RunResult:
        """Prefill, then one step for each group."""
        result = RunResult()
        if batch.prefill:
            begin_s = time.perf_counter()
            found = self._prompts.begin(batch.prefill)().result()
            result = RunResult(**found._asdict(), prefill_s=time.perf_counter() - begin_s)
        for group in batch.groups:
            if group.plan.chooses_blocks:
                voters = self._votes.of_step(group)
                self._votes.begin(voters)
                step = self._step(group)
                result.votes.extend(read_votes(self._votes.end(voters)))
            else:
                step = self._step(group)
            result.steps.append(step)
            result.logprobs.append(logprobs_after(group.requests, step))
        batch.note_verified(result.steps)
        return result

    def inputs(self, group: StepGroup) -> StepInputs:
        """What a group brings to its step, which comes next."""
        extra = group.extra
        if self._cache.draft_states:
            extra = {**extra, **states_of_drafts(group, self._cache.draft_states)}
        inputs = self._rows.inputs(group.requests, extra, group.ahead)
        inputs = self._kept.begin(group, inputs)
        masks = DraftMasks.of(group.requests, group.plan)
        return inputs if masks is None else inputs._replace(mask_drafts=masks)

    def _step(self, group: StepGroup) -> StepResult:
        if not group.plan.models:
            return self._advance(group)
        begin_s = time.perf_counter()
        self._prompts.catch_up(group)
        catch_up_s = time.perf_counter() - begin_s
        result = self._advance(group)
        stage = "step" if "step" in result.stage_s else "draft"
        if stage in result.stage_s:
            result.stage_s[stage] += catch_up_s
        return result

    def _advance(self, group: StepGroup) -> StepResult:
        inputs, slabs = self.inputs(group), self._cache.environment
        if self._drawn is not None:
            drawn = drawn_step(self._drawn, group, self._steps)
            if drawn is not None:
                return drawn.advance(inputs, slabs)
        step = self._steps[group.plan.name]
        wanted = self._kept.wanted(group)
        result = hooked(
            step, group.requests, lambda reads: step.advance(inputs, slabs, reads), wanted
        )
        self._kept.end(group, result)
        return result
