"""Runs what a policy chooses, live nodes included: seconds of a table, acceptance by dice."""

from __future__ import annotations

import random

from specc.cost.latency_table import LatencyTable, PassPart, StepShape
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
from specc.runtime.scheduling.request import Request
from specc.speculation.metrics import SpecStats


class DiceEngine:
    """One pass of the target for all groups.

    Args:
        table: seconds, which are those of the policy.
    """

    def __init__(self, policy: GoodputPolicy, table: LatencyTable, seed: int = 1) -> None:
        self._policy, self._table = policy, table
        self._random = random.Random(seed)
        # of each step: plans, and request → live nodes of those that draft
        self.names: list[list[str]] = []
        self.live: list[dict[str, int]] = []
        self.last_s = 0.0

    def step(self, requests: list[Request], rates: list[float]) -> None:
        """One iteration; a level is accepted with the request's rate where the one before is."""
        policy, table = self._policy, self._table
        policy.choose(len(requests), SpecStats())
        names = policy.choose_each(requests, SpecStats())
        rate_of = dict(zip([s.request_id for s in requests], rates, strict=True))
        groups, steps, parts = [], [], []
        live_of: dict[str, int] = {}
        self.last_s = table.iteration_s
        for name in dict.fromkeys(names):
            plan = next(plan for plan in policy._plans if plan.name == name)
            own = [s for s, chosen in zip(requests, names, strict=True) if chosen == name]
            live = policy.live_nodes(plan, own) if plan.speculates else ()
            group = StepGroup(plan, own, live=live)
            shape = StepShape.of(plan, [s.cache_len for s in own], group.num_nodes)
            draft_s = table.draft_s(shape)
            nodes = live or (plan.num_nodes,) * len(own)
            parts += [PassPart(1, count, s.cache_len) for s, count in zip(own, nodes, strict=True)]
            accepted = []
            for place, request in enumerate(own):
                depth = len(group.levels(place)) if plan.speculates else 0
                if plan.speculates:
                    live_of[request.request_id] = nodes[place]
                accepted.append(self._accepted(depth, rate_of[request.request_id]))
                request.cache_len += accepted[-1] + 1
                request.draft_lens[0] = request.cache_len
            groups.append(group)
            after = [s.cache_len for s in own]
            steps.append(StepResult(accepted, [], after, {}, {"draft": draft_s}))
            self.last_s += draft_s
        pass_s = table.target(parts)
        self.last_s += pass_s
        for group, step in zip(groups, steps, strict=True):
            policy.observe(group, step)
        policy.observe_batch(Batch([], groups), RunResult(steps=steps, pass_s=pass_s))
        self.names.append(list(names))
        self.live.append(live_of)

    def _accepted(self, depth: int, rate: float) -> int:
        count = 0
        while count < depth and self._random.random() < rate:
            count += 1
        return count
