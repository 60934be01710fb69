"""Loads of several rates, each served by several policies in turn, round by round.

Within a round every policy serves the same requests, in an order that rotates from round to round,
so that a slow minute of the machine hits none of them alone; ratios are taken within a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specc.bench.rounds import Spread, order_of_round
from specc.load.arrivals import Arrivals
from specc.load.decisions import DecisionTrace
from specc.load.figures import figures_of
from specc.load.request import LoadRequest, Workload
from specc.load.result import LoadRun
from specc.load.subject import LoadSubject
from specc.progress import Advance, ignore
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF

# rate, policy, round
RunKey = tuple[float, str, int]


@dataclass(frozen=True)
class Sweep:
    """What a sweep goes through.

    Args:
        arrivals: one of each rate.
        policies: names; the first one is no different from the others.
        rounds: counted ones, 1 or more; each has its own requests.
    """

    arrivals: Sequence[Arrivals]
    policies: Sequence[str]
    workload: Workload
    rounds: int = 1

    def run_keys(self) -> list[RunKey]:
        """Runs in the order in which they happen."""
        count = len(self.policies)
        return [
            (arrivals.rate, self.policies[index], number)
            for number in range(self.rounds)
            for arrivals in self.arrivals
            for index in order_of_round(number, count)
        ]

    def requests(self, rate: float, number: int) -> list[LoadRequest]:
        """The same for every policy."""
        arrivals = next(one for one in self.arrivals if one.rate == rate)
        return self.workload.requests(arrivals, number)


@dataclass
class SweepResult:
    sweep: Sweep
    runs: dict[RunKey, LoadRun] = field(default_factory=dict)

    def of(self, rate: float, policy: str) -> list[LoadRun]:
        """Runs of a cell, round by round."""
        return [self.runs[rate, policy, number] for number in range(self.sweep.rounds)]

    def counted(self, plans: Container[str]) -> dict[str, SpecStats]:
        """Plan → counters of all runs in which it alone drafted."""
        counted: dict[str, SpecStats] = {}
        for (_, policy, _), run in self.runs.items():
            if policy in plans and run.stats is not None:
                counted.setdefault(policy, SpecStats()).merge(run.stats)
        return counted

    def to_json(
        self, objectives: Mapping[str, float], predicted: SweepResult | None = None
    ) -> list[dict[str, Any]]:
        """A cell for every rate and policy.

        Args:
            objectives: see `parse_objectives`.
            predicted: the same sweep, simulated.
        """
        cells = []
        for arrivals in self.sweep.arrivals:
            for policy in self.sweep.policies:
                cell = self._cell(arrivals.rate, policy, objectives)
                if predicted is not None:
                    cell["simulated"] = self._comparison(predicted, arrivals.rate, policy)
                cells.append(cell)
        return cells

    def _cell(self, rate: float, policy: str, objectives: Mapping[str, float]) -> dict[str, Any]:
        rounds = [figures_of(run, objectives) for run in self.of(rate, policy)]
        spread = _spread([figures["mean_e2el_ms"] for figures in rounds])
        over_off = None
        if OFF.name in self.sweep.policies and policy != OFF.name:
            plain = [_latency(run) for run in self.of(rate, OFF.name)]
            over_off = _spread(_ratios([_latency(run) for run in self.of(rate, policy)], plain))
        return {
            # JSON has no infinity
            "request_rate": None if math.isinf(rate) else rate,
            "policy": policy,
            "mean_e2el_ms": spread,
            "latency_over_off": over_off,
            "rounds": rounds,
        }

    def _comparison(self, predicted: SweepResult, rate: float, policy: str) -> dict[str, Any]:
        mine, theirs = self.of(rate, policy), predicted.of(rate, policy)
        ratios = _ratios([_latency(run) for run in theirs], [_latency(run) for run in mine])
        return {
            "mean_e2el_ms": _spread([figures_of(run)["mean_e2el_ms"] for run in theirs]),
            "over_measured": _spread(ratios),
            "plan_shares": [dict(run.plan_shares) for run in theirs],
        }


def run_sweep(
    sweep: Sweep,
    subject: LoadSubject,
    progress: Advance = ignore,
    trace: Callable[[dict[str, Any]], object] | None = None,
) -> SweepResult:
    """Serve all loads.

    Args:
        sweep: what to go through.
        progress: told of the requests that have ended, of all, and which load is served.
        trace: takes a line for every decision of a policy that has decisions.
    Raises:
        SpeccError: of the subject; a request that fails is a result.
    """
    subject.check(sweep.policies)
    loads = {
        (one.rate, number): sweep.requests(one.rate, number)
        for one in sweep.arrivals
        for number in range(sweep.rounds)
    }
    run_keys = sweep.run_keys()
    total = sum(len(loads[rate, number]) for rate, _, number in run_keys)
    done, result = 0, SweepResult(sweep)
    progress(0, total)
    for rate, policy, number in run_keys:
        requests = loads[rate, number]

        name = policy if math.isinf(rate) else f"{policy} at {rate:g}/s"

        def on_request(ended: int, _: int, before: int = done, name: str = name) -> None:
            progress(before + ended, total, name)

        decisions = None
        if trace is not None:
            about = {"request_rate": None if math.isinf(rate) else rate}
            decisions = DecisionTrace(trace, about | {"policy": policy, "round": number})
        result.runs[rate, policy, number] = subject.run(policy, requests, on_request, decisions)
        if decisions is not None:
            decisions.end()
        done += len(requests)
    return result


def _latency(run: LoadRun) -> float | None:
    done = [result.latency_s for result in run.results if result.is_ok]
    return math.fsum(done) / len(done) if done else None


def _ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    return [a / b if a and b else None for a, b in zip(ours, theirs, strict=True)]


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return asdict(Spread.of(known)) if known else None
