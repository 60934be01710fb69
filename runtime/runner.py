"""Runs a batch: builds the inputs of each pass, calls the programs, reads the results."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.runtime.backends.captured.step_scores import StepExtras
from specc.runtime.backends.step import Model, PendingStep, QueuedStep, StagedStep, Step
from specc.runtime.backends.step_io import Drafted, StepInputs, StepResult, draft_lens_of
from specc.runtime.constraints.grammar_masks import TreeMasks, has_masks
from specc.runtime.constraints.mask_rules import MaskRules
from specc.runtime.execution.batch_rows import BatchRows, last_tokens_of
from specc.runtime.execution.block_votes import BlockVotes, PendingVotes, read_votes
from specc.runtime.execution.can_draw import can_draw_prompts, drawn_step, drawn_steps
from specc.runtime.execution.device_link import DeviceLink, HostLink
from specc.runtime.execution.draws import (
    DrawnPrograms,
    Draws,
    joined,
    prompt_draws,
    tree_draws,
)
from specc.runtime.execution.pass_inputs import PassInputs, causal_inputs, split_spans
from specc.runtime.execution.prompt_ends import PendingEnds, first_tokens, queue_ends
from specc.runtime.execution.shared_pass import (
    FlatTokens,
    accepted_values,
    logit_rows,
    run_together,
    span_tokens,
    tree_tokens,
)
from specc.runtime.outputs.logprobs import TokenLogprobs
from specc.runtime.outputs.step_logprobs import emitted_logprobs, step_logprobs, wants_logprobs
from specc.runtime.scheduling.batch import (
    Batch,
    PendingBatch,
    PendingPrefill,
    RunResult,
    Span,
    StepGroup,
)
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.request import Request


class _Last(NamedTuple):
    """The step that was queued last, and the block table that it had."""

    group: StepGroup
    table: Tensor
    pending: PendingStep


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
    ) -> None:
        self.shares_pass = shares_pass
        # passes of the target that prompts or several plans had together
        self.num_shared_passes = 0
        self._target = target
        self._drafts = drafts
        self._steps = steps
        self._cache = cache
        self._prefill_chunk = prefill_chunk
        self._operators = operators
        self._link = link or HostLink()
        self._drawn = drawn
        self._rows = BatchRows(cache, last_tokens_of(step.plan for step in steps.values()))
        self._votes = BlockVotes(cache, self._link)
        self._last_queued: _Last | None = None

    def run(self, batch: Batch) -> RunResult:
        """Prefill, then one step for each group; requests are read, never changed."""
        if self._is_shared(batch):
            return self._run_shared(batch)
        result = RunResult()
        if batch.prefill:
            begin = time.perf_counter()
            found = self.queue_prefill(batch.prefill).result()
            result = RunResult(**found._asdict(), prefill_s=time.perf_counter() - begin)
        for group in batch.groups:
            voters = self._votes.of_step(group)
            self._votes.begin(voters)
            step = self._step(group)
            result.votes.extend(read_votes(self._votes.end(voters)))
            result.steps.append(step)
            result.logprobs.append(self._logprobs(group, step))
        return result

    def queue(self, batch: Batch) -> PendingBatch | None:
        """Queue a batch and return before it is done; None where only `run` can run it.

        That is one with a step that has a hook or masks, and every program that the host itself
        runs. Where results of its requests are on their way, it is None for steps that do not run
        as one graph, too: they could wait while the results are ready to be read.
        """
        if (any_step := self._any_queued) is None:
            return None
        steps = [step for group in batch.groups if (step := self._queueable(group)) is not None]
        if len(steps) < len(batch.groups):
            return None
        read: Callable[[], RunResult] = RunResult
        if batch.prefill:
            begin_s = time.perf_counter()
            ends = self.queue_prefill(batch.prefill)
            prompts = PendingPrefill(
                any_step, any_step.mark(), begin_s, lambda: RunResult(**ends.result()._asdict())
            )
            read = prompts.result
        queued, votes = [], list[PendingVotes]()
        for step, group in zip(steps, batch.groups, strict=True):
            voters = self._votes.of_step(group)
            self._votes.begin(voters)
            queued.append(self._queue_step(step, group))
            votes += self._votes.end(voters)
        return PendingBatch(read, queued, functools.partial(read_votes, votes))

    def wait(self) -> None:
        """Wait until the device is done with all that was queued."""
        if (step := self._any_queued) is not None:
            step.mark().synchronize()

    @property
    def _any_queued(self) -> QueuedStep | None:
        """A step of the device, which knows what is queued there; None where all runs here."""
        return next((step.queued for step in self._steps.values()), None)

    def _queueable(self, group: StepGroup) -> QueuedStep | None:
        """The step of a group, where it can be queued now."""
        step = self._steps[group.plan.name].queued
        if step is None or step.is_split or has_masks(group.requests):
            return None
        if any(group.ahead):
            carried = [s for s, more in zip(group.requests, group.ahead, strict=True) if more]
            blocks = [s.blocks[0] for s in group.requests]
            if not step.can_follow(blocks, carried, self._extras(step, group)):
                return None
        return step

    def _queue_step(self, step: QueuedStep, group: StepGroup) -> PendingStep:
        begin_s = time.perf_counter()
        self._catch_up(group)
        inputs, extras = self._inputs(group), self._extras(step, group)
        last, requests = self._last_queued, group.requests
        goes_on = (
            last is not None
            and all(group.ahead or [0])
            and (last.group.plan, last.group.requests) == (group.plan, requests)
            and last.table is inputs.block_table
            and last.pending.can_go_on
        )
        if last is not None and goes_on:
            pending = step.submit_next(len(requests), last.pending.places)
        else:
            is_carried = [more > 0 for more in group.ahead] or [False] * len(requests)
            pending = step.submit(inputs, requests, is_carried, extras)
        self._last_queued = _Last(group, inputs.block_table, pending)
        return pending.since(begin_s)

    def finish(self, batch: Batch, pending: PendingBatch) -> RunResult:
        """The result of a batch that was queued; waits for it."""
        found = pending.result()
        scores = [self._logprobs(*item) for item in zip(batch.groups, found.steps, strict=True)]
        return replace(found, logprobs=scores)

    def _extras(self, step: QueuedStep, group: StepGroup) -> StepExtras | None:
        """What a step of the device does besides; None is nothing."""
        is_scored, rules = wants_logprobs(group.requests), None
        if has_masks(group.requests) and step.takes_masks:
            proposals = group.extra.get("proposals")
            rules = MaskRules(group.requests, group.plan, proposals, self._link)
        return StepExtras(is_scored, rules) if is_scored or rules else None

    def _is_shared(self, batch: Batch) -> bool:
        """More than one pass would be needed, and one can do."""
        steps = [self._steps[group.plan.name] for group in batch.groups]
        return (
            self.shares_pass
            and bool(batch.groups)
            and len(batch.groups) + bool(batch.prefill) > 1
            and all(step.plan.tile is None for step in steps)
        )

    def _run_shared(self, batch: Batch) -> RunResult:
        """All drafts, one pass of the target for everyone, then acceptance of each group."""
        self.num_shared_passes += 1
        drawn = drawn_steps(self._drawn, batch, self._steps)
        steps = drawn or [self._staged(group) for group in batch.groups]
        if batch.prefill:
            self._begin_prefill(batch.prefill)
        parts: list[FlatTokens] = []
        begun: list[tuple[StepInputs, Drafted, float]] = []
        draws: list[Draws] = []
        if batch.prefill:
            if drawn:
                draws.append(prompt_draws(batch.prefill))
            table = self._cache.block_table([s.request.blocks for s in batch.prefill])
            parts.append(span_tokens(batch.prefill, table))
        for group, step in zip(batch.groups, steps, strict=True):
            begin_s = time.perf_counter()
            self._catch_up(group)
            inputs = self._inputs(group)
            drafted = step.draft(inputs, self._cache.environment)
            begun.append((inputs, drafted, time.perf_counter() - begin_s))
            parts.append(tree_tokens(group.plan, inputs, drafted))
            if drawn:
                draws.append(tree_draws(parts[-1], inputs.sampling_values, inputs.sampling_words))
        begin_s = time.perf_counter()
        target = self._draws(joined(draws)) if drawn else self._target
        voters, num_rows = self._votes.of_batch(batch)
        mass = self._votes.mass(voters, num_rows)
        found_rows = run_together(target, parts, self._cache.device, mass)
        pass_s = time.perf_counter() - begin_s
        num_tokens = sum(len(part.tokens) for part in parts)
        prefill_s = pass_s * sum(s.end - s.start for s in batch.prefill) / num_tokens
        result = RunResult(prefill_s=prefill_s, pass_s=pass_s)
        votes = self._votes.fetch(voters, mass)
        if batch.prefill:
            draw = _as_drawn if drawn else self._first_tokens
            ends = queue_ends(batch.prefill, found_rows.pop(0), draw, self._link)
            result = replace(result, **ends.result()._asdict())
        groups = zip(batch.groups, steps, begun, found_rows, strict=True)
        for group, step, (inputs, drafted, draft_s), rows in groups:
            begin_s = time.perf_counter()
            values = accepted_values(group.plan, rows, inputs)
            found = self._hooked(step, group, functools.partial(drafted.accept, values))
            verify_s = pass_s * len(rows) / num_tokens
            accept_s = time.perf_counter() - begin_s
            stage_s = {"draft": draft_s, "verify": verify_s, "accept_commit": accept_s}
            found = found._replace(stage_s=stage_s)
            result.steps.append(found)
            result.logprobs.append(self._logprobs(group, found))
        result.votes.extend(read_votes(votes))
        return result

    def _staged(self, group: StepGroup) -> StagedStep:
        step = self._steps[group.plan.name].staged
        assert step is not None, "a pass is shared by steps that have stages"
        return step

    @torch.inference_mode()
    def queue_prefill(self, spans: list[Span]) -> PendingEnds:
        """Queue the passes of some prompts; on a device nothing waits for it until the result."""
        with self._link.active():
            inputs = self._begin_prefill(spans).of_model
            voters = self._votes.of_spans(spans)
            mass = self._votes.mass(voters, len(spans))
            given = (*inputs, *([] if mass is None else [mass]))
            if self._drawn is not None and can_draw_prompts(spans):
                tokens = self._draws(prompt_draws(spans))(*given)
                votes = self._votes.fetch(voters, mass)
                return queue_ends(spans, tokens, _as_drawn, self._link, votes)
            logits = self._target(*given)
            votes = self._votes.fetch(voters, mass)
            return queue_ends(spans, logits, self._first_tokens, self._link, votes)

    def _draws(self, draws: Draws) -> Callable[..., Tensor]:
        """The target, which yields tokens."""
        assert self._drawn is not None
        return functools.partial(self._drawn.target.draw, draws)

    @torch.inference_mode()
    def _begin_prefill(self, spans: list[Span]) -> PassInputs:
        """All that prompts need but the target's pass, whose inputs it returns."""
        inputs = self._send(causal_inputs(spans, self._cache, logit_rows(spans), records=True))
        with self._link.active():
            self._cache.record(inputs.history_rows, inputs.tokens)
        for i, draft in enumerate(self._drafts):
            mine = [span for span in spans if i in span.drafts]
            if mine == spans:
                draft(*inputs.without_logits().of_model)
            elif mine:
                self._causal_pass(draft, mine)
        return inputs

    def _first_tokens(self, logits: Tensor, requests: list[Request]) -> Tensor:
        return first_tokens(logits, requests, self._cache, self._link, self._operators)

    def _step(self, group: StepGroup) -> StepResult:
        begin = time.perf_counter()
        self._catch_up(group)
        catch_up_s = time.perf_counter() - begin
        step = self._steps[group.plan.name]
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
        return self._hooked(step, group, lambda reads: step.advance(inputs, slabs, reads))

    def _hooked(
        self, step: Step, group: StepGroup, run: Callable[[Sequence[str]], StepResult]
    ) -> StepResult:
        """Run a step; grammars and controls change the logits that acceptance looks at.

        Args:
            step: of the plan.
            group: whose step it is.
            run: the step, given the names of values that are wanted.
        """
        reads = ("logits", "path") if wants_logprobs(group.requests) else ()
        if not has_masks(group.requests):
            return run(reads)
        before = step.before_accept
        masks = TreeMasks(group.requests, group.plan, before, keeps=bool(reads))
        step.before_accept = masks
        try:
            result = run(reads)
        finally:
            step.before_accept = before
        if masks.logits is not None:
            # log probabilities are the model's own
            result.values["logits"] = masks.logits
        return result

    def _logprobs(
        self, group: StepGroup, step: StepResult
    ) -> list[list[TokenLogprobs] | None] | None:
        if not step.values:
            return None
        counts = zip(step.output_tokens, step.num_accepted, strict=True)
        outputs = [tokens[: accepted + 1] for tokens, accepted in counts]
        if (scores := step.values.get("scores")) is not None:
            return emitted_logprobs(scores, outputs, group.requests)
        return step_logprobs(step.values["logits"], step.values["path"], outputs, group.requests)

    def _inputs(self, group: StepGroup) -> StepInputs:
        return self._rows.inputs(group.requests, group.extra, group.ahead)

    def _catch_up(self, group: StepGroup) -> None:
        """Feed drafts the committed tokens that their first level does not reach back to.

        A request with a step in flight is left alone: its drafts are in step.
        """
        ahead = group.ahead or [0] * len(group.requests)
        for i in draft_lens_of(group.plan):
            behind = [
                Span(s, s.draft_lens[i], s.cache_len)
                for s, more in zip(group.requests, ahead, strict=True)
                if not more and s.draft_lens[i] < s.cache_len + 1 - group.plan.catch_up
            ]
            for spans in split_spans(behind, self._prefill_chunk):
                self._causal_pass(self._drafts[i], spans)

    @torch.inference_mode()
    def _causal_pass(self, model: Model, spans: list[Span], rows: Tensor | None = None) -> Tensor:
        """Feed spans of several requests; returns [R, V] of the tokens that `rows` names."""
        return model(*self._send(causal_inputs(spans, self._cache, rows)).of_model)

    def _send(self, inputs: PassInputs) -> PassInputs:
        return PassInputs(*self._link.send(inputs))


def _as_drawn(tokens: Tensor, requests: Sequence[Request]) -> Tensor:
    """First tokens, of what is first tokens already."""
    return tokens
