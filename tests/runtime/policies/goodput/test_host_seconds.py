"""What the host does besides passes counts, apart for passes that it puts together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specc.cost.latency_table import PassPart, StepShape
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.goodput.allocation import GroupLoad
from specc.runtime.policies.goodput.host_seconds import HostSeconds, Kind
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.policies.goodput.step_cost import StepCost
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.live_rig import SLOW
from tests.runtime.policies.goodput.test_live_nodes import STATS, make_requests, new_policy

CHAIN = SpecPlan.from_widths((1,) * 6)
TABLE = replace(SLOW, iteration_s=0.002)


def test_few_measurements_and_pauses_do_not_count() -> None:
    host = HostSeconds(0.5)
    for _ in range(7):
        host.observe(Kind.PLAIN, 0.1)
    assert host(Kind.PLAIN) == 0.5
    host.observe(Kind.PLAIN, 0.1)
    assert host(Kind.PLAIN) == pytest.approx(0.1)
    # of the other kind nothing is known
    assert host(Kind.TOGETHER) == 0.5
    for seconds in (30.0, 30.0):
        host.observe(Kind.PLAIN, seconds)
    assert host(Kind.PLAIN) == pytest.approx(0.1)
    for _ in range(40):
        host.observe(Kind.TOGETHER, -0.1)
    assert host(Kind.TOGETHER) == 0.0


def test_what_was_measured_long_ago_is_forgotten() -> None:
    host = HostSeconds(0.5)
    for _ in range(8):
        host.observe(Kind.TOGETHER, 3.0)
    for _ in range(256):
        host.observe(Kind.PLAIN, 0.1)
    assert host(Kind.TOGETHER) == 3.0
    host.observe(Kind.PLAIN, 0.1)
    assert (host(Kind.TOGETHER), host(Kind.PLAIN)) == (0.5, pytest.approx(0.1))


def observed(policy: GoodputPolicy, groups: list[StepGroup], host_s: float, count: int) -> None:
    """Iterations as they are predicted, but for the host's seconds."""
    for _ in range(count):
        parts = [PassPart(1, g.plan.num_nodes, s.cache_len) for g in groups for s in g.requests]
        pass_s = SLOW.target(parts)
        steps = []
        for group in groups:
            shape = StepShape.of(group.plan, [s.cache_len for s in group.requests])
            drafting = {"draft": SLOW.draft_s(shape)} if group.plan.speculates else {}
            stage_s = drafting | {"verify": pass_s / len(groups), "accept_commit": 0.0}
            after = [s.cache_len + 1 for s in group.requests]
            steps.append(StepResult([0] * len(group.requests), [], after, {}, stage_s))
        timed_s = sum(sum(step.stage_s.values()) for step in steps)
        result = RunResult(
            steps=steps,
            pass_s=pass_s if len(groups) > 1 else 0.0,
            wall_s=timed_s + host_s if host_s else 0.0,
        )
        policy.observe_batch(Batch([], groups), result)


def test_seconds_of_iterations_are_those_that_were_measured() -> None:
    policy = new_policy(CHAIN, table=TABLE, adapts_verification=False)
    a, b = make_requests(2)
    alone, together = [StepGroup(CHAIN, [a, b])], [StepGroup(OFF, [a]), StepGroup(CHAIN, [b])]
    plain = [StepGroup(OFF, [a, b])]
    seconds = policy._seconds
    shapes = {
        Kind.PLAIN: [StepShape(OFF, 2, 600.0)],
        Kind.DRAFTED: [StepShape(CHAIN, 2, 600.0)],
        Kind.TOGETHER: [StepShape(OFF, 1, 300.0), StepShape(CHAIN, 1, 300.0)],
    }
    before = {kind: seconds.iteration(own) for kind, own in shapes.items()}
    # what is not known to have come right after another says nothing
    observed(policy, alone, 0.0, 20)
    assert seconds.iteration(shapes[Kind.DRAFTED]) == pytest.approx(before[Kind.DRAFTED])
    known = {Kind.PLAIN: 0.0005, Kind.DRAFTED: 0.001, Kind.TOGETHER: 0.05}
    for groups, host_s in zip((plain, alone, together), known.values(), strict=True):
        observed(policy, groups, host_s, 20)
    after = {kind: seconds.iteration(own) for kind, own in shapes.items()}
    for kind, host_s in known.items():
        assert after[kind] == pytest.approx(before[kind] - 0.002 + host_s)
    # and so the cost of a division says
    cost = StepCost(seconds, policy._plans, {})
    assert cost([GroupLoad(2, 600.0), GroupLoad()]) == pytest.approx(after[Kind.PLAIN])
    assert cost([GroupLoad(), GroupLoad(2, 600.0)]) == pytest.approx(after[Kind.DRAFTED])
    both = [GroupLoad(1, 300.0), GroupLoad(1, 300.0)]
    assert cost(both) == pytest.approx(after[Kind.TOGETHER])
    cut = cost.cut_pass([GroupLoad(), GroupLoad(2, 600.0)])
    assert cut is not None
    drafting_s = SLOW.draft_s(shapes[Kind.DRAFTED][0])
    assert cut.besides == pytest.approx(0.05 + drafting_s)


def test_iterations_with_prompts_say_nothing_of_the_host() -> None:
    policy = new_policy(CHAIN, table=TABLE)
    (request,) = make_requests(1)
    (other,) = make_requests(1)
    group = StepGroup(CHAIN, [request])
    step = StepResult([0], [], [301], {}, {"draft": 0.06, "verify": 0.1})
    for _ in range(20):
        batch = Batch([Span(other, 0, 4)], [group])
        policy.observe_batch(batch, RunResult([None], steps=[step], pass_s=0.1, wall_s=9.0))
    assert {policy._seconds.host_s(kind) for kind in Kind} == {0.002}


def test_nothing_is_cut_where_the_host_takes_longer_than_it_saves() -> None:
    requests = [*make_requests(1), *make_requests(1, max_tokens=3)]
    requests[1].request_id = "ends"
    policy = new_policy(CHAIN, acceptance={"draft_0": [[0.95]]}, table=TABLE)
    # and plain iterations need not be timed
    policy._next_plain = 1000
    policy.choose_each(requests, STATS)
    live = policy.live_nodes(CHAIN, requests)
    assert live == (7, 3)
    pass_s = SLOW.target([PassPart(2, 10, 600)])
    step = StepResult([0, 0], [], [301, 301], {}, {"draft": 0.06, "verify": pass_s})
    found = []
    for host_s in (0.001, 2 * pass_s):
        for _ in range(40):
            batch = Batch([], [StepGroup(CHAIN, requests, live=live)])
            wall_s = 0.06 + pass_s + host_s
            policy.observe_batch(batch, RunResult(steps=[step], pass_s=pass_s, wall_s=wall_s))
        policy._decide(requests)
        found.append(policy.live_nodes(CHAIN, requests))
    assert found == [(7, 3), ()]
