"""Deciding is as rare as it is slow."""

from __future__ import annotations

import pytest

from specc.cost.roofline import roofline
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.policy import GoodputPolicy
from tests.runtime.policies.goodput.test_policy import PLANS, Engine, make_requests

ITERATIONS = 600


def counted(monkeypatch, tick_s: float) -> tuple[int, int, int]:
    """Decisions, looks at the load, and in the end at seconds of steps.

    Each look at the clock finds it later by a tick.
    """
    now = [0.0]

    def clock() -> float:
        now[0] += tick_s
        return now[0]

    table = roofline()
    policy = GoodputPolicy(PLANS, table, {"draft_0": [[0.8]]}, clock=clock)
    counts = {"_decide": 0, "_prepare": 0}
    for name in counts:
        real = getattr(policy, name)

        def count(*args, name=name, real=real):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(policy, name, count)
    due = []
    watch = policy._seconds.observe_prompts

    def watched(batch, result, is_due):
        due.append(is_due)
        watch(batch, result, is_due)

    monkeypatch.setattr(policy._seconds, "observe_prompts", watched)
    engine, requests = Engine(policy, table), make_requests(4)
    for _ in range(ITERATIONS):
        engine.step(requests, [0.8] * 4)
    # in the beginning each of them is looked at
    assert all(due[: TUNED.often])
    return counts["_decide"], counts["_prepare"], sum(due[TUNED.often :])


def test_what_decides_at_once_decides_often(monkeypatch) -> None:
    decisions, looks, watched = counted(monkeypatch, 0.0)
    assert decisions >= ITERATIONS // 10
    assert looks >= ITERATIONS // 20
    assert watched == pytest.approx((ITERATIONS - TUNED.often) / TUNED.seldom, abs=1)


def test_what_decides_slowly_decides_rarely(monkeypatch) -> None:
    """Iterations take 7 ms. Decisions hold longer one after the other, looks at once."""
    decisions, looks, watched = counted(monkeypatch, 1.0)
    assert 8 <= decisions <= 16
    assert 4 <= looks <= 7
    assert 2 <= watched <= 4
