"""Whether drafts should be kept in step: under which plan the fewest requests would run together.

Step by step, whatever yields most tokens a second now looks best. But a draft that speculates has
to read every prompt as well, and a larger batch decodes cheaper: near the limit of the machine
that decides. So requests are taken as they come: so many a second, with prompts and outputs of such
lengths. Under each plan the batch grows until it is served as fast as it comes; by Little's law
(Operations Research 9, 1961) the mean latency is in proportion to that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specc.cost.contexts import Contexts
from specc.cost.latency_table import StepShape
from specc.runtime.policies.goodput.arrival_statistics import ArrivalStatistics, Demand
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.predicted_seconds import PredictedSeconds
from specc.runtime.policies.goodput.prompt_shares import NO_PROMPTS, PromptShare
from specc.speculation.plans import OFF, SpecPlan

if TYPE_CHECKING:
    from specc.runtime.scheduling.batch import Batch, RunResult


# plan, share of the sequences that run it, and their tokens a step
Parts = Sequence[tuple[SpecPlan, float, float]]


class QueueingModel:
    """Compares plans by the batch that a lasting load would make.

    Args:
        most: sequences that run together.
    """

    def __init__(self, seconds: PredictedSeconds, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._demand = ArrivalStatistics(most)
        # requests that were there when plans were compared
        self._num_compared = 0

    def observe(self, batch: Batch, result: RunResult) -> None:
        """Take an iteration, after its commit."""
        self._demand.observe(batch, result)

    @property
    def has_changed(self) -> bool:
        """Many more or fewer requests are there than when plans were compared."""
        change = abs(self._demand.num_unfinished - self._num_compared)
        return change > max(TUNED.changed_share * self._num_compared, TUNED.changed_requests)

    def drafting(
        self,
        plans: Sequence[SpecPlan],
        tokens: Sequence[Sequence[float]],
        context: Contexts,
        margin: float,
    ) -> int:
        """The index of the plan under which the batch stays smallest.

        Args:
            plans: off first.
            tokens: [plans][sequences] that can run it, expected of a step; an empty row is none.
            context: committed rows of sequences.
            margin: how many times larger the batch has to be under off.
        """
        self._num_compared = self._demand.num_unfinished
        ways: list[tuple[int, Parts]] = [(0, [(plans[0], 1.0, 1.0)])]
        for index in range(1, len(plans)):
            rows = sorted(tokens[index], reverse=True)
            if not rows:
                continue
            mean = sum(rows) / len(rows)
            for share in TUNED.spec_shares:
                count = math.ceil(share * len(rows))
                own = sum(rows[:count]) / count
                if share < 1 and (count == len(rows) or own < TUNED.some_tokens * mean):
                    continue
                part = count / max(1, len(tokens[0]))
                ways.append((index, [(plans[index], part, own), (plans[0], 1 - part, 1.0)]))
        demand = self._raised(self._now(), [parts for _, parts in ways], context)
        sizes = [self.size(demand, parts, context) for _, parts in ways]
        sizes[0] /= margin
        return ways[sizes.index(min(sizes))][0]

    def could_draft(
        self, plans: Sequence[SpecPlan], index: int, tokens: float, context: Contexts
    ) -> bool:
        """Whether drafts would be kept in step if a plan gave all requests so many tokens."""
        rows: list[list[float]] = [[] for _ in plans]
        rows[0], rows[index] = [1.0], [tokens]
        return self.drafting(plans, rows, context, 1.0) == index

    def size(self, demand: Demand, parts: Parts, context: Contexts) -> float:
        """Sequences that run together in the long run.

        Beyond `most`, how many times longer the machine would need than it has, times `most`.

        Args:
            parts: plan, share of the sequences that run it, and their tokens a step.
            context: committed rows of sequences.
        """
        needed = self._needed(demand, parts, context)
        # below 1 sequence, what one needs of its time
        if (load := needed(1.0)) <= 1:
            return load
        if (load := needed(self._most)) > 1:
            return self._most * load
        return _root(needed, 1.0, float(self._most))

    def _now(self) -> Demand:
        alone = [StepShape(OFF, 1.0, 0.0)]
        return self._demand.now(self._seconds.iteration(alone, NO_PROMPTS))

    def _raised(self, demand: Demand, ways: Sequence[Parts], context: Contexts) -> Demand:
        """The demand at which as many run as there are now, if that is more than chance explains.

        That is the highest rate at which any of these ways would hold so many. So a queue counts
        before its requests are seen to have come often.
        """
        count = self._demand.num_unfinished
        size = min(count, self._most) - TUNED.chance * math.sqrt(count)
        if size <= 1 or not demand.prompt:
            return demand
        rates = [self._rate_of(size, demand, parts, context) for parts in ways]
        return demand._replace(rate=max(rates))

    def _rate_of(self, size: float, demand: Demand, parts: Parts, context: Contexts) -> float:
        """Requests a second of which so many run together, if that is more than the demand."""

        def left(rate: float) -> float:
            return 2 - self._needed(demand._replace(rate=rate), parts, context)(size)

        low = high = demand.rate
        # of a table without seconds, no rate is enough
        while left(high) > 1 and high < TUNED.most_raised * demand.rate:
            low, high = high, 2 * high
        return _root(left, low, high)

    def _needed(self, demand: Demand, parts: Parts, context: Contexts) -> Callable[[float], float]:
        """Share of the time that is needed where so many sequences run, falling; see `size`."""
        seconds = self._seconds
        # a token of a prompt attends to half of it on average
        reading = seconds.target_token_s(demand.prompt / 2)
        for plan, share, _ in parts:
            if plan.speculates and share:
                reading += seconds.draft_token_s(plan, demand.prompt / 2)
        busy = demand.rate * demand.prompt * reading
        tokens = sum(share * expected for _, share, expected in parts)

        def needed(size: float) -> float:
            shapes = [
                StepShape(p, size * s, size * s * context.mean, context) for p, s, _ in parts if s
            ]
            alone = seconds.iteration(shapes, NO_PROMPTS)
            mean_s = alone / max(0.05, 1 - busy)
            # in the long run no more prompts come in than requests leave: what is more waits
            admitted = min(demand.rate * mean_s, size * tokens / demand.output)
            share = 1 - math.exp(-admitted)
            present = admitted * demand.prompt / share if share else 0.0
            step_s = seconds.iteration(shapes, PromptShare(share, present))
            return busy + demand.rate * demand.output * step_s / (size * tokens)

        return needed


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that falls from above 1 to below passes 1, to 2 %."""
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > 1 else (low, middle)
    return math.sqrt(low * high)
