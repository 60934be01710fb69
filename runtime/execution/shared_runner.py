"""Batches whose steps run stage by stage: prompts and all groups have one pass of the target.

Where the target has stages, other batches are begun while a pass is on its way, of requests that
have no part in this one; so what a batch reads of its requests stays the same until its end.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from torch import Tensor

from specc.runtime.backends.step import BegunStep, FinishStep, RepeatedStep, StagedStep, Step
from specc.runtime.backends.step_io import Drafted, StepInputs
from specc.runtime.constraints.grammar_masks import has_masks, hooked
from specc.runtime.execution.block_votes import read_votes
from specc.runtime.execution.draws import (
    Draws,
    drawn_step,
    drawn_steps,
    joined,
    prompt_draws,
    tree_draws,
)
from specc.runtime.execution.prompt_ends import PromptEnds, queue_ends
from specc.runtime.execution.prompts import as_drawn
from specc.runtime.execution.shared_pass import (
    FlatTokens,
    accepted_values,
    begin_together,
    span_tokens,
    tree_tokens,
)
from specc.runtime.outputs.step_logprobs import logprobs_after, wants_logprobs
from specc.runtime.runner import Runner
from specc.runtime.scheduling.batch import Batch, PendingBatch, RunResult, Span, StepGroup
from specc.speculation.confidence import ConfidentNodes
from specc.speculation.live_nodes import says_confidence

# plans and thresholds that are known at a time
_known = functools.lru_cache(maxsize=64)(ConfidentNodes)


class _Begun(NamedTuple):
    """A step of a shared pass that has drafted."""

    group: StepGroup
    step: StagedStep
    inputs: StepInputs
    drafted: Drafted
    draft_s: float


class _Apart(NamedTuple):
    """A step with a pass for itself."""

    group: StepGroup
    step: Step
    finish: FinishStep
    catch_up_s: float


class SharedRunner(Runner):
    """Runs engines of flat programs, whose steps are `StagedStep`s."""

    shares_pass = True

    def run(self, batch: Batch) -> RunResult:
        """See `Runner.run`."""
        return self._begin_shared(batch)() if self._is_shared(batch) else super().run(batch)

    def _is_shared(self, batch: Batch) -> bool:
        """More than one pass would be needed, and one can do; or not all nodes take part in it.

        Plans in tiles have passes of their own, and so have all others beside them: of whole trees.
        """
        groups = batch.groups
        if not self.shares_pass or not groups:
            return False
        if len(groups) == 1 and not batch.prefill and not self._is_cut(groups[0]):
            return False
        return all(group.plan.tile is None for group in groups)

    def _is_cut(self, group: StepGroup) -> bool:
        """Whether the target may verify a part of its trees."""
        return bool(group.live) or (self._threshold > 0 and says_confidence(group.plan))

    def _begin_shared(self, batch: Batch) -> Callable[[], RunResult]:
        """All drafts, and one pass of the target for everyone; then acceptance of each group."""
        self.num_shared_passes += 1
        drawn = drawn_steps(self._drawn, batch, self._steps)
        steps = drawn or [cast("StagedStep", self._steps[g.plan.name]) for g in batch.groups]
        if batch.prefill:
            self._prompts.before_pass(batch.prefill)
        parts: list[FlatTokens] = []
        begun: list[_Begun] = []
        draws: list[Draws] = []
        if batch.prefill:
            if drawn:
                draws.append(prompt_draws(batch.prefill))
            table = self._cache.block_table([s.request.blocks for s in batch.prefill])
            parts.append(span_tokens(batch.prefill, table, self._cache.states is not None))
        for place, step in enumerate(steps):
            group = batch.groups[place]
            begin_s = time.perf_counter()
            self._prompts.catch_up(group)
            inputs = self.inputs(group)
            drafted = step.draft(inputs, self._cache.environment)
            if self._threshold and says_confidence(group.plan):
                # what commits the batch, and who learns of it, counts what was verified
                group = cut_unlikely(group, drafted.values["confidence"], self._threshold)
                batch.groups[place] = group
            begun.append(_Begun(group, step, inputs, drafted, time.perf_counter() - begin_s))
            parts.append(tree_tokens(group.plan, inputs, drafted, group.live))
            if drawn:
                draws.append(tree_draws(parts[-1], inputs.sampling_values, inputs.sampling_words))
        begin_s = time.perf_counter()
        target = self._prompts.begin_drawn(joined(draws)) if drawn else self._prompts.begin_target
        voters, num_rows = self._votes.of_batch(batch)
        mass = self._votes.mass(voters, num_rows)
        taken = begin_together(target, parts, self._cache.device, mass)
        begun_s = time.perf_counter() - begin_s
        num_tokens = sum(len(part.tokens) for part in parts)

        def finish() -> RunResult:
            wait_s = time.perf_counter()
            found_rows = taken()
            # what other batches did meanwhile is theirs
            pass_s = begun_s + time.perf_counter() - wait_s
            if batch.prefill:
                self._prompts.after_pass(batch.prefill)
            result = RunResult(prefill_s=pass_s * _length(batch) / num_tokens, pass_s=pass_s)
            votes = self._votes.fetch(voters, mass)
            if batch.prefill:
                draw = as_drawn if drawn else self._prompts.first_tokens
                ends = queue_ends(batch.prefill, found_rows.pop(0), draw, self._link)
                result = replace(result, **ends.result()._asdict())
            for one, rows in zip(begun, found_rows, strict=True):
                begin_s = time.perf_counter()
                group = one.group
                values = accepted_values(group.plan, rows, one.inputs, one.drafted, group.live)
                accept = functools.partial(one.drafted.accept, values)
                wanted = self._kept.wanted(group)
                found = hooked(one.step, group.requests, accept, wanted)
                self._kept.end(group, found)
                verify_s = pass_s * len(rows) / num_tokens
                accept_s = time.perf_counter() - begin_s
                stage_s = {"draft": one.draft_s, "verify": verify_s, "accept_commit": accept_s}
                found = found._replace(stage_s=stage_s)
                result.steps.append(found)
                result.logprobs.append(logprobs_after(one.group.requests, found))
            result.votes.extend(read_votes(votes))
            return result

        return finish


class StagedRunner(SharedRunner):
    """A `SharedRunner` of a target in stages: batches are begun before others are done."""

    def begin(self, batch: Batch, count: int = 1) -> PendingBatch:
        """See `Runner.begin`."""
        begin = self._begin_shared if self._is_shared(batch) else self._begin_apart
        finish = begin(batch)
        return PendingBatch(lambda: [finish()])

    def run(self, batch: Batch) -> RunResult:
        """See `Runner.run`."""
        (result,) = self.begin(batch).results()
        return result

    def _begin_apart(self, batch: Batch) -> Callable[[], RunResult]:
        """A pass for the prompts and passes of each group."""
        prompts = self._begin_prompts(batch.prefill) if batch.prefill else None
        begun = []
        for group in batch.groups:
            begin_s = time.perf_counter()
            self._prompts.catch_up(group)
            catch_up_s = time.perf_counter() - begin_s
            step = drawn_step(self._drawn, group, self._steps) or self._steps[group.plan.name]
            finish = cast("BegunStep", step).begin(self.inputs(group), self._cache.environment)
            begun.append(_Apart(group, step, finish, catch_up_s))

        def finish_all() -> RunResult:
            result = RunResult()
            if prompts is not None:
                ends, prefill_s = prompts()
                result = RunResult(**ends._asdict(), prefill_s=prefill_s)
            for one in begun:
                wanted = self._kept.wanted(one.group)
                found = hooked(one.step, one.group.requests, one.finish, wanted)
                self._kept.end(one.group, found)
                if "draft" in found.stage_s:
                    found.stage_s["draft"] += one.catch_up_s
                result.steps.append(found)
                result.logprobs.append(logprobs_after(one.group.requests, found))
            return result

        return finish_all

    def _begin_prompts(self, spans: list[Span]) -> Callable[[], tuple[PromptEnds, float]]:
        """Begin the pass of some prompts; returns what waits for it, and for its seconds."""
        begin_s = time.perf_counter()
        ends = self._prompts.begin(spans)
        begun_s = time.perf_counter() - begin_s

        def finish() -> tuple[PromptEnds, float]:
            wait_s = time.perf_counter()
            found = ends().result()
            return found, begun_s + time.perf_counter() - wait_s

        return finish


class RepeatedRunner(SharedRunner):
    """A `SharedRunner` of `RepeatedStep`s, which follow each other in one call."""

    def begin(self, batch: Batch, count: int = 1) -> PendingBatch | None:
        """See `Runner.begin`.

        Steps end early with one that brings a request a token that ends its output.
        """
        if count == 1:
            return super().begin(batch)
        return PendingBatch(lambda: self._repeat(batch, count), is_queued=False)

    def can_repeat(self, batch: Batch) -> bool:
        """See `Runner.can_repeat`; grammars, controls, log probabilities and votes need each."""
        group = batch.groups[0]
        return (
            len(batch.groups) == 1
            and not group.plan.chooses_blocks
            and not has_masks(group.requests)
            and not wants_logprobs(group.requests)
            and not self._is_shared(batch)
            # how much these have seen is the host's to say
            and not (self._cache.draft_states and group.plan.models)
            and self._steps[group.plan.name].before_accept is None
        )

    def _repeat(self, batch: Batch, count: int) -> list[RunResult]:
        group = batch.groups[0]
        begin_s = time.perf_counter()
        if group.plan.models:
            self._prompts.catch_up(group)
        catch_up_s = time.perf_counter() - begin_s
        step = cast("RepeatedStep", self._steps[group.plan.name])
        ends = sorted({token for request in group.requests for token in request.end_token_ids})
        steps = step.advance_often(self.inputs(group), self._cache.environment, count, ends)
        if "draft" in (stage_s := steps[0].stage_s):
            stage_s["draft"] += catch_up_s
        return [RunResult(steps=[one], logprobs=[None]) for one in steps]


def _length(batch: Batch) -> int:
    """Tokens of its prompts."""
    return sum(span.end - span.start for span in batch.prefill)


def cut_unlikely(group: StepGroup, confidence: Tensor, threshold: float) -> StepGroup:
    """The group with as many live nodes as are likely, and no more than it had.

    Args:
        group: that has drafted.
        confidence: [B, F] of its nodes with children, on the host.
        threshold: see `ConfidentNodes`.
    """
    found: Sequence[int] = _known(group.plan, threshold)(confidence).tolist()
    return group.ended(found)
