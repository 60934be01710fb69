"""Ask a draft model or look up, whichever promises more tokens a second, for every request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specc.runtime.policies.base import Policy
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.runtime.backends.step_io import StepResult
    from specc.runtime.drafters.host_drafts import HostDrafts
    from specc.runtime.scheduling.batch import StepGroup
    from specc.runtime.scheduling.request import Request
    from specc.speculation.metrics import SpecStats


@dataclass(frozen=True)
class BestConstants:
    """Constants of the policy best.

    Args:
        keep: what an outcome keeps of its weight with every step that follows it.
        seconds_news: weight of a step's newest seconds.
        hope: how much what is not known is hoped for, as a share of what could be accepted.
        longest: lookups whose suffix is this long or longer are alike.
    """

    keep: float = 0.99
    seconds_news: float = 0.1
    hope: float = 0.06
    longest: int = 8


TUNED = BestConstants()
# requests that are remembered beyond those that run
_SPARE = 256


class _Outcomes:
    """Tokens that steps emitted, newer ones counting more, and what to expect at best.

    Discounted upper confidence bound: Garivier and Moulines, arXiv:0805.3415 §2.
    """

    def __init__(self, expected: float, most: int) -> None:
        self._sum, self._count = expected, 1.0
        self._most = most
        self._step = 0

    def add(self, num_tokens: int, step: int) -> None:
        self._age(step)
        self._sum += num_tokens
        self._count += 1

    def mean(self) -> float:
        return self._sum / self._count

    def hoped(self, step: int) -> float:
        """The mean, and more where outcomes are few or old."""
        self._age(step)
        total = min(step, 1 / (1 - TUNED.keep)) + 2
        return self.mean() + self._most * TUNED.hope * math.sqrt(math.log(total) / self._count)

    def _age(self, step: int) -> None:
        kept = TUNED.keep ** (step - self._step)
        self._sum, self._count, self._step = self._sum * kept, self._count * kept, step


class BestPolicy(Policy):
    """Splits every batch between the plan of a draft model and that of a lookup.

    What a request can expect of the lookup depends on how long its suffix was found; of the model,
    on what it accepted lately. Seconds are those of steps measured here, by plan and batch size.
    A batch is split where the two passes together still yield more.

    Args:
        plans: two, of a model and of a lookup, in this order.
    """

    def __init__(self, plans: Mapping[str, SpecPlan], host: HostDrafts) -> None:
        self._model, self._lookup = pick_plans(plans)
        self._host = host
        self._step = 0
        # at first half of what could be accepted
        self._of_models = self._new_model_outcomes(1 + self._model.max_depth / 2)
        self._of_model: dict[str, _Outcomes] = {}
        depth = self._lookup.max_depth
        self._of_length = [
            _Outcomes(1 + depth * length / (length + 2), depth)
            for length in range(TUNED.longest + 1)
        ]
        self._seconds: dict[tuple[str, int], float] = {}
        self._lengths: dict[str, int] = {}

    def choose(self, num_running: int, stats: SpecStats) -> str:
        """What requests that wait for their first step are prepared for."""
        return self._model.name

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str]:
        """Plan of each request."""
        self._step += 1
        if len(self._of_model) > 2 * len(requests) + _SPARE:
            # of others nobody has told the end: they were aborted, or a prediction had it
            kept = {request.request_id for request in requests}
            self._of_model = {k: v for k, v in self._of_model.items() if k in kept}
            self._lengths = {k: v for k, v in self._lengths.items() if k in kept}
        gains = []
        for request in requests:
            lookup, request_id = self._lookup, request.request_id
            length = self._host.propose(request, lookup.max_depth, lookup.drafters[0])[1]
            length = self._lengths[request_id] = min(length, TUNED.longest)
            of_lookup = self._of_length[length].hoped(self._step) if length else 1.0
            if request_id not in self._of_model:
                self._of_model[request_id] = self._new_model_outcomes(self._of_models.mean())
            gains.append((of_lookup, self._of_model[request_id].hoped(self._step)))
        count = len(requests)
        # the request that gains most from the lookup takes it first
        order = sorted(range(count), key=lambda i: gains[i][1] - gains[i][0])
        names = [self._model.name] * count
        for i in order[: self._best_split([gains[i] for i in order])]:
            names[i] = self._lookup.name
        return names

    def observe(self, group: StepGroup, step: StepResult) -> None:
        """Take the outcome of a step."""
        name, count = group.plan.name, len(group.requests)
        if name not in (self._model.name, self._lookup.name):
            return
        seconds = sum(step.stage_s.values())
        known = self._seconds.get((name, count), seconds)
        self._seconds[name, count] = known + TUNED.seconds_news * (seconds - known)
        for request, accepted in zip(group.requests, step.num_accepted, strict=True):
            request_id = request.request_id
            if name == self._lookup.name:
                self._of_length[self._lengths.get(request_id, 0)].add(accepted + 1, self._step)
            else:
                self._of_models.add(accepted + 1, self._step)
                if request_id in self._of_model:
                    self._of_model[request_id].add(accepted + 1, self._step)
            if request.is_finished:
                self._of_model.pop(request_id, None)
                self._lengths.pop(request_id, None)

    def _new_model_outcomes(self, expected: float) -> _Outcomes:
        return _Outcomes(expected, self._model.max_depth)

    def _best_split(self, gains: list[tuple[float, float]]) -> int:
        """How many of the requests look up: the number that yields most tokens a second."""
        count = len(gains)
        best, best_rate = 0, -1.0
        for split in range(count + 1):
            tokens = sum(gain[0] for gain in gains[:split]) + sum(gain[1] for gain in gains[split:])
            seconds = self._step_s(self._lookup.name, split)
            seconds += self._step_s(self._model.name, count - split)
            if tokens / seconds > best_rate:
                best, best_rate = split, tokens / seconds
        return best

    def _step_s(self, name: str, count: int) -> float:
        """Seconds of a step, from the nearest batch size measured; 0 requests take none.

        A size that was not measured is hoped to cost no more than its share, so that it is tried.
        """
        if count == 0:
            return 0.0
        sizes = [size for plan, size in self._seconds if plan == name]
        if not sizes:
            # never seen: as quick as the quickest, so that expectations alone decide
            known = self._seconds.items()
            return min((s * min(1.0, count / size) for (_, size), s in known), default=1.0)
        nearest = min(sizes, key=lambda size: abs(size - count))
        return self._seconds[name, nearest] * min(1.0, count / nearest)


def pick_plans(plans: Mapping[str, SpecPlan]) -> tuple[SpecPlan, SpecPlan]:
    """The first plan of a model or view alone, and the first of a lookup alone."""
    alone = [plan for plan in plans.values() if plan.speculates and not plan.combine]
    model = next(plan for plan in alone if plan.asked)
    lookup = next(plan for plan in alone if not plan.asked)
    return model, lookup
