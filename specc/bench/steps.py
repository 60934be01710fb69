"""Steps by themselves: how long one takes on the device, its parts, and what lies between two.

Steps are queued back to back, each going on where the last one ended, so the device never waits
for the host: what is measured is the device's own time.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from specc.bench.device import Replay, TimedGraphs
from specc.bench.rounds import Spread
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.backends.step_io import STATES, StepInputs, StepResult
from specc.runtime.engine import Engine
from specc.runtime.execution.batch_rows import last_tokens_of, sampling_rows
from specc.runtime.execution.state_rows import state_rows
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams

_COUNTED_STEPS = 3
# what steps are measured with besides greedy requests: filters and noise cost the most then
SAMPLED = SamplingParams(temperature=0.6, top_p=0.9, seed=0)


@dataclass(frozen=True)
class StepFigures:
    """What was found of a plan's steps.

    Args:
        step_ms: of one step, by the clock of the device.
        num_steps: measured ones.
        gap_share: mean time between two steps over the mean time of one; None for a single step.
        acceptance_length: tokens that a sequence emits in a step.
        context: committed rows of a sequence, on average over the steps.
        is_captured: False where steps ran operator by operator because they cannot be captured.
        sampled_ms: as `step_ms`, of requests that draw their tokens (`SAMPLED`); None while they
            have not been timed.
        sampled_length: as `acceptance_length`, of these.
        stage_ms: milliseconds of each stage, from other runs, in which each was its own graph.
        kernels: that one step launches; None while nobody has counted them.
        kernel_us: name → launches of a step, and microseconds of all of them, as the profiler of a
            GPU sees them, the longest first.
    """

    step_ms: Spread
    num_steps: int
    gap_share: float | None
    acceptance_length: float
    context: float
    is_captured: bool
    sampled_ms: Spread | None = None
    sampled_length: float | None = None
    stage_ms: dict[str, float] = field(default_factory=dict)
    kernels: float | None = None
    kernel_us: dict[str, tuple[float, float]] = field(default_factory=dict)


class StepBench:
    """Measures the steps of an engine in memory.

    Args:
        engine: its steps are `CapturedStep`s on `graphs`.
        context: committed rows of a sequence when steps begin.
        tokens: that a sequence may grow by.
    """

    def __init__(self, engine: Engine, graphs: TimedGraphs, context: int, tokens: int) -> None:
        self._engine = engine
        self._graphs = graphs
        self._context = context
        self._tokens = tokens
        shape = engine.cache.shape
        self._batch = shape.max_num_seqs
        num_last = last_tokens_of(engine.plans.values())
        rows = [(*range(b, b + num_last), context) for b in range(1, self._batch + 1)]
        blocks = torch.arange(shape.num_blocks, dtype=torch.int32)
        table = blocks.view(self._batch, shape.blocks_per_sequence)

        has_states = engine.cache.states is not None
        extra = {STATES: state_rows(range(self._batch))} if has_states else {}

        def inputs_of(sampling: SamplingParams) -> StepInputs:
            request = Request("0", [0], sampling, max_seq_len=2)
            return StepInputs(rows, table, *sampling_rows([request] * self._batch), extra)

        self._inputs, self._sampled = inputs_of(SamplingParams(temperature=0)), inputs_of(SAMPLED)

    def capture(self, plan: str) -> str | None:
        """Capture a plan's step; returns why it runs operator by operator, if it does."""
        return self._capture(self._step(plan))

    def measure(self, plan: str, stages: Sequence[str], rounds: int) -> StepFigures:
        """Time steps, then drawn ones, then parts: see `time`, `add_sampled`, `add_parts`."""
        figures = self.add_sampled(plan, self.time(plan, rounds), rounds)
        return self.add_parts(plan, figures, stages, rounds)

    def time(self, plan: str, rounds: int) -> StepFigures:
        """Run `rounds` queues of steps, after one that warms up.

        Args:
            rounds: counted queues.
        """
        step = self._step(plan)
        count = self._steps_of_queue(step)
        step_ms, gaps, length = self._rounds(step, count, rounds, self._inputs)
        return StepFigures(
            step_ms=Spread.of(step_ms),
            num_steps=len(step_ms),
            gap_share=statistics.median(gaps) if gaps else None,
            acceptance_length=length,
            context=self._context + length * (count - 1) / 2,
            is_captured=step.is_captured(self._batch),
        )

    def add_sampled(self, plan: str, figures: StepFigures, rounds: int) -> StepFigures:
        """Time the same graphs with requests that draw their tokens; see `time`."""
        step = self._step(plan)
        count = self._steps_of_queue(step)
        step_ms, _, length = self._rounds(step, count, rounds, self._sampled)
        return replace(figures, sampled_ms=Spread.of(step_ms), sampled_length=length)

    def add_parts(
        self, plan: str, figures: StepFigures, stages: Sequence[str], rounds: int
    ) -> StepFigures:
        """What further runs tell of steps that were timed: their stages, and kernels.

        Args:
            stages: names of its step's stages.
            rounds: counted queues.
        """
        step = self._step(plan)
        count = self._steps_of_queue(step)
        stage_ms = self._stages(step, stages, count, rounds)
        kernels, kernel_us = self._kernels(step, min(count, _COUNTED_STEPS))
        return replace(figures, stage_ms=stage_ms, kernels=kernels, kernel_us=kernel_us)

    def _rounds(
        self, step: CapturedStep, count: int, rounds: int, inputs: StepInputs
    ) -> tuple[list[float], list[float], float]:
        """Milliseconds of steps, gaps between them, and the mean acceptance length."""
        self._queue(step, count, inputs)
        step_ms: list[float] = []
        gaps: list[float] = []
        lengths: list[float] = []
        for _ in range(rounds):
            results, replays, whole = self._time(step, count, inputs)
            # what cannot be captured leaves no replays: then the queue counts as a whole
            times, gap = self._times(replays) if replays else ([self._ms(whole) / count], None)
            step_ms += times
            gaps += [] if gap is None else [gap]
            lengths += [1.0 + n for result in results for n in result.num_accepted]
        return step_ms, gaps, statistics.mean(lengths)

    def _step(self, plan: str) -> CapturedStep:
        step = self._engine.steps[plan]
        assert isinstance(step, CapturedStep), "an engine of a device that captures"
        return step

    def _capture(self, step: CapturedStep) -> str | None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CaptureWarning)
            step.capture(self._batch)
        reasons = [str(item.message) for item in caught if item.category is CaptureWarning]
        return reasons[0] if reasons else None

    def _steps_of_queue(self, step: CapturedStep) -> int:
        """As many as fit where every step emits all that it can."""
        return max(1, self._tokens // (step.plan.max_depth + 1))

    def _queue(
        self, step: CapturedStep, count: int, inputs: StepInputs | None = None
    ) -> list[StepResult]:
        """Queue steps; the host reads a result when the next step is queued already.

        Args:
            count: of steps.
            inputs: of the first; None is those of greedy requests.
        """
        pending = step.submit(inputs or self._inputs)
        results = []
        for _ in range(count - 1):
            following = step.submit_next(self._batch)
            results.append(pending.result())
            pending = following
        return [*results, pending.result()]

    def _time(
        self, step: CapturedStep, count: int, inputs: StepInputs | None = None
    ) -> tuple[list[StepResult], list[Replay], Replay]:
        """Results of a queue, its replays, and marks around all of it."""
        results: list[StepResult] = []
        clock = self._graphs.clock
        whole = []

        def work() -> None:
            begin = clock.mark()
            results.extend(self._queue(step, count, inputs))
            whole.append(Replay(begin, clock.mark()))

        replays = self._graphs.record(work)
        return results, replays, whole[0]

    def _times(self, replays: Sequence[Replay]) -> tuple[list[float], float | None]:
        """Milliseconds of each replay, and the mean gap of two as a share of the mean replay."""
        own = [self._ms(replay) for replay in replays]
        gaps = [self._ms(Replay(before.end, after.begin)) for before, after in pairwise(replays)]
        return own, statistics.mean(gaps) / statistics.mean(own) if gaps else None

    def _ms(self, replay: Replay) -> float:
        return self._graphs.clock.ms(*replay)

    def _stages(
        self, step: CapturedStep, names: Sequence[str], count: int, rounds: int
    ) -> dict[str, float]:
        """Median milliseconds of each stage while each is a graph of its own."""
        step.before_accept = _look_away
        try:
            if self._capture(step) or not step.is_captured(self._batch):
                return {}
            self._queue(step, count)
            times: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(rounds):
                _, replays, _ = self._time(step, count)
                assert len(replays) == count * len(names), "one replay a stage"
                for i, replay in enumerate(replays):
                    times[names[i % len(names)]].append(self._ms(replay))
            return {name: statistics.median(values) for name, values in times.items()}
        finally:
            step.before_accept = None

    def _kernels(
        self, step: CapturedStep, count: int
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Of one step: how many, and launches and microseconds by name."""
        found = self._graphs.count_kernels(lambda: self._queue(step, count))
        longest = sorted(found.times.items(), key=lambda item: -item[1].us)
        return found.launches / count, {
            name: (item.launches / count, item.us / count) for name, item in longest
        }


def _look_away(values: object) -> None:
    """A hook that does nothing: while one is set, every stage is a graph of its own."""
