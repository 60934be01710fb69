"""Runs a batch: builds the inputs of each pass, calls the programs, reads the results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.runtime.captured_step import CapturedStep, PendingStep
from specc.runtime.kv_cache import KVCache
from specc.runtime.program import Model, Step, StepResult
from specc.runtime.scheduler import Batch, Span, StepGroup


@dataclass(frozen=True)
class RunResult:
    """What an iteration did; `first_tokens` is None where a prompt is not finished yet."""

    first_tokens: list[int | None] = field(default_factory=list)
    prefill_s: float = 0.0
    steps: list[StepResult] = field(default_factory=list)


class Runner:
    """Runs the programs of an engine over its caches.

    Args:
        target: the target's program.
        drafts: programs of the drafts, draft_0 first.
        steps: plan name → step program.
        cache: that all programs are bound to.
        prefill_chunk: tokens of a causal pass at most.
    """

    def __init__(
        self,
        target: Model,
        drafts: list[Model],
        steps: Mapping[str, Step],
        cache: KVCache,
        prefill_chunk: int,
    ) -> None:
        self._target = target
        self._drafts = drafts
        self._steps = steps
        self._cache = cache
        self._prefill_chunk = prefill_chunk
        self._table_blocks: list[list[int]] = []
        self._table = cache.block_table([])

    def run(self, batch: Batch) -> RunResult:
        """Prefill, then one step for each group; sequences are read, never changed."""
        first_tokens: list[int | None] = []
        prefill_s = 0.0
        if batch.prefill:
            begin = time.perf_counter()
            first_tokens = self._prefill(batch.prefill)
            prefill_s = time.perf_counter() - begin
        return RunResult(first_tokens, prefill_s, [self._step(group) for group in batch.groups])

    def queue(self, batch: Batch) -> PendingStep | None:
        """Queue a batch and return before it is done; None where only `run` can run it.

        That is a batch with a prefill pass or of two plans, a step with a hook, and every program
        that the host itself runs.
        """
        if batch.prefill or len(batch.groups) != 1:
            return None
        (group,) = batch.groups
        step = self._steps[group.plan.name]
        if not isinstance(step, CapturedStep) or step.is_split:
            return None
        begin_s = time.perf_counter()
        self._catch_up(group)
        return step.submit(*self._inputs(group))._replace(begin_s=begin_s)

    def _prefill(self, spans: list[Span]) -> list[int | None]:
        logits = self._causal_pass(self._target, spans, [span.is_last for span in spans])
        for i, draft in enumerate(self._drafts):
            if mine := [span for span in spans if i in span.drafts]:
                self._causal_pass(draft, mine, [False] * len(mine))
        tokens = iter(logits.argmax(dim=-1).tolist())
        return [next(tokens) if span.is_last else None for span in spans]

    def _step(self, group: StepGroup) -> StepResult:
        begin = time.perf_counter()
        self._catch_up(group)
        catch_up_s = time.perf_counter() - begin
        step = self._steps[group.plan.name]
        result = step.advance(*self._inputs(group), self._cache.environment)
        stage = "step" if "step" in result.stage_s else "draft"
        if stage in result.stage_s:
            result.stage_s[stage] += catch_up_s
        return result

    def _inputs(self, group: StepGroup) -> tuple[list[tuple[int, int, int]], Tensor]:
        """What a step takes from the host: its rows, and the block table."""
        sequences = group.sequences
        rows = [(s.token_ids[-2], s.token_ids[-1], s.cache_len) for s in sequences]
        return rows, self._block_table([s.blocks for s in sequences])

    def _block_table(self, blocks: list[list[int]]) -> Tensor:
        """The table of a batch; sequences keep their blocks, so it mostly is that of before."""
        if blocks != self._table_blocks:
            self._table_blocks = [list(one) for one in blocks]
            self._table = self._cache.block_table(blocks)
        return self._table

    def _catch_up(self, group: StepGroup) -> None:
        """Feed drafts the committed tokens that their first level does not reach back to."""
        if not group.plan.widths:
            return
        for i, draft in enumerate(self._drafts):
            behind = [
                Span(s, s.draft_lens[i], s.cache_len)
                for s in group.sequences
                if s.draft_lens[i] < s.cache_len - 1
            ]
            for spans in _split(behind, self._prefill_chunk):
                self._causal_pass(draft, spans, [False] * len(spans))

    @torch.inference_mode()
    def _causal_pass(self, model: Model, spans: list[Span], wants_logits: list[bool]) -> Tensor:
        """Feed spans of several sequences; returns [R, V], a row for each wanted last token."""
        tokens = [token for s in spans for token in s.sequence.token_ids[s.start : s.end]]
        positions = torch.tensor([p for s in spans for p in range(s.start, s.end)])
        ends = torch.tensor([s.end - s.start for s in spans]).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        inputs = (
            torch.tensor(tokens),
            positions,
            starts.int(),
            positions.int(),
            _int32([s.start for s in spans]),
            None,
            self._cache.block_table([s.sequence.blocks for s in spans]),
            ends[torch.tensor(wants_logits)] - 1,
        )
        device = self._cache.device
        return model(*(x if x is None else x.to(device, non_blocking=True) for x in inputs))


def _split(spans: list[Span], limit: int) -> Iterator[list[Span]]:
    """Passes of at most `limit` tokens; parts of one sequence keep their order."""
    current: list[Span] = []
    room = limit
    for span in spans:
        start = span.start
        while start < span.end:
            end = min(span.end, start + room)
            current.append(Span(span.sequence, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield current
                current, room = [], limit
    if current:
        yield current


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
