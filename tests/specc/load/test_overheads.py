"""The host's part of an iteration, from gaps between tokens of requests that are served alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from specc.cost.latency_table import LatencyTable, StepShape
from specc.cost.roofline import roofline
from specc.load.overheads import with_overheads
from specc.load.request import LoadRequest
from specc.load.result import Chunk, LoadRun, RequestResult
from specc.load.run import ClientLimits
from specc.speculation.plans import OFF, SpecPlan

PLANS = {
    plan.name: plan
    for plan in (
        OFF,
        SpecPlan.from_widths((1, 1)),
        SpecPlan.from_widths((2, 1)),
        SpecPlan.from_widths((1, 1), ("lookup-2",)),
    )
}
HOST_S, GROUP_S = 0.002, 0.0005


@dataclass
class Served:
    """Every iteration takes what the table says, and so much more; one is held up."""

    table: LatencyTable
    limits: ClientLimits
    engine: Any
    served: list[str]

    def run(
        self, policy: str, requests: Sequence[LoadRequest], progress: Any, trace: Any
    ) -> LoadRun:
        assert self.limits.max_concurrency == 1
        assert all(request.arrival_s == 0 for request in requests)
        self.served.append(policy)
        plan, results = PLANS[policy], []
        for request in requests:
            context = request.num_prompt_tokens + request.num_output_tokens / 2
            gap = self.table.iteration([StepShape(plan, 1, context)])
            gap += HOST_S + GROUP_S * plan.speculates
            times = [1 + gap * i for i in range(request.num_output_tokens)]
            times[-1] += 9 * (request.index == 0)
            results.append(
                RequestResult(
                    request.index,
                    0.0,
                    0.0,
                    times[-1],
                    [Chunk(time_s, 1) for time_s in times],
                    times[0],
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                )
            )
        return LoadRun(results, 1.0)


def test_what_gaps_have_beyond_passes_is_the_hosts():
    table = roofline()
    subject = Served(table, ClientLimits(), SimpleNamespace(plans=PLANS), [])
    requests = [LoadRequest(i, i / 2, [0] * 30, 30, 20) for i in range(9)]
    done: list[tuple[int, int]] = []
    found = with_overheads(table, subject, requests, lambda *step: done.append(step))  # type: ignore[arg-type]
    assert found.iteration_s == pytest.approx(table.iteration_s + HOST_S)
    assert found.step_s == pytest.approx(table.step_s + GROUP_S)
    # a plan without a model says nothing of those with one
    assert subject.served == ["off", "chain-2", "tree-2-1"]
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_nothing_is_not_below_nothing():
    slow = roofline().scaled(target=4, drafts=4)
    subject = Served(roofline(), ClientLimits(), SimpleNamespace(plans=PLANS), [])
    requests = [LoadRequest(0, 0.0, [0] * 30, 30, 20)]
    found = with_overheads(slow, subject, requests, lambda *step: None)  # type: ignore[arg-type]
    assert found.iteration_s == 0.0
    assert found.step_s >= 0.0
