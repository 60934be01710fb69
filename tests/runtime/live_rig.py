"""Policies that say how many nodes of each request are verified."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from specc.cost.latency_table import LatencyTable, PassSeconds
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan

# of metrics, which two backends that do the same have alike
COUNTERS = (
    "num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_tokens", "accepted_at_depth",
)  # fmt: skip


class ScriptedNodes(FixedPolicy):
    """One plan; how many nodes are live follows from the request and what it has emitted."""

    def __init__(self, plan: SpecPlan, most: int | None = None) -> None:
        super().__init__(plan.name)
        self._most = most or plan.num_nodes
        self.asked: list[tuple[int, ...]] = []

    def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        def live(request: Request) -> int:
            seed = f"{request.request_id} {len(request.token_ids)}"
            return 1 + zlib.crc32(seed.encode()) % self._most

        self.asked.append(tuple(map(live, requests)))
        return self.asked[-1]


class EveryNode(FixedPolicy):
    """One number for all requests."""

    def __init__(self, plan: SpecPlan, live: int) -> None:
        super().__init__(plan.name)
        self._live = live

    def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        return (self._live,) * len(requests)


# every node of a pass takes a tenth of a second, after the first
SLOW = LatencyTable(
    PassSeconds({1: 1.0, 101: 11.0}, {1: 0.0}, "target"),
    {"draft_0": PassSeconds({1: 0.01, 1000: 0.01}, {1: 0.0}, "draft_0")},
)


class ByAcceptance(GoodputPolicy):
    """Decides each step anew, and learns no seconds: backends that differ in these decide alike.

    `groups` are those of steps that drafted.
    """

    chooses_late = False
    needs_results = True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, adapts_verification=True, **options)
        self.groups: list[StepGroup] = []

    def observe(self, group: StepGroup, step: StepResult) -> None:
        super().observe(group, step)
        if group.plan.speculates:
            self.groups.append(group)

    def observe_batch(self, batch: Batch, result: RunResult) -> None:
        self._left = 0
