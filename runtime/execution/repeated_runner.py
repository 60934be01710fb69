"""Steps of a batch that follow each other in one call, each from where the last one has ended."""

from __future__ import annotations

import time
from typing import cast

from specc.runtime.backends.step import RepeatedStep
from specc.runtime.constraints.grammar_masks import has_masks
from specc.runtime.execution.shared_runner import SharedRunner
from specc.runtime.outputs.step_logprobs import wants_logprobs
from specc.runtime.scheduling.batch import Batch, PendingBatch, RunResult


class RepeatedRunner(SharedRunner):
    """A `SharedRunner` of steps that are `RepeatedStep`s."""

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
