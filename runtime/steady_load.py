"""Whether drafts should be kept in step: under which plan the fewest requests would run together.

Step by step, whatever yields most tokens a second now looks best. But a draft that speculates has
to read every prompt as well, and a larger batch decodes cheaper: near the limit of the machine
that decides. So requests are taken as they come: so many a second, with prompts and outputs of such
lengths. Under each plan the batch grows until it is served as fast as it comes; by Little's law
(Operations Research 9, 1961) the mean latency is in proportion to that size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specc.latency_table import StepShape
from specc.plans import SpecPlan
from specc.runtime.predicted_seconds import PredictedSeconds, Prompts

if TYPE_CHECKING:
    from specc.runtime.batch import Batch
    from specc.runtime.runner import RunResult

# requests that tell how often others come, and how long prompts are
_ARRIVALS = 256
_SILENCE = 8.0
# requests a second where none come: sizes then tell how long one alone takes
_LEAST = 1e-3
# output tokens of an unknown load, and for how many ended requests that guess counts
_OUTPUT, _GUESSES = 128.0, 2.0
# weight of the newest request in the length of outputs
_NEWS = 1 / 64
# of the requests that run, those that speculate
_SHARES = (1.0, 0.5, 0.25)


class Demand(NamedTuple):
    """Requests a second, and tokens of their prompts and outputs."""

    rate: float
    prompt: float
    output: float


class SteadyLoad:
    """Watches requests come and go.

    Args:
        seconds: of steps.
        most: sequences that run together.
    """

    def __init__(self, seconds: PredictedSeconds, most: int) -> None:
        self._seconds = seconds
        self._most = most
        # seconds of iterations since the last prompt
        self._idle_s = 0.0
        # arrival and prompt tokens of the latest requests
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_ARRIVALS)
        self._emitted, self._ended = 0.0, 0.0

    def observe(self, batch: Batch, result: RunResult) -> None:
        """Take an iteration, behind its commit."""
        seconds = result.prefill_s + sum(sum(step.stage_s.values()) for step in result.steps)
        num_rows = sum(len(group.sequences) for group in batch.groups)
        # where all places are taken, that no prompt comes says nothing
        is_idle = not batch.prefill and num_rows < self._most
        self._idle_s = self._idle_s + seconds if is_idle else 0.0
        for span in batch.prefill:
            sequence = span.sequence
            # the first time that a prompt ends
            if span.end == sequence.num_prompt_tokens:
                self._arrivals.append((sequence.arrival_s, sequence.num_prompt_tokens))
        for group, step in zip(batch.groups, result.steps, strict=True):
            self._emitted += sum(step.num_accepted) + len(step.num_accepted)
            for sequence in group.sequences:
                if sequence.is_finished:
                    self._emitted -= _NEWS * self._emitted
                    self._ended += 1 - _NEWS * self._ended

    @property
    def demand(self) -> Demand:
        """What comes; outputs of requests that still run count as far as they have come."""
        output = (self._emitted + _GUESSES * _OUTPUT) / (self._ended + _GUESSES)
        if len(self._arrivals) < 2:
            return Demand(_LEAST, 0.0, output)
        # by when they came, not by when there was room for them
        times = [arrival for arrival, _ in self._arrivals]
        rate = (len(times) - 1) / max(max(times) - min(times) + self._idle_s, 1e-9)
        # a silence in which so many should have come
        if rate * self._idle_s > _SILENCE:
            rate = _SILENCE / self._idle_s
        prompt = sum(tokens for _, tokens in self._arrivals) / len(self._arrivals)
        return Demand(max(rate, _LEAST), prompt, output)

    def drafting(
        self,
        plans: Sequence[SpecPlan],
        tokens: Sequence[Sequence[float]],
        context: float,
        margin: float,
    ) -> int:
        """The place of the plan under which the batch stays smallest.

        Args:
            plans: off first.
            tokens: [plans][sequences] that can run it, expected of a step; an empty row is none.
            context: committed rows of a sequence.
            margin: how many times larger the batch has to be under off.
        """
        demand = self.demand
        least, best = self.size(demand, [(plans[0], 1.0, 1.0)], context) / margin, 0
        for place in range(1, len(plans)):
            rows = sorted(tokens[place], reverse=True)
            for share in _SHARES:
                count = math.ceil(share * len(rows))
                if not count or (share < 1 and count == len(rows)):
                    continue
                part = count / max(1, len(tokens[0]))
                parts = [(plans[place], part, sum(rows[:count]) / count), (plans[0], 1 - part, 1.0)]
                size = self.size(demand, parts, context)
                if size < least:
                    least, best = size, place
        return best

    def could_draft(
        self, plans: Sequence[SpecPlan], place: int, tokens: float, context: float
    ) -> bool:
        """Whether drafts would be kept in step if a plan gave all requests so many tokens."""
        rows: list[list[float]] = [[] for _ in plans]
        rows[0], rows[place] = [1.0], [tokens]
        return self.drafting(plans, rows, context, 1.0) == place

    def size(
        self, demand: Demand, parts: Sequence[tuple[SpecPlan, float, float]], context: float
    ) -> float:
        """Sequences that run together in the long run.

        Beyond `most`, how many times longer the machine would need than it has, times `most`.

        Args:
            demand: what comes.
            parts: plan, share of the sequences that run it, and their tokens a step.
            context: committed rows of a sequence.
        """
        seconds = self._seconds
        reading = seconds.target_token_s()
        reading += sum(seconds.draft_token_s(p) for p, share, _ in parts if p.speculates and share)
        busy = demand.rate * demand.prompt * reading
        tokens = sum(share * expected for _, share, expected in parts)

        def needed(size: float) -> float:
            """Share of the time that is needed where so many sequences run."""
            shapes = [StepShape(p, size * s, size * s * context) for p, s, _ in parts if s]
            alone = seconds.iteration(shapes, Prompts(0.0, 0.0))
            mean_s = alone / max(0.05, 1 - busy)
            # in the long run no more prompts come in than requests leave: what is more waits
            admitted = min(demand.rate * mean_s, size * tokens / demand.output)
            share = 1 - math.exp(-admitted)
            present = admitted * demand.prompt / share if share else 0.0
            step_s = seconds.iteration(shapes, Prompts(share, present))
            return busy + demand.rate * demand.output * step_s / (size * tokens)

        if (load := needed(self._most)) > 1:
            return self._most * load
        return _root(needed, 1.0, float(self._most))


def _root(needed: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function passes 1; below 1 sequence, what one needs of its time."""
    if (load := needed(low)) <= 1:
        return low * load
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if needed(middle) > 1 else (low, middle)
    return math.sqrt(low * high)
