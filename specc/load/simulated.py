"""Loads in simulated time: the real scheduler and policies, seconds from a latency table.

How often drafts are accepted is told, or taken from what runs of the engine accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specc.close_name import advice
from specc.cost.latency_table import LatencyTable
from specc.errors import ConfigError, RequestError
from specc.load.decisions import DecisionTrace
from specc.load.request import LoadRequest
from specc.load.result import LoadRun, RequestResult
from specc.load.subject import Progress, check_adapting
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.policies.base import Policy
from specc.runtime.policies.named import GOODPUT
from specc.simulate.comparison import SIMULATED, make_simulated_policy
from specc.simulate.load import Drafting, Load, SimulatedRequest
from specc.simulate.simulator import Iteration, Limits, simulate
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan


@dataclass
class SimulatedSubject:
    """The real scheduler and policies on a latency table's seconds.

    Args:
        plans: `off` included.
        acceptance: by depth and sibling rank, of every draft.
        seed: of the dice.
        profile: what `specc tune` measured of acceptance, which the policy starts from; None
            leaves it to learn.
        adapts_verification: as of `EngineSubject`.
    """

    table: LatencyTable
    plans: Mapping[str, SpecPlan]
    limits: Limits
    acceptance: Sequence[Sequence[float]]
    seed: int = 0
    profile: Mapping[str, Sequence[Sequence[float]]] | None = None
    adapts_verification: bool = False

    def check(self, policies: Sequence[str]) -> None:
        for policy in policies:
            if policy not in self.plans and policy not in SIMULATED:
                raise RequestError(
                    f"policy {policy!r} in a simulation",
                    f"{', '.join(SIMULATED)} or a plan: {', '.join(self.plans)}",
                    advice(policy, [*SIMULATED, *self.plans], "choose one of them"),
                )
        if self.adapts_verification:
            check_adapting(policies)
            self._policy(GOODPUT)

    def run(
        self,
        policy: str,
        requests: Sequence[LoadRequest],
        progress: Progress,
        trace: DecisionTrace | None,
    ) -> LoadRun:
        drafts = {draft for plan in self.plans.values() for draft in plan.drafts}
        drafting = Drafting(dict.fromkeys(drafts, self.acceptance))
        simulated = [_simulated(request, len(requests), drafting) for request in requests]
        load = Load(simulated, self.seed)
        chosen = self._policy(policy)

        def observe(iteration: Iteration) -> None:
            if trace is not None and iteration.decision is not None and iteration.plans:
                trace.take(
                    iteration.decision,
                    time_s=iteration.start_s,
                    running=sum(iteration.plans.values()),
                    waiting=iteration.num_waiting,
                    seconds=iteration.seconds,
                    num_tokens=iteration.num_tokens,
                    num_prompt_tokens=iteration.num_prefill_tokens,
                )

        report = simulate(load, self.table, self.plans, chosen, self.limits, trace=observe)
        progress(len(requests), len(requests))
        results = [
            RequestResult(
                index=request.index,
                arrival_s=request.arrival_s,
                start_s=request.arrival_s,
                end_s=request.arrival_s + latency_s,
                first_s=request.arrival_s + ttft_s,
                num_prompt_tokens=request.num_prompt_tokens or 0,
                num_output_tokens=request.num_output_tokens,
                finish_reason="length",
            )
            for request, latency_s, ttft_s in zip(
                requests, report.latency_s, report.ttft_s, strict=True
            )
        ]
        rows = max(1, sum(report.plan_rows.values()))
        shares = {name: count / rows for name, count in sorted(report.plan_rows.items())}
        return LoadRun(results, report.end_s, report.stats, is_virtual=True, plan_shares=shares)

    def _policy(self, name: str) -> Policy:
        return make_simulated_policy(
            name,
            self.plans,
            self.table,
            self.limits,
            self.profile,
            adapts_verification=self.adapts_verification and name == GOODPUT,
        )


def plans_of(names: Sequence[str]) -> dict[str, SpecPlan]:
    """Plans by their names, such as `chain-4` and `tree-3-2-1`; off is always among them.

    Raises:
        RequestError: a name that does not tell the shape.
    """
    plans = {OFF.name: OFF}
    for name in names:
        kind, *widths = name.split("-")
        numbers = [int(width) for width in widths if width.isdecimal() and int(width)]
        if name in (OFF.name, *SIMULATED):
            continue
        if kind == "chain" and len(numbers) == len(widths) == 1:
            numbers = [1] * numbers[0]
        elif kind != "tree" or not numbers or len(numbers) != len(widths):
            raise RequestError(
                f"plan {name!r} without an engine",
                f"off, {', '.join(SIMULATED)}, or a name that tells a shape: chain-4, tree-3-2-1",
                advice(
                    name, SIMULATED, "choose one of them, or name the engine that has this plan"
                ),
            )
        plans[name] = SpecPlan.from_widths(tuple(numbers))
    return plans


def limits_of(engine: Engine) -> Limits:
    """What a simulation of this engine holds."""
    shape = engine.cache.shape
    return Limits(
        max_num_seqs=shape.max_num_seqs,
        max_seq_len=engine.max_seq_len,
        prefill_chunk=engine.prefill_chunk,
        block_size=shape.block_size,
        shares_pass=EngineCore(engine, OFF.name).runner.shares_pass,
    )


def _simulated(request: LoadRequest, total: int, drafting: Drafting) -> SimulatedRequest:
    return SimulatedRequest(
        request.arrival_s,
        request.num_prompt_tokens or 1,
        request.num_output_tokens,
        drafting,
        load_share=request.index / max(1, total - 1),
    )


def measured_acceptance(
    counted: Mapping[str, SpecStats], plans: Mapping[str, SpecPlan]
) -> list[list[float]]:
    """Acceptance by depth and sibling rank that would have led to these counters.

    Chains tell how often the first choice is right. What trees accept beyond that is the second
    rank's: deeper ranks cannot be told apart by counters, and lead to the same depths.

    Args:
        counted: plan → counters of runs in which nothing else drafted.
    Raises:
        ConfigError: no such run.
    """
    chains: list[list[int]] = []
    trees: list[list[int]] = []
    for name, stats in counted.items():
        plan = plans[name]
        reached = [stats.num_spec_steps, *stats.accepted_at_depth]
        if plan.speculates and set(plan.widths) == {1}:
            chains.append(reached)
        elif plan.speculates and plan.widths:
            wide = next((i for i, width in enumerate(plan.widths) if width == 1), len(plan.widths))
            trees.append(reached[: 1 + wide])
    first, any_rank = _accepted_shares(chains), _accepted_shares(trees)
    if not first and not any_rank:
        raise ConfigError(
            "no run of a fixed chain or tree",
            "one that shows how often drafts are right",
            "add for example chain-4 to --policies, or pass --acceptance",
        )
    # without a chain nobody tells ranks apart
    first = first or any_rank
    rows = []
    for depth, share in enumerate(first):
        more = any_rank[depth] - share if depth < len(any_rank) else 0.0
        rows.append([share, max(0.0, more)])
    return rows


def _accepted_shares(runs: Sequence[Sequence[int]]) -> list[float]:
    """Of each depth, given the one before; up to the last depth that anyone reached.

    Args:
        runs: steps that reached depth 0, 1, … of each plan, as deep as it goes.
    """
    shares = []
    for depth in range(max(map(len, runs), default=1) - 1):
        deep = [reached for reached in runs if len(reached) > depth + 1]
        before = sum(reached[depth] for reached in deep)
        if not before:
            break
        shares.append(sum(reached[depth + 1] for reached in deep) / before)
    return shares
