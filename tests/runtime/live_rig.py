"""Policies that say how many nodes of each request are verified."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from specc.runtime.policies.base import FixedPolicy
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan


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
