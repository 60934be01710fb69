"""What a service does at the moment, for metrics, pages and orchestrators."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specc.runtime.scheduling.plan_counts import PlanCounts
from specc.speculation.metrics import SpecStats

if TYPE_CHECKING:
    from specc.runtime.core import EngineCore
    from specc.runtime.policies.base import Decision


class Health(enum.Enum):
    """Whether requests can be served.

    OK: yes. FAILING: the last iteration failed, a moment ago; the next one may not. STALLED: an
    iteration does not end. DRAINING: open requests are served, no others. DEAD: no more; the
    process has to be started again.
    """

    OK = "ok"
    FAILING = "failing"
    STALLED = "stalled"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True)
class ServiceState:
    """A look at a service.

    Args:
        num_running: requests that have cache blocks.
        num_waiting: requests that wait for a slot and blocks.
        num_blocks: of the cache.
        num_blocks_cached: that no request uses and that hold prefixes for later ones.
        prefix_hits: prompt tokens found in the cache so far.
        prefix_queries: prompt tokens looked for so far.
        plans: requests of the last iteration by plan.
        decision: of the goodput policy, None with others.
        up_s: seconds since the service began.
        num_failures: iterations of the engine that failed.
        measured: share of the engine's passes that is measured, while they are measured; else None.
        plan_counts: of all steps so far.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    prefix_hits: int
    prefix_queries: int
    plans: dict[str, int]
    decision: Decision | None
    stats: SpecStats
    up_s: float
    num_failures: int = 0
    measured: float | None = None
    plan_counts: PlanCounts = field(default_factory=PlanCounts)

    @property
    def cache_usage(self) -> float:
        """Share of the cache's blocks that requests use."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0


def state_of(
    core: EngineCore, up_s: float, num_failures: int = 0, measured: float | None = None
) -> ServiceState:
    """Look at a service; in its engine's thread."""
    scheduler = core.scheduler
    pool = core.engine.cache.allocator
    return ServiceState(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=pool.num_blocks,
        num_blocks_used=pool.num_blocks - pool.num_free,
        num_blocks_cached=pool.num_cached,
        prefix_hits=scheduler.stats.num_cached_tokens,
        prefix_queries=scheduler.num_looked_up,
        plans=dict(scheduler.last_plans),
        decision=scheduler.policy.decision,
        stats=scheduler.stats.copy(),
        up_s=up_s,
        num_failures=num_failures,
        measured=measured,
        plan_counts=scheduler.plan_counts.copy(),
    )
