"""What an iteration costs besides its passes, where a service and a client share the machine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from specc.cost.latency_table import LatencyTable, StepShape
from specc.load.request import LoadRequest
from specc.load.run import ClientLimits
from specc.load.subject import EngineSubject, Progress
from specc.speculation.plans import OFF, SpecPlan

# requests of each plan, one after the other
_REQUESTS = 4
# gaps so many times longer than the middle one are no iteration's
_LONG = 4.0


def with_overheads(
    table: LatencyTable, subject: EngineSubject, requests: Sequence[LoadRequest], progress: Progress
) -> LatencyTable:
    """The same table with the seconds of an iteration and of a group as requests see them.

    Requests are served alone, with every plan that passes of models or views draft: what the gaps
    between their tokens have beyond passes is the host's part, the service's and the client's
    included, and what a pass takes longer after others than in a row of its own kind.

    Args:
        subject: as loads meet it.
        requests: of a load; the first ones are served.
        progress: plans done, and of how many.
    """
    alone = dataclasses.replace(subject, limits=ClientLimits(max_concurrency=1))
    first = [dataclasses.replace(request, arrival_s=0.0) for request in requests[:_REQUESTS]]
    plans = [p for p in subject.engine.plans.values() if p.speculates and p.asked and not p.tile]
    beyond: dict[str, float] = {}
    for done, plan in enumerate([OFF, *plans]):
        beyond[plan.name] = _beyond(table, plan, alone, first)
        progress(done + 1, len(plans) + 1)
    iteration_s = table.iteration_s + beyond.pop(OFF.name)
    more = [seconds - (iteration_s - table.iteration_s) for seconds in beyond.values()]
    step_s = table.step_s + (statistics.fmean(more) if more else 0.0)
    return dataclasses.replace(table, iteration_s=max(0.0, iteration_s), step_s=max(0.0, step_s))


def _beyond(
    table: LatencyTable, plan: SpecPlan, subject: EngineSubject, requests: Sequence[LoadRequest]
) -> float:
    """Mean seconds of an iteration beyond the table's."""
    run = subject.run(plan.name, requests, lambda done, total: None, None)
    gaps, predicted = [], []
    for result in run.results:
        context = result.num_prompt_tokens + result.num_output_tokens / 2
        for gap in result.gaps_s:
            gaps.append(gap)
            predicted.append(table.iteration([StepShape(plan, 1, context)]))
    if not gaps:
        return 0.0
    usual = _LONG * statistics.median(gaps)
    kept = [(gap, own) for gap, own in zip(gaps, predicted, strict=True) if gap <= usual]
    return statistics.fmean(gap - own for gap, own in kept)
