"""The real scheduler and a real policy on simulated seconds: a load, served without a model.

A latency table says how long an iteration takes, dice say what the target accepts. So a day of
serving takes seconds, on any machine, and the same seed gives the same figures to the last bit, if
the policy does not look at the clock of the host.

    table = roofline()
    load = make_load(20, 500, [(1, Drafting({"draft_0": [[0.8]]}))], Lengths(256), Lengths(128))
    policy = GoodputPolicy(plans, table, clock=lambda: 0.0)
    report = simulate(load, table, plans, policy, Limits(max_num_seqs=256))
    report.to_json()["mean_latency_s"]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from specc.cost.latency_table import LatencyTable
from specc.errors import ConfigError
from specc.percentile import percentile
from specc.runtime.policies.base import Decision, Policy
from specc.runtime.scheduling.batch import Batch, RunResult
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.simulate.load import Load
from specc.simulate.runner import SimulatedRunner
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Limits:
    """What the simulated engine holds.

    Args:
        max_num_seqs: requests that run together.
        max_seq_len: tokens of a request.
        prefill_chunk: tokens of a prefill pass; with `shares_pass`, of a pass of any kind that
            takes prompts along.
        block_size: rows of a KV block.
        pool_blocks: of the cache; None is enough for all.
        shares_pass: prompts and steps of all plans go through the target together.
    """

    max_num_seqs: int = 256
    max_seq_len: int = 4096
    prefill_chunk: int = 2048
    block_size: int = 16
    pool_blocks: int | None = None
    shares_pass: bool = True


class Iteration(NamedTuple):
    """What happened in one iteration, for traces.

    Args:
        start_s: simulated.
        seconds: it took.
        num_waiting: requests that have no slot yet.
        num_prefill_tokens: of prompts.
        plans: plan → requests that ran it.
        num_tokens: emitted by steps.
        decision: of the policy, if it has one.
    """

    start_s: float
    seconds: float
    num_waiting: int
    num_prefill_tokens: int
    plans: Mapping[str, int]
    num_tokens: int
    decision: Decision | None


@dataclass
class SimulationReport:
    """What a load met.

    Args:
        latency_s: of each request in order of arrival, from arrival to its last token.
        ttft_s: likewise, to its first token.
        tpot_s: likewise, seconds of each further token; NaN of those with one token.
        end_s: when the last request ended.
        busy_s: seconds of iterations.
        step_s: seconds of iterations that decoded.
        num_probes: of them that the policy made to learn.
        plan_rows: plan → requests times iterations.
        stats: counters of the scheduler.
    """

    latency_s: list[float]
    ttft_s: list[float]
    tpot_s: list[float]
    end_s: float = 0.0
    busy_s: float = 0.0
    step_s: float = 0.0
    num_iterations: int = 0
    num_probes: int = 0
    plan_rows: Counter[str] = field(default_factory=Counter)
    stats: SpecStats = field(default_factory=SpecStats)

    def to_json(self) -> dict[str, Any]:
        """Figures, the same bytes for the same simulation."""
        rows = max(1, sum(self.plan_rows.values()))
        tokens = self.stats.num_output_tokens
        data: dict[str, Any] = {
            "num_requests": len(self.latency_s),
            "mean_latency_s": _mean(self.latency_s),
            "mean_ttft_s": _mean(self.ttft_s),
            "mean_tpot_s": _mean(self.tpot_s),
            "tokens_per_s": tokens / self.end_s,
            # of the time at work, whatever the arrivals leave idle
            "goodput_tokens_per_s": tokens / self.busy_s,
            "busy_share": self.busy_s / self.end_s,
            "end_s": self.end_s,
            "num_iterations": self.num_iterations,
            "num_probes": self.num_probes,
            "num_preemptions": self.stats.num_preemptions,
            "mean_acceptance_length": self.stats.mean_acceptance_length,
            "acceptance_rate": self.stats.acceptance_rate,
            "accepted_per_depth": self.stats.accepted_per_depth,
            "plan_shares": {name: self.plan_rows[name] / rows for name in sorted(self.plan_rows)},
        }
        for name in ("latency", "ttft", "tpot"):
            values = [value for value in getattr(self, f"{name}_s") if not math.isnan(value)]
            for percent in _PERCENTILES:
                data[f"p{percent}_{name}_s"] = percentile(values, percent)
        return {key: _rounded(value) for key, value in data.items()}


def simulate(
    load: Load,
    truth: LatencyTable,
    plans: Mapping[str, SpecPlan],
    policy: Policy,
    limits: Limits | None = None,
    *,
    noise: float = 0.0,
    trace: Callable[[Iteration], object] = lambda iteration: None,
) -> SimulationReport:
    """Serve a load.

    Args:
        truth: how long passes really take; the policy has its own idea.
        plans: of the engine, `off` included.
        policy: chooses among them; one that has served before goes on with what it knows.
        limits: of the engine; None is 256 requests.
        noise: seconds of an iteration vary by this share, one in a hundred takes four times as
            long; 0 is none.
        trace: called after every iteration.
    Raises:
        ConfigError: a plan whose acceptance or seconds nobody knows.
        RequestError: a request that never fits.
    """
    limits = limits or Limits()
    engine = _SimulatedEngine(load, truth, plans, policy, limits, noise)
    while engine.has_work:
        trace(engine.advance())
    return engine.report


class _SimulatedEngine:
    """One simulation in progress."""

    def __init__(
        self,
        load: Load,
        truth: LatencyTable,
        plans: Mapping[str, SpecPlan],
        policy: Policy,
        limits: Limits,
        noise: float,
    ) -> None:
        count = len(load.requests)
        self.report = SimulationReport([math.nan] * count, [math.nan] * count, [math.nan] * count)
        self._load, self._limits, self._policy = load, limits, policy
        models = {model for plan in plans.values() for model in plan.model_names}
        self._num_drafts = 1 + max((int(m.removeprefix("draft_")) for m in models), default=-1)
        self._now_s = 0.0
        self._num_arrived = 0
        shape = CacheShape(
            max_seq_len=limits.max_seq_len,
            max_nodes=max(plan.num_rows for plan in plans.values()),
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            pool_blocks=limits.pool_blocks,
        )
        self._scheduler = Scheduler(
            KVCache(shape, {}, torch.float32),
            plans,
            policy,
            limits.prefill_chunk,
            limits.max_seq_len,
            # prompts have no content
            shares_prefixes=False,
            shares_pass=limits.shares_pass,
            cuts_trees=True,
            clock=lambda: self._now_s,
        )
        self._runner = SimulatedRunner(
            load, truth, plans, limits.prefill_chunk, limits.shares_pass, noise
        )

    @property
    def has_work(self) -> bool:
        return self._num_arrived < len(self._load.requests) or self._scheduler.has_work

    def advance(self) -> Iteration:
        """Wait for work, and do one iteration."""
        requests = self._load.requests
        if not self._scheduler.has_work:
            self._now_s = max(self._now_s, requests[self._num_arrived].arrival_s)
        self._take_arrivals()
        start_s, scheduler = self._now_s, self._scheduler
        batch = scheduler.schedule()
        if not batch.prefill and not batch.groups:
            raise ConfigError(
                f"{len(scheduler.waiting)} requests, none of which can run",
                "a cache with blocks for one of them",
                "raise pool_blocks",
            )
        tokens_before = scheduler.stats.num_output_tokens
        result = self._runner.run(batch)
        seconds = self._runner.last_s
        # an iteration's tokens come when it ends
        self._now_s += seconds
        scheduler.postprocess(batch, result)
        self._record(batch, result, seconds)
        return Iteration(
            start_s,
            seconds,
            len(scheduler.waiting),
            sum(span.end - span.start for span in batch.prefill),
            {group.plan.name: len(group.requests) for group in batch.groups},
            scheduler.stats.num_output_tokens - tokens_before,
            self._policy.decision,
        )

    def _take_arrivals(self) -> None:
        requests, now_s = self._load.requests, self._now_s
        while self._num_arrived < len(requests):
            request = requests[self._num_arrived]
            if request.arrival_s > now_s:
                break
            # a request looks at the clock when it is made
            self._now_s = request.arrival_s
            params = SamplingParams(
                temperature=0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                speculative=request.speculative,
                seed=0,
            )
            self._scheduler.add(
                Request(
                    str(self._num_arrived),
                    [0] * request.num_prompt_tokens,
                    params,
                    max_seq_len=self._limits.max_seq_len,
                    num_drafts=self._num_drafts,
                    index=self._num_arrived,
                    clock=lambda: self._now_s,
                )
            )
            self._num_arrived += 1
        self._now_s = now_s

    def _record(self, batch: Batch, result: RunResult, seconds: float) -> None:
        report = self.report
        report.stats = self._scheduler.stats
        report.end_s = self._now_s
        report.busy_s += seconds
        report.num_iterations += 1
        if batch.groups:
            report.step_s += seconds
            decision = self._policy.decision
            report.num_probes += decision is not None and decision.is_probe
        first = [
            span.request
            for span, token in zip(batch.prefill, result.first_tokens, strict=True)
            if token is not None
        ]
        for request in first:
            report.ttft_s[request.index] = self._now_s - request.arrival_s
        for request in first:
            self._record_end(request)
        for group in batch.groups:
            report.plan_rows[group.plan.name] += len(group.requests)
            for request in group.requests:
                self._record_end(request)

    def _record_end(self, request: Request) -> None:
        if not request.is_finished:
            return
        report, i = self.report, request.index
        report.latency_s[i] = self._now_s - request.arrival_s
        count = len(request.output_token_ids)
        if count > 1:
            report.tpot_s[i] = (report.latency_s[i] - report.ttft_s[i]) / (count - 1)


def _mean(values: Sequence[float]) -> float | None:
    real = [value for value in values if not math.isnan(value)]
    return math.fsum(real) / len(real) if real else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
